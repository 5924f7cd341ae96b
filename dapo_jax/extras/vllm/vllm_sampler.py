"""vLLM as a run's sampler: `sampler.engine=vllm`, for runs that train adapters.

A server must be started with `--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and
VLLM_SERVER_DEV_MODE=1, and serve this run alone. Such a run can't be repeated, and full weights
can't be sent: vLLM 0.32 receives them by NCCL, CUDA IPC or Ray.
"""

import collections
import contextlib
import dataclasses
import json
import pathlib
import shutil
import threading
import time
import urllib.error
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from dapo_jax.model.save_huggingface import save_adapters
from dapo_jax.rollout.requests import carry_groups
from dapo_jax.run.build import SamplerParts
from dapo_jax.runtime import processes, sharding
from dapo_jax.runtime.keys import post
from dapo_jax.types import structs
from dapo_jax.types.contracts import do_nothing
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Completion, PartialGroup, Request, RolloutKey, SamplingRule

POLL_SECONDS = 0.2  # between looks at signals
RETRY_SECONDS = 10.0  # before a server that failed is tried again
RESPONSE_SECONDS = 3600.0  # after which a server is left out
FIELD = "extras.vllm.servers"
PROCESSED = "servers with --logprobs-mode=processed_logprobs, for temperature, top_p or top_k"
# A model's generation_config.json would change what a request does not mention.
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
PLAIN |= {"return_token_ids": True, "skip_special_tokens": False}


