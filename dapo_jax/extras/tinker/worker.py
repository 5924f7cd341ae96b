"""The requests of all clients, which the device thread runs in a fair order.

It takes turns between models, each of which runs its requests in the order of their numbers, and
between a request of a model and a burst of sampling: one decode state at a time, for all requests
of the same weights.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.extras.serve.fields import RequestError, need, read_fields
from dapo_jax.extras.serve.generator import DeviceThread
from dapo_jax.extras.tinker.messages import pb
from dapo_jax.extras.tinker.models import Operations, find_checkpoint, shape_of
from dapo_jax.extras.tinker.policies import Policies
from dapo_jax.extras.tinker.requests import Body
from dapo_jax.extras.tinker.store import Entry, Request, State, Store
from dapo_jax.rollout.sampling import SAMPLE_BY_SEED
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import Completion, Prompt, RolloutKey, SamplingRule, Stop, present

GAP_SECONDS = 60.0  # that a request waits for those before it
TIDY_SECONDS = 600.0
SAMPLE_KIND = "sample"
MASKED_LOGPROB = -99_999.0  # with token 0: no likeliest token at this position


@dataclasses.dataclass(eq=False)
class Job:
    """A validated request to sample."""

    stored: Request
    weights: Entry | None  # a checkpoint; None: the base model
    body: Body
    prompt: list[int]
    budget: int  # maximum tokens of a response
    seed: int

    def submit(self, scheduler: Scheduler, end_ids: Sequence[int]) -> Any:
        """Return the request to the scheduler."""
        params = self.body.sampling_params
        stops = params.stop or []
        texts = tuple(stop for stop in stops if isinstance(stop, str))
        ids = tuple(stop for stop in stops if not isinstance(stop, str))
        stop = Stop(texts, ids if params.stop == [] else (*end_ids, *ids))
        rule = SamplingRule(params.temperature, params.top_p, max(0, params.top_k))
        prompt = Prompt(0, self.stored.id, "", np.array(self.prompt, np.int32), "", "")
        options = self.body.num_samples, rule, self.budget, stop
        return scheduler.submit(prompt, *options, seed=self.seed)


@dataclasses.dataclass
class Decoding:
    """Slots that decode responses with one set of weights, laid out for decoding."""

    weights: Entry | None
    params: Any
    scheduler: Scheduler
    began: float
    running: dict[Any, Job] = dataclasses.field(default_factory=dict)  # by scheduler's request


class Sampling:
    """Samples for stored requests; `end` is called with the response to each, or its error.

    Requests of the same weights decode together. Later ones join unless others wait.
    """

    def __init__(
        self, policies: Policies, store: Store, end: Callable[[Request, bytes | Exception], None]
    ):
        self._policies, self._store, self._end = policies, store, end
        self._jobs: dict[str, Job] = {}  # by request, in order of arrival
        self._decoding: Decoding | None = None

    def turn(self, pending: Sequence[Request]) -> bool:
        """Run a burst; return False if nothing waits."""
        for request in pending:
            if request.id not in self._jobs:
                try:
                    self._jobs[request.id] = self._read(request)
                except RequestError as error:
                    self._end(request, error)
        if not self._jobs:
            return False
        weights = (self._decoding or next(iter(self._jobs.values()))).weights
        try:
            self._burst(weights)
        except Exception as error:
            self._decoding = None
            for job in [job for job in self._jobs.values() if job.weights == weights]:
                self._close(job, error)
        return True

    def _read(self, request: Request) -> Job:
        """Read a request to sample, and find its weights."""
        model, body = self._policies.model, read_fields(Body, self._store.body(request))
        sampler = present(self._store.get("sampler", request.owner), "the sampling session")
        path = sampler.fields["path"]
        weights = find_checkpoint(self._store, path, "sampler_weights") if path else None
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        model.check_tokens("prompt", prompt, model.config.max_prompt_tokens)
        params, seed = body.sampling_params, body.sampling_params.seed
        budget = model.budget("sampling_params.max_tokens", params.max_tokens, len(prompt))
        if seed is None:
            # Not of the session's name: the same calls in another session draw the same.
            key = f"{model.config.seed} {sampler.fields['number']} {request.number}"
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return Job(request, weights, body, prompt, budget, seed)

    def _burst(self, weights: Entry | None) -> None:
        """Decode a few tokens of all requests with these weights."""
        decoding = self._decoding = self._decoding or self._open(weights)
        running = set(decoding.running.values())
        others_wait = any(job.weights != weights for job in self._jobs.values())
        for job in self._jobs.values():
            is_late = others_wait and job.stored.arrived > decoding.began
            if job.weights == weights and job not in running and not is_late:
                request = job.submit(decoding.scheduler, self._policies.model.tokenizer.end_ids)
                decoding.running[request] = job
        for request, responses in decoding.scheduler.step():
            job = decoding.running.pop(request)
            self._close(job, self._render(job, responses, decoding))
        if not decoding.running:
            self._decoding = None  # frees its caches

    def _open(self, weights: Entry | None) -> Decoding:
        policies, shape, source = self._policies, None, ("", 0.0)
        if weights:
            shape = shape_of(weights)
            source = str(self._store.checkpoint_folder(weights.id)), weights.created
        params = policies.decoding_weights(shape, *source)
        scheduler = Scheduler(policies.engine(shape), policies.model.tokenizer, seed=0)
        key = RolloutKey(SAMPLE_BY_SEED)
        scheduler.open(params, key, SamplingRule(), rule_per_slot=True)
        return Decoding(weights, params, scheduler, time.time())

    def _close(self, job: Job, result: bytes | Exception) -> None:
        del self._jobs[job.stored.id]
        self._end(job.stored, result)

    def _render(self, job: Job, responses: Sequence[Completion], decoding: Decoding) -> bytes:
        """Return the response to a finished job, with the log-probs that it asked for."""
        body, message = job.body, pb.SampleResponse()
        reasons = pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH
        for response in responses:
            message.sequences.add(
                stop_reason=reasons[response.truncated],
                tokens=response.tokens.astype(np.int32).tobytes(),
                logprobs=response.sampler_logprobs.astype(np.float32).tobytes(),
            )
        if body.prompt_logprobs or body.topk_prompt_logprobs:
            shape, count = job.weights and shape_of(job.weights), body.topk_prompt_logprobs
            scores = self._policies.scorer(shape).score(decoding.params, job.prompt, count)
            first = max(1, len(scores) - (body.prompt_logprobs_last_n or len(scores)))
            values = [np.nan if at < first else score.logprob for at, score in enumerate(scores)]
            message.prompt_logprobs = np.array(values, np.float32).tobytes()
            if count:
                masked = [(0, MASKED_LOGPROB)] * count
                tops = [masked if at < first else s.likeliest for at, s in enumerate(scores)]
                pairs = np.array([[*top, *masked][:count] for top in tops])
                shown = message.topk_prompt_logprobs
                shown.token_ids = pairs[..., 0].astype(np.int32).tobytes()
                shown.logprobs = pairs[..., 1].astype(np.float32).tobytes()
                shown.k, shown.length = count, len(tops)
        return message.SerializeToString()


class Worker:
    """Runs stored requests in the device thread; tasks of the event loop wait for their results."""

    def __init__(self, policies: Policies, store: Store):
        self._store = store
        self._operations = Operations(policies, store)
        self._sampling = Sampling(policies, store, self._end)
        self._waiters: dict[str, asyncio.Event] = {}
        self._turns: dict[str, int] = {}  # when models ran last
        self._tidied = -TIDY_SECONDS
        self.thread = DeviceThread(self._turn, self._operations.close)

    async def wait(self, request_id: str, seconds: float) -> tuple[State, bytes | None] | None:
        """Return the result of a request; it is pending if it takes longer than `seconds`."""
        ended = self._waiters.setdefault(request_id, asyncio.Event())
        stored = await asyncio.to_thread(self._store.result, request_id)
        if stored is None or stored[0] != State.PENDING:
            self._wake(request_id)
            return stored
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
        return await asyncio.to_thread(self._store.result, request_id)

    def _wake(self, request_id: str) -> None:
        """Tell the tasks that wait for a request that it has ended."""
        if event := self._waiters.pop(request_id, None):
            event.set()

    # --- the device thread ------------------------------------------------------------------------

    def _turn(self) -> bool:
        if time.monotonic() - self._tidied > TIDY_SECONDS:
            self._tidied = time.monotonic()
            self._store.tidy()
        pending = self._store.pending()
        trained = self._train([r for r in pending if r.kind != SAMPLE_KIND])
        return self._sampling.turn([r for r in pending if r.kind == SAMPLE_KIND]) or trained

    def _end(self, request: Request, result: bytes | Exception | None = None) -> None:
        """Store the response to a request, or its error, unless that is done; wake who waits."""
        if isinstance(result, bytes):
            self._store.finish(request, State.DONE, result)
        elif result is not None:
            error = {"error": str(result), "category": "user"}
            if not isinstance(result, RequestError):
                traceback.print_exception(result)
                error = {"error": "internal server error", "category": "server"}
            self._store.finish(request, State.FAILED, json.dumps(error).encode())
        self.thread.loop.call_soon_threadsafe(self._wake, request.id)

    def _train(self, pending: list[Request]) -> bool:
        """Run a request of the next model; return False if none can run."""
        first: dict[str, Request] = {}
        for request in sorted(pending, key=lambda request: request.number):
            first.setdefault(request.owner, request)
        now = time.time()
        for request in sorted(first.values(), key=lambda r: self._turns.get(r.owner, 0)):
            expected = self._store.last_number(request.owner) + 1
            if request.number > expected and now - request.arrived < GAP_SECONDS:
                continue
            self._turns[request.owner] = max(self._turns.values(), default=0) + 1
            try:
                allowed = f"{expected}: requests run in the order of their numbers"
                need(request.number == expected, "seq_id", request.number, allowed)
                self._operations.run(request)
                self._end(request)
            except Exception as error:
                if not isinstance(error, RequestError):  # such as too little memory
                    self._operations.discard(request.owner)
                self._end(request, error)
            return True
        return False
