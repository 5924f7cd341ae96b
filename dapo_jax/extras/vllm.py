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

from dapo_jax.rollout.requests import carry_groups
from dapo_jax.runtime.keys import post
from dapo_jax.types.contracts import do_nothing
from dapo_jax.types.structs import (
    Completion,
    Finished,
    PartialGroup,
    Prompt,
    Request,
    RolloutKey,
    SamplerCounts,
    SamplingRule,
    Stop,
)

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
        self.key: RolloutKey | None = None
        self.counts = SamplerCounts()
        self._server, self._save, self._seed = server, save, seed
        self._pool = concurrent.futures.ThreadPoolExecutor(server.slots)
        self._running: dict[concurrent.futures.Future[Completion], Request] = {}
        self._adapter = ""  # name of the loaded version
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="dapo_jax_adapters_"))
        self._rule = SamplingRule()

    @property
    def idle(self) -> bool:
        return not self._running

    @property
    def room(self) -> int:
        return self._server.slots - len(self._running)

    def begin(self, params: Any, key: RolloutKey, rule: SamplingRule) -> None:
        """Replace the adapter: abort all requests, forget cached prompts, load the new version."""
        post, before = self._server.post, self._adapter
        self.stop(keep=False)
        name = f"policy-{key.policy_step}-{uuid.uuid4().hex[:8]}"
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
        self.key, self._rule = key, rule
        self.counts = SamplerCounts()

    def submit(
        self,
        prompt: Prompt,
        samples: int | Sequence[int],
        rule: SamplingRule | None = None,
        budget: int | None = None,
        stop: Stop = Stop(),  # noqa: B008
        *,
        carried: PartialGroup | None = None,
    ) -> Request:
        assert self.key is not None  # set by `begin`
        request = Request(prompt, samples, rule or self._rule, budget, stop, self.key.step)
        if stop.texts:
            raise ValueError(f"prompt {prompt.id!r}: stop.texts = {stop.texts}: must be empty")
        if carried:
            request.finished = {done.sample: done for done in carried.finished}
        for sample in request.samples:
            if sample not in request.finished:
                future = self._pool.submit(self._ask, self._adapter, self.key, request, sample)
                self._running[future] = request
        return request

    def cancel(self, request: Request) -> None:
        """Forget the responses of a request; the server finishes those that it has begun."""
        for future in [future for future, other in self._running.items() if other is request]:
            future.cancel()
            del self._running[future]
            self.counts.abandoned_responses += 1

    def _ask(self, adapter: str, key: RolloutKey, request: Request, sample: int) -> Completion:
        parts = [self._seed, key.purpose, key.step, request.prompt.index, sample]
        digest = hashlib.sha256(json.dumps(parts).encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
        rule, limit = request.rule or self._rule, self._server.response_tokens
        body = {
            "model": adapter,
            "prompt": request.prompt.tokens.tolist(),
            "max_tokens": min(limit, request.budget or limit),
            "stop_token_ids": [*self._server.end_ids, *request.stop.ids],
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
        return Completion(tokens, logprobs, cut, key.policy_step, "", sample)

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[Finished]:
        """Wait a moment for responses. Raise `EngineUnavailable`."""
        meanwhile()
        if not self._running:
            return []
        wait, first = concurrent.futures.wait, concurrent.futures.FIRST_COMPLETED
        ended, _ = wait(self._running, POLL_SECONDS, first)
        self.counts.bursts += 1
        finished: list[Finished] = []
        for future in [future for future in self._running if future in ended]:
            group, response = self._running.pop(future), future.result()
            self.counts.tokens += len(response)
            self.counts.responses += 1
            finished += group.finish(response)
        return finished

    def stop(self, keep: bool) -> list[PartialGroup]:
        """Stop everything; responses that have begun are sampled again."""
        groups = dict.fromkeys(self._running.values())
        self.counts.abandoned_responses += len(self._running)
        for future in self._running:
            future.cancel()
        if self._running:
            self._running.clear()
            self._server.post("/pause?mode=abort")
            self._server.post("/resume")
        return carry_groups((group, None) for group in groups if keep)

    def close(self) -> None:
        self.stop(keep=False)
        self.key = None
