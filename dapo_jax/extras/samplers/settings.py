"""Settings of samplers in other processes: `config.extras.samplers`, and `dapo-jax sampler`."""

from typing import ClassVar

from dapo_jax.config.experiment import OneMesh
from dapo_jax.config.settings import Section, part, setting
from dapo_jax.types.rules import CountOr0, Port, Positive, Url


class SamplersSettings(Section):
    """Processes of `dapo-jax sampler` that sample groups for a run (`sampler.engine=samplers`)."""

    combinations: ClassVar = """
        sampler.engine!=samplers -> extras.samplers.
        sampler.engine=samplers -> rollout.carry_over=none: they return whole groups
    """
    host: str = setting("127.0.0.1", "Address for samplers.", may_change=True)
    port: Port = setting(8200, "Port for samplers; 0: any that is free.", may_change=True)
    key_file: str = setting("", "File with samplers' key; empty: DAPO_API_KEY.", may_change=True)
    lease_seconds: Positive = setting(60.0, "Silence that ends a sampler's lease.", may_change=True)


class SamplerConfig(Section):
    """A process that samples groups for a trainer (`dapo-jax sampler`)."""

    combinations: ClassVar = """
        -> run!=: the run_dir of a run
        -> trainer!=: a URL such as http://HOST:8200
    """
    run: str = setting("", "The run_dir of the run, for its settings and the policy's weights.")
    trainer: Url = setting("", "URL of the trainer, as http://HOST:8200.")
    model: str = setting("", "Its model folder; empty: the run's.")
    key_file: str = setting("", "File with the trainer's key; empty: DAPO_API_KEY, if set.")
    slots: CountOr0 = setting(0, "Responses decoded in parallel; 0: as the trainer.")
    pages: CountOr0 = setting(0, "Cache pages; 0: as the trainer.")
    stall_seconds: Positive = setting(
        1800.0, "Time in one burst, compiling included, after which its leases end."
    )
    mesh: OneMesh = part(OneMesh)
