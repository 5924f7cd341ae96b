"""vLLM's servers as a run's sampler, and their settings, `config.extras.vllm`."""

from typing import ClassVar

from dapo_jax.config.settings import Section, setting
from dapo_jax.types.rules import Urls


class VllmSettings(Section):
    """Servers of vLLM that sample for a run (`sampler.engine=vllm`)."""

    combinations: ClassVar = """
        sampler.engine!=vllm -> extras.vllm.
        sampler.engine=vllm -> extras.vllm.servers!=: URLs such as http://HOST:8000
        sampler.engine=vllm -> lora.rank>0: a running server loads adapters alone
        sampler.engine=vllm -> environment.name= environment.tools= algorithm.router_replay!=sampler
        sampler.engine=vllm algorithm.rejection=none -> algorithm.importance_cap>0: vLLM rounds
        sampler.engine=vllm run_dir=*://* -> extras.vllm.folder!=: a folder that servers see
    """
    servers: Urls = setting("", "URLs of the servers, comma-separated.", may_change=True)
    folder: str = setting("", "Adapters' folder for all; empty: RUN/adapters.", may_change=True)