@dataclasses.dataclass(eq=False)
class Server:
    """A server, and the adapter that it has. Its methods raise OSError."""

    url: str
    version: str = ""  # of the adapter that it can sample with
    is_checked: bool = False  # its log-probs are those after temperature and truncation
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def post(self, path: str, body: Any = None, seconds: float = 60.0) -> bytes:
        """Return the server's answer."""
        content = b"" if body is None else json.dumps(body).encode()
        try:
            return post(self.url + path, content, {"Content-Type": "application/json"}, seconds)
        except urllib.error.HTTPError as error:
            raise OSError(f"{path}: {error} {error.read(1000).decode(errors='replace')}") from None

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a response."""
        return json.loads(self.post("/v1/completions", PLAIN | body, RESPONSE_SECONDS))["choices"][
            0
        ]

    def check(self, rule: SamplingRule) -> None:
        """Raise `ConfigError` unless log-probs are those that responses by a rule have."""
        if self.is_checked or rule == SamplingRule():
            return
        body = SamplingRule(2.0, 1.0, top_k=1)._asdict() | {"logprobs": 1, "seed": 0}
        choice = self.complete(body | {"prompt": [0, 1, 2], "max_tokens": 1})
        # After truncation to one token, its log-prob is 0.
        self.is_checked = abs(max(choice["logprobs"]["top_logprobs"][0].values())) < 1e-3
        require(self.is_checked, FIELD, self.url, PROCESSED)

    def load(self, version: str, folder: pathlib.Path) -> None:
        """Replace the adapter: abort all requests, forget cached prompts, load the new one."""
        self.post("/pause?mode=abort")
        try:
            adapter = {"lora_name": "policy", "lora_path": str(folder), "load_inplace": True}
            self.post("/v1/load_lora_adapter", adapter)
            self.post("/reset_prefix_cache")
        finally:
            self.post("/resume")
        self.version, self.is_checked = version, False


class VllmSampler:
    """A `contracts.Sampler` that asks servers for one response per request.

    A server that fails is left out until it has loaded the adapter again; others are asked for its
    responses, with the same seeds.
    """

    environments = None
    key: RolloutKey | None = None

    def __init__(self, parts: SamplerParts):
        self._parts, self._config = parts, parts.config
        vllm, self.counts = parts.config.extras.vllm, structs.SamplerCounts()
        self.folder = pathlib.Path(vllm.folder or f"{parts.config.run_dir}/adapters").absolute()
        self.servers = [Server(url.strip().rstrip("/")) for url in vllm.servers.split(",")]
        self._pool = ThreadPoolExecutor(2 * parts.config.sampler.slots)
        # Responses that are missing; None: not asked for yet.
        self._jobs: dict[tuple[Request, int], tuple[Future[Completion], Server] | None] = {}
        self._version, self._retry_at = "", dict[Server, float]()  # of servers that failed

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def room(self) -> int:
        return self._config.sampler.slots - len(self._jobs)

    def begin(self, params: Any, key: RolloutKey, rule: SamplingRule) -> None:
        self.close()
        before, self._version = self._version, f"policy-{key.policy_step}-{uuid.uuid4().hex[:8]}"
        (self.folder / self._version).mkdir(parents=True)
        self.save(params, self.folder / self._version)
        if before:
            shutil.rmtree(self.folder / before, ignore_errors=True)
        self._retry_at.clear()
        self.key, self._rule, self.counts = key, rule, structs.SamplerCounts()

    def save(self, params: Any, folder: pathlib.Path) -> None:
        """Write parameters in PEFT's format."""
        trained, base = sharding.flatten(params), self._config.model.folder
        save_adapters(folder, trained, trained.__getitem__, self._parts.decoder, base)

    def submit(self, *options: Any, carried: PartialGroup | None = None, **named: Any) -> Request:
        request = Request(*options, **named, step=self.key.step if self.key else 0)
        if request.stop.texts:
            raise ValueError(f"prompt {request.prompt.id!r}: stop.texts must be empty")
        request.finished = {done.sample: done for done in carried.finished} if carried else {}
        self._jobs |= {(request, i): None for i in request.samples if i not in request.finished}
        return request

    def cancel(self, request: Request) -> None:
        """Forget the responses of a request; servers finish those that they have begun."""
        jobs = [job for job in self._jobs if job[0] is request]
        self.counts.abandoned_responses += len([self._jobs.pop(job) for job in jobs])

    def _ask(self, server: Server, key: RolloutKey, request: Request, sample: int) -> Completion:
        parts = [self._config.seed, key.purpose, key.step, request.prompt.index, sample]
        version, rule = self._version, request.rule or self._rule
        limit = self._config.sampler.max_response_tokens
        with server.lock:
            if self.key is not key:
                raise OSError("this rollout has ended")
            if server.version != version:
                server.load(version, self.folder / version)
            server.check(rule)
        body = {
            "model": "policy",
            "prompt": request.prompt.tokens.tolist(),
            "max_tokens": min(limit, request.budget or limit),
            "stop_token_ids": [*self._parts.tokenizer.end_ids, *request.stop.ids],
            "seed": int(structs.digest_json(parts), 16) >> 2,  # a signed 64-bit number
            **rule._asdict(),
            "logprobs": 0,  # of the sampled tokens alone
        }
        choice = server.complete(body)
        if (reason := choice["finish_reason"]) not in ("stop", "length"):
            raise OSError(f"a response ended with {reason!r}")
        tokens = np.array(choice["token_ids"], np.int32)
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        return Completion(tokens, logprobs, reason == "length", key.policy_step, "", sample)

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[structs.Finished]:
        """Wait a moment for responses."""
        meanwhile()
        if self.idle or self.key is None:
            return []
        live = [s for s in self.servers if self._retry_at.get(s, 0.0) <= time.monotonic()]
        busy = collections.Counter(asked[1] for asked in self._jobs.values() if asked)
        waiting = [job for job, asked in self._jobs.items() if not asked] if live else []
        for job in waiting[: self._config.sampler.slots - busy.total()]:
            server = min(live, key=busy.__getitem__)
            busy[server] += 1
            self._jobs[job] = self._pool.submit(self._ask, server, self.key, *job), server
        asked = {asked[0]: (job, asked[1]) for job, asked in self._jobs.items() if asked}
        done, _ = wait(asked or [Future()], POLL_SECONDS, FIRST_COMPLETED)
        self.counts.bursts += 1
        finished: list[structs.Finished] = []
        for future in [future for future in asked if future in done]:
            job, server = asked[future]
            if isinstance(error := future.exception(), OSError):
                if server in live:
                    self._parts.warn(f"vLLM's server {server.url} is left out: {error}")
                    live.remove(server)
                server.version, self._retry_at[server] = "", time.monotonic() + RETRY_SECONDS
                self._jobs[job] = None
                continue
            del self._jobs[job]
            self.counts.responses += 1
            self.counts.tokens += len(future.result())
            finished += job[0].finish(future.result())
        return finished

    def stop(self, keep: bool) -> list[PartialGroup]:
        """Forget everything; servers go on with it until they load the next adapter."""
        requests = dict.fromkeys(request for request, _ in self._jobs)
        self.counts.abandoned_responses += len(self._jobs) * (not keep)
        self._jobs.clear()
        return carry_groups((request, None) for request in requests if keep)

    def close(self) -> None:
        self.stop(keep=False)
        self.key = None


def open_vllm(parts: SamplerParts) -> tuple[VllmSampler, Callable[[], None]]:
    """Return the sampler of a run, as `SamplerParts` says. Raises `ConfigError`."""
    config = parts.config
    require(processes.count() == 1, "sampler.engine", "vllm", "another one on several hosts")
    rule = SamplingRule(*(getattr(config.sampler, name) for name in SamplingRule._fields))
    sampler, problems = VllmSampler(parts), []
    for server in sampler.servers:
        try:
            server.post("/resume")  # an earlier trainer may have been killed
            server.check(rule)
        except OSError as error:
            problems.append(f"{server.url}: {error}")
    allowed = f"servers of which one answers, with VLLM_SERVER_DEV_MODE=1: {'; '.join(problems)}"
    require(len(problems) < len(sampler.servers), FIELD, config.extras.vllm.servers, allowed)
    parts.warn("sampler.engine = 'vllm': this run can't be repeated")

    def close() -> None:
        sampler.close()
        for server in sampler.servers:
            with contextlib.suppress(OSError):  # threads may wait for responses
                server.post("/pause?mode=abort")
                server.post("/resume")
        shutil.rmtree(sampler.folder, ignore_errors=True)

    return sampler, close
