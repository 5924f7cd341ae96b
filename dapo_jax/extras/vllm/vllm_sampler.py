"""vLLM as a run's sampler: `sampler.engine=vllm`, for runs that train adapters.

A server must be started with `--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and
VLLM_SERVER_DEV_MODE=1, and serve this run alone. It keeps neither random keys nor rounding of our
programs, so that such a run can't be repeated. Full weights can't be sent: vLLM 0.32 receives them
by NCCL, CUDA IPC or Ray, none of which a JAX program has.
"""

import collections
import contextlib
import dataclasses
import hashlib
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

from dapo_jax.config.experiment import Config
from dapo_jax.model.peft_adapters import save_adapters
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
# A model's generation_config.json would change what a request does not mention.
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


Save = Callable[[Any, pathlib.Path], None]  # writes parameters in PEFT's format


@dataclasses.dataclass(eq=False)
class Server:
    """A server, and the adapter that it has. Its methods raise OSError."""

    url: str
    version: str = ""  # of the adapter that it can sample with
    adapter: str = ""  # its name there
    retry_at: float = 0.0  # it is tried again then
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def post(self, path: str, body: Any = None, seconds: float = 60.0) -> bytes:
        """Return the server's answer."""
        content = b"" if body is None else json.dumps(body).encode()
        try:
            return post(self.url + path, content, {"Content-Type": "application/json"}, seconds)
        except OSError as error:
            answered = isinstance(error, urllib.error.HTTPError)
            text = error.read(1000).decode(errors="replace") if answered else ""
            raise OSError(f"{self.url}{path}: {error} {text}".strip()) from None

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a response, also with the name of its model."""
        answer = json.loads(self.post("/v1/completions", PLAIN | body, RESPONSE_SECONDS))
        return answer["choices"][0] | {"model": answer["model"]}

    def check(self, rule: SamplingRule) -> None:
        """Raise `ConfigError` unless log-probs are those after temperature and truncation."""
        likeliest = []
        for heat, top_k in ((1.0, 0), (2.0, 0), (1.0, 1)) if rule != SamplingRule() else ():
            body = {"prompt": [0, 1, 2], "max_tokens": 1, "seed": 0, "logprobs": 5}
            body |= SamplingRule(heat, 1.0, top_k)._asdict()
            top = self.complete(body)["logprobs"]["top_logprobs"][0]
            likeliest.append(sorted(top.values(), reverse=True)[:5])
        if likeliest:
            # Twice the temperature halves differences, and a token that is alone has log-prob 0.
            gap, half = (values[0] - values[-1] for values in likeliest[:2])
            fits = abs(half - gap / 2) <= 0.1 * gap + 1e-3 and likeliest[2][0] > -1e-3
            allowed = "servers started with --logprobs-mode=processed_logprobs, since temperature, "
            allowed += "top_p or top_k are set and this one returns log-probs before them"
            require(fits, FIELD, self.url, allowed)

    def load(self, version: str, folder: pathlib.Path, rule: SamplingRule) -> None:
        """Replace the adapter: abort all requests, forget cached prompts, load the new one."""
        self.check(rule)
        before, name = self.adapter, f"{version}-{uuid.uuid4().hex[:8]}"
        self.post("/pause?mode=abort")
        try:
            self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            self.adapter = name
            with contextlib.suppress(OSError):  # a server that was started again has none
                self.post("/v1/unload_lora_adapter", {"lora_name": before})
            self.post("/reset_prefix_cache")
        finally:
            self.post("/resume")
        self.version = version


class VllmSampler:
    """A `contracts.Sampler` that asks servers for one response per request.

    A server that fails is left out until it has loaded the adapter again; others are asked for its
    responses, with the same seeds.
    """

    environments = None
    key: RolloutKey | None = None

    def __init__(self, config: Config, end_ids: list[int], save: Save, warn: Callable[[str], None]):
        settings = config.extras.vllm
        self.counts = structs.SamplerCounts()
        self.folder = pathlib.Path(settings.folder or f"{config.run_dir}/adapters").absolute()
        self.servers = [Server(url.strip().rstrip("/")) for url in settings.servers.split(",")]
        self.rule = SamplingRule(*(getattr(config.sampler, n) for n in SamplingRule._fields))
        self._config, self._end_ids, self._save, self._warn = config, end_ids, save, warn
        self._pool = ThreadPoolExecutor(2 * config.sampler.slots)
        # Responses that are missing; None: not asked for yet.
        self._jobs: dict[tuple[Request, int], tuple[Future[Completion], Server] | None] = {}
        self._version = ""

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
        self._save(params, self.folder / self._version)
        if before:
            shutil.rmtree(self.folder / before, ignore_errors=True)
        for server in self.servers:
            server.retry_at = 0.0
        self.key, self._rule, self.counts = key, rule, structs.SamplerCounts()

    def submit(self, *options: Any, carried: PartialGroup | None = None, **named: Any) -> Request:
        request = Request(*options, **named, step=self.key.step if self.key else 0)
        if request.stop.texts:
            raise ValueError(f"prompt {request.prompt.id!r}: stop.texts must be empty")
        if carried:
            request.finished = {done.sample: done for done in carried.finished}
        self._jobs |= {(request, i): None for i in request.samples if i not in request.finished}
        return request

    def cancel(self, request: Request) -> None:
        """Forget the responses of a request; servers finish those that they have begun."""
        jobs = [job for job in self._jobs if job[0] is request]
        self.counts.abandoned_responses += len([self._jobs.pop(job) for job in jobs])

    def _ask(self, server: Server, key: RolloutKey, request: Request, sample: int) -> Completion:
        parts = [self._config.seed, key.purpose, key.step, request.prompt.index, sample]
        digest = hashlib.sha256(json.dumps(parts).encode()).digest()
        version, limit = self._version, self._config.sampler.max_response_tokens
        with server.lock:
            if self.key is not key:
                raise OSError("this rollout has ended")
            if server.version != version:
                server.load(version, self.folder / version, self.rule)
            name = server.adapter
        body = {
            "model": name,
            "prompt": request.prompt.tokens.tolist(),
            "max_tokens": min(limit, request.budget or limit),
            "stop_token_ids": [*self._end_ids, *request.stop.ids],
            "seed": int.from_bytes(digest[:8], "big") >> 2,  # a signed 64-bit number
            **(request.rule or self._rule)._asdict(),
            "logprobs": 0,  # of the sampled tokens alone
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        choice = server.complete(body)
        model, reason = choice["model"], choice["finish_reason"]
        if model != name or reason not in ("stop", "length"):
            raise OSError(f"{server.url}: {model!r} ended with {reason!r}, asked was {name!r}")
        tokens = np.array(choice["token_ids"], np.int32)
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        return Completion(tokens, logprobs, reason == "length", key.policy_step, "", sample)

    def step(self, meanwhile: Callable[[], None] = do_nothing) -> list[structs.Finished]:
        """Wait a moment for responses."""
        meanwhile()
        if self.idle or self.key is None:
            return []
        live = [server for server in self.servers if server.retry_at <= time.monotonic()]
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
                if server.retry_at <= time.monotonic():
                    self._warn(f"a server of vLLM is left out: {error}")
                server.version, server.retry_at = "", time.monotonic() + RETRY_SECONDS
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


def open_vllm(parts: SamplerParts) -> tuple[VllmSampler, Callable[[], None], bool]:
    """Return the sampler of a run, as `SamplerParts` says. Raises `ConfigError`."""
    config = parts.config
    require(processes.count() == 1, "sampler.engine", "vllm", "another one on several hosts")

    def save(params: Any, folder: pathlib.Path) -> None:
        trained = sharding.flatten(params)
        save_adapters(folder, trained, trained.__getitem__, parts.decoder, config.model.folder)

    sampler = VllmSampler(config, [*parts.tokenizer.end_ids], save, parts.warn)
    problems = []
    for server in sampler.servers:
        try:
            server.post("/resume")  # an earlier trainer may have been killed
            server.check(sampler.rule)
        except OSError as error:
            problems.append(str(error))
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

    return sampler, close, False
