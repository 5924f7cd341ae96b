"""Sampling for Tinker's API: one decode state at a time, for all requests of the same weights."""

import collections
import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.commands.serve.budgets import prefill_tokens
from dapo_jax.commands.serve.generator import ResponseSampling, ServedEngine
from dapo_jax.commands.serve.logprobs import Scorer
from dapo_jax.commands.serve.tinker.messages import (
    MESSAGES,
    STOPPED,
    TRUNCATED,
    topk_logprobs,
)
from dapo_jax.commands.serve.tinker.requests import SampleRequest
from dapo_jax.commands.serve.tinker.store import Request
from dapo_jax.data.prompts.tokenizer import Tokenizer

STOP_WINDOW = 16  # tokens that a stop text may span in addition to one per character


class Response(NamedTuple):
    """A finished response; an end token or stop text is included."""

    tokens: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    stopped: bool


@dataclasses.dataclass(eq=False)
class SampleJob:
    """A request in progress.

    Attributes:
        stored: the request as it is stored.
        waiting: numbers of the responses that have no slot yet.
        prefix: the prefilled prompt.
    """

    stored: Request
    request: SampleRequest
    seed: int
    waiting: collections.deque[int]
    prefix: Any = None
    responses: dict[int, Response] = dataclasses.field(default_factory=dict)


def open_job(stored: Request, request: SampleRequest, key: str) -> SampleJob:
    """Return a job. Without a seed in the request, the seed is made from the text `key`."""
    seed = request.seed
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    samples = collections.deque(range(request.samples))
    return SampleJob(stored, request, seed % 2**64, samples)


class Decoding:
    """A decode state, and the jobs that share its weights."""

    def __init__(self, engine: ServedEngine, params: Any, tokenizer: Tokenizer):
        self._engine = engine
        self._params = params
        self._tokenizer = tokenizer
        self._state = engine.init_decode_state()
        self.jobs: collections.deque[SampleJob] = collections.deque()  # with waiting responses
        self._running: dict[int, tuple[SampleJob, int]] = {}  # job and sample number by slot
        self._seen: dict[int, int] = {}  # tokens that were searched for an end, by slot

    def burst(self) -> list[SampleJob]:
        """Decode a few tokens of every running response; return the jobs that this finished."""
        engine = self._engine
        self._fill_slots()
        longest = None if engine.pages else engine.cache_tokens - engine.shape.settings.burst_tokens
        self._state, _ = engine.generate(self._params, self._state, longest=longest)
        state = self._state
        arrays = (state.tokens, state.logprobs, state.generated)
        tokens, logprobs, generated = (np.asarray(array) for array in arrays)
        finished, ended = [], []
        for slot, (job, number) in list(self._running.items()):
            count = min(int(generated[slot]), job.request.budget)
            stop = self._find_stop(job.request, tokens[slot], self._seen[slot], count)
            self._seen[slot] = count
            if stop is None and count < job.request.budget:
                continue
            size = count if stop is None else stop
            taken = [array[slot, :size].copy() for array in (tokens, logprobs)]
            job.responses[number] = Response(taken[0], taken[1], stop is not None)
            ended.append(slot)
            del self._running[slot]
            if len(job.responses) == job.request.samples:
                finished.append(job)
        self._state = engine.stop(self._state, ended)
        for slot in ended:
            engine.release(slot)
        return finished

    def _fill_slots(self) -> None:
        """Start waiting responses in free slots."""
        engine = self._engine
        for slot in range(engine.max_concurrent_decodes):
            if slot in self._running or not self.jobs:
                continue
            job = self.jobs[0]
            request = job.request
            length = len(request.prompt)
            if job.prefix is None:
                job.prefix = engine.prefill(
                    params=self._params,
                    padded_tokens=np.pad(request.prompt, (0, prefill_tokens(length) - length)),
                    true_length=length,
                    sampling=ResponseSampling(request.rule, job.seed),
                )
            number = job.waiting.popleft()
            self._state = engine.insert(job.prefix, self._state, slot=slot, sample_index=number)
            self._running[slot] = job, number
            self._seen[slot] = 0
            if not job.waiting:
                self.jobs.popleft().prefix = None

    def _find_stop(
        self, request: SampleRequest, tokens: np.ndarray, start: int, end: int
    ) -> int | None:
        """Return the length up to the first stop token or text after `start`, None without any."""
        ids = frozenset()
        if request.stop_ids is not None:
            ids = request.stop_ids | frozenset(self._tokenizer.end_ids)
        window = STOP_WINDOW + max(map(len, request.stop_texts), default=0)
        decode = self._tokenizer.backend.decode
        for length in range(start + 1, end + 1):
            if int(tokens[length - 1]) in ids:
                return length
            if request.stop_texts:
                tail = tokens[max(0, length - window) : length].tolist()
                text = decode(tail, skip_special_tokens=False)
                if any(stop in text for stop in request.stop_texts):
                    return length
        return None


def render(job: SampleJob, scorer: Scorer, params: Any) -> bytes:
    """Return the response to a finished job, with the log-probs that it asked for."""
    request = job.request
    prompt = request.prompt.tolist()
    message = MESSAGES["SampleResponse"]()
    for number in range(request.samples):
        response = job.responses[number]
        fields: dict[str, Any] = {
            "stop_reason": STOPPED if response.stopped else TRUNCATED,
            "tokens": response.tokens.astype(np.int32).tobytes(),
            "logprobs": response.logprobs.astype(np.float32).tobytes(),
        }
        if request.likeliest:
            scores = scorer.score(prompt + response.tokens.tolist(), request.likeliest, params)
            rows = [score.likeliest for score in scores[len(prompt) :]]
            fields["topk_sampled_logprobs"] = topk_logprobs(rows, request.likeliest)
        message.sequences.add(**fields)
    if request.prompt_logprobs is None:
        return message.SerializeToString()
    scores = scorer.score(prompt, request.prompt_logprobs, params)
    first = max(1, len(prompt) - request.scored)
    values = [np.nan if at < first else score.logprob for at, score in enumerate(scores)]
    message.prompt_logprobs = np.array(values, np.float32).tobytes()
    if request.prompt_logprobs:
        rows = [[] if at < first else score.likeliest for at, score in enumerate(scores)]
        topk = topk_logprobs(rows, request.prompt_logprobs)
        message.topk_prompt_logprobs.CopyFrom(topk)
    return message.SerializeToString()
