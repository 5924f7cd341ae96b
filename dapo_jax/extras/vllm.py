"""A sampler behind the HTTP interface of vLLM, for runs that train adapters.

The server must be started with `--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and
VLLM_SERVER_DEV_MODE=1, and serve this process alone. It keeps neither random keys nor rounding of
our programs, so that such a run can't be repeated.

Interface: docs.vllm.ai, "OpenAI-Compatible Server", "LoRA adapters"; pause, resume and the reset of
the prefix cache are in vllm/entrypoints/serve/.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
import shutil
import tempfile
import urllib.error
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.rollout.requests import PendingGroup, carry_groups
from dapo_jax.runtime.keys import post
from dapo_jax.types.contracts import FinishedResponses, do_nothing
from dapo_jax.types.structs import Completion, PartialGroup, Prompt, SamplerCounts, SamplingRule

POLL_SECONDS = 0.2  # between looks at messages of the trainer
TIMEOUT_SECONDS = 3600.0  # of a response
SEED_BITS = 62  # of a request's seed, a signed 64-bit number


class EngineUnavailable(OSError):
    """The server does not answer, or refuses a request."""


@dataclasses.dataclass(frozen=True)
class VllmServer:
    """Address of a server, and the limits of its responses."""

    url: str
    end_ids: tuple[int, ...]  # tokens that end a response
    response_tokens: int
    slots: int  # requests at a time

    def post(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the server's answer. Raise `EngineUnavailable`."""
        content = json.dumps(body).encode() if body is not None else b""
        headers = {"Content-Type": "application/json"}
        try:
            return post(self.url.rstrip("/") + path, content, headers, TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            text = error.read(1000).decode(errors="replace")
            raise EngineUnavailable(f"{path}: {error.code} {text}") from None
        except OSError as error:
            raise EngineUnavailable(f"{path}: {error}") from None


class VllmSampler:
    """A `contracts.Sampler` that asks a vLLM server for one response per request.

    Args:
        save: writes the parameters that `begin` receives into a folder in PEFT's format.
        seed: part of the requests' seeds.
    """

    environments = None

    def __init__(self, server: VllmServer, save: Callable[[Any, pathlib.Path], None], seed: int):
        self.counts = SamplerCounts()
        self._server, self._save, self._seed = server, save, seed
        self._pool = concurrent.futures.ThreadPoolExecutor(server.slots)
        self._running: dict[concurrent.futures.Future[Completion], PendingGroup] = {}
        self._adapter = ""  # name of the loaded version
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="dapo_jax_adapters_"))
        self._keyed: tuple[int, int, int, SamplingRule] = (0, 0, 0, SamplingRule())

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def room(self) -> int:
        return self._server.slots - len(self._running)

    def prepare(self, params: Any, policy_step: int) -> None:
        """Do nothing: the server loads adapters when nothing runs."""

    def begin(
        self,
        params: Any,
        *,
        purpose: int,
        step: int,
        rule: SamplingRule,
        policy_step: int | None = None,
    ) -> None:
        """Replace the adapter: abort all requests, forget cached prompts, load the new version."""
        post, before = self._server.post, self._adapter
        self.abandon()
        version = step if policy_step is None else policy_step
        name = f"policy-{version}-{uuid.uuid4().hex[:8]}"
        folder = self._folder / name
        folder.mkdir()
        self._save(params, folder)
        post("/pause?mode=abort")
        try:
            post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            if before:
                post("/v1/unload_lora_adapter", {"lora_name": before})
                shutil.rmtree(self._folder / before, ignore_errors=True)
            post("/reset_prefix_cache")
        finally:
            post("/resume")
        self._adapter = name
        self._keyed = purpose, step, version, rule
        self.counts = SamplerCounts()

    def submit(self, prompt: Prompt, samples: int, carried: PartialGroup | None = None) -> None:
        finished = {done.sample: done for done in carried.finished} if carried else {}
        self._add(PendingGroup(prompt, range(samples), True, self._keyed[1], finished))

    def submit_each(self, prompt: Prompt, samples: Sequence[int]) -> None:
        self._add(PendingGroup(prompt, samples, False, self._keyed[1]))

    def _add(self, group: PendingGroup) -> None:
        if len(group.prompt.tokens) == 0:
            raise ValueError(f"prompt {group.prompt.id!r} has no tokens")
        for sample in group.samples:
            if sample not in group.finished:
                future = self._pool.submit(self._request, self._adapter, group.prompt, sample)
                self._running[future] = group

    def _request(self, adapter: str, prompt: Prompt, sample: int) -> Completion:
        purpose, step, policy_step, rule = self._keyed
        key = json.dumps([self._seed, purpose, step, prompt.index, sample]).encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> (64 - SEED_BITS)
        body = {
            "model": adapter,
            "prompt": prompt.tokens.tolist(),
            "max_tokens": self._server.response_tokens,
            "stop_token_ids": list(self._server.end_ids),
            "seed": seed,
            "temperature": rule.temperature,
            "top_p": rule.top_p,
            "top_k": rule.top_k,
            "logprobs": 0,  # of the sampled tokens alone
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = json.loads(self._server.post("/v1/completions", body))
        (choice,) = answer["choices"]
        if answer["model"] != adapter or choice["finish_reason"] not in ("stop", "length"):
            text = f"{answer['model']!r} ended with {choice['finish_reason']!r}"
            raise EngineUnavailable(f"/v1/completions: {text}, asked was {adapter!r}")
        tokens = np.array(choice["token_ids"], np.int32)
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        cut = choice["finish_reason"] == "length"
        return Completion(tokens, logprobs, cut, policy_step, "", sample)

    def decode_burst(self, meanwhile: Callable[[], None] = do_nothing) -> list[FinishedResponses]:
        """Wait a moment for responses. Raise `EngineUnavailable`."""
        meanwhile()
        if not self._running:
            return []
        wait, first = concurrent.futures.wait, concurrent.futures.FIRST_COMPLETED
        ended, _ = wait(self._running, POLL_SECONDS, first)
        self.counts.bursts += 1
        finished: list[FinishedResponses] = []
        for future in [future for future in self._running if future in ended]:
            group, response = self._running.pop(future), future.result()
            self.counts.tokens += len(response)
            self.counts.responses += 1
            finished += group.finish(response)
        return finished

    def suspend(self) -> list[PartialGroup]:
        """Stop everything; responses that have begun are sampled again."""
        groups = dict.fromkeys(self._running.values())
        self.abandon()
        return carry_groups((group, None) for group in groups)

    def abandon(self) -> None:
        self.counts.abandoned_responses += len(self._running)
        for future in self._running:
            future.cancel()
        if self._running:
            self._running.clear()
            self._server.post("/pause?mode=abort")
            self._server.post("/resume")

    def release(self) -> None:
        self.abandon()

    def resident(self) -> None:
        return None
