"""Sampling for Tinker's API: one decode state at a time, for all requests of the same weights."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve.budgets import prefill_tokens
from dapo_jax.extras.serve.errors import need
from dapo_jax.extras.serve.generator import ResponseSampling, ServedEngine
from dapo_jax.extras.serve.logprobs import Scorer
from dapo_jax.extras.tinker.messages import MESSAGES, STOPPED, TRUNCATED, topk_logprobs
from dapo_jax.extras.tinker.requests import (
    CHUNK,
    CHUNKS,
    SAMPLING,
    Limits,
    ModelShape,
    check_tokens,
    read,
)
from dapo_jax.extras.tinker.store import Request
from dapo_jax.types.structs import SamplingRule

STOP_WINDOW = 16  # tokens that a stop text may span in addition to one per character


class Weights(NamedTuple):
    """Weights that requests sample from: a checkpoint's path, empty for the base model."""

    path: str
    shape: ModelShape | None
    created: float = 0.0


class Response(NamedTuple):
    """A finished response; an end token or stop text is included."""

    tokens: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32
    stopped: bool


@dataclasses.dataclass(eq=False)
class SampleJob:
    """A validated request to sample, and its progress."""

    stored: Request
    weights: Weights
    prompt: np.ndarray  # [n] int32
    samples: int
    budget: int  # maximum tokens of a response
    sampling: ResponseSampling
    stop_texts: tuple[str, ...]
    stop_ids: frozenset[int]
    likeliest: int | None  # per prompt token; None: no log-probs of the prompt
    scored: int  # number of last prompt tokens that have log-probs
    started: int = 0  # responses that have, or had, a slot
    prefix: Any = None  # the prefilled prompt
    responses: dict[int, Response] = dataclasses.field(default_factory=dict)


def read_job(stored: Request, weights: Weights, body: bytes, key: str, limits: Limits) -> SampleJob:
    """Return the job of a valid body. Without a seed in it, the seed is a hash of `key`."""
    fields = read(body, "prompt", "sampling_params")
    tokens: list[int] = []
    for index, chunk in enumerate(read(fields["prompt"], "chunks", rules=CHUNKS)["chunks"]):
        prefix = f"prompt.chunks[{index}]."
        tokens += read(chunk, "type", "tokens", rules=CHUNK, prefix=prefix)["tokens"]
    prompt = check_tokens(np.array(tokens, np.int32), "prompt", limits.vocab, limits.longest_prompt)
    params = read(fields["sampling_params"], rules=SAMPLING, prefix="sampling_params.")
    longest = min(limits.max_response_tokens, limits.context - len(prompt))
    budget = params.get("max_tokens", longest)
    need(budget <= longest, "sampling_params.max_tokens", budget, f"at most {longest}")
    stop = params.get("stop")
    stops = stop if isinstance(stop, list) else [stop]
    ends = () if stop == [] else limits.end_ids  # an empty list: nothing ends a response
    temperature, top_p = float(params.get("temperature", 1.0)), float(params.get("top_p", 1.0))
    seed = params.get("seed", int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    rule = SamplingRule(temperature, top_p, max(0, params.get("top_k", 0)))
    likeliest = fields.get("topk_prompt_logprobs", 0)
    return SampleJob(
        stored,
        weights,
        prompt,
        fields.get("num_samples", 1),
        budget,
        ResponseSampling(rule, seed % 2**64),
        tuple(x for x in stops if isinstance(x, str)),
        frozenset(ends) | {x for x in stops if type(x) is int},
        likeliest if likeliest or fields.get("prompt_logprobs") else None,
        fields.get("prompt_logprobs_last_n", len(prompt)),
    )


class Decoding:
    """Slots that decode responses with one set of weights; `params` are laid out for decoding."""

    def __init__(self, weights: Weights, engine: ServedEngine, params: Any, tokenizer: Tokenizer):
        self.weights = weights
        self.params = params
        self._engine = engine
        self._decode = tokenizer.decode_all
        self._state = engine.init_decode_state()
        self._running: dict[int, tuple[SampleJob, int]] = {}  # job and sample number by slot
        self._seen: dict[int, int] = {}  # tokens that were searched for an end, by slot
        self.began = time.time()

    def burst(self, jobs: Sequence[SampleJob]) -> list[SampleJob]:
        """Decode a few tokens of every running response; return the jobs that this finished."""
        engine = self._engine
        self._fill_slots([job for job in jobs if job.started < job.samples])
        longest = None if engine.pages else engine.cache_tokens - engine.shape.settings.burst_tokens
        self._state, _ = engine.generate(self.params, self._state, longest=longest)
        state = self._state
        arrays = (state.tokens, state.logprobs, state.generated)
        tokens, logprobs, generated = (np.asarray(array) for array in arrays)
        ended = []
        for slot, (job, number) in list(self._running.items()):
            count = min(int(generated[slot]), job.budget)
            stop = self._find_stop(job, tokens[slot], self._seen[slot], count)
            self._seen[slot] = count
            if stop is not None or count == job.budget:
                size = count if stop is None else stop
                taken = [array[slot, :size].copy() for array in (tokens, logprobs)]
                job.responses[number] = Response(taken[0], taken[1], stop is not None)
                ended.append(slot)
                del self._running[slot]
        self._state = engine.stop(self._state, ended)
        for slot in ended:
            engine.release(slot)
        return [job for job in jobs if len(job.responses) == job.samples]

    def _fill_slots(self, jobs: list[SampleJob]) -> None:
        """Start responses of jobs in free slots."""
        engine = self._engine
        for slot in range(engine.max_concurrent_decodes):
            if slot in self._running or not jobs:
                continue
            job = jobs[0]
            length = len(job.prompt)
            if job.prefix is None:
                job.prefix = engine.prefill(
                    params=self.params,
                    padded_tokens=np.pad(job.prompt, (0, prefill_tokens(length) - length)),
                    true_length=length,
                    sampling=job.sampling,
                )
            self._state = engine.insert(
                job.prefix, self._state, slot=slot, sample_index=job.started
            )
            self._running[slot] = job, job.started
            self._seen[slot] = 0
            job.started += 1
            if job.started == job.samples:
                jobs.pop(0).prefix = None

    def _find_stop(self, job: SampleJob, tokens: np.ndarray, start: int, end: int) -> int | None:
        """Return the length up to the first stop token or text after `start`, None without any."""
        window = STOP_WINDOW + max(map(len, job.stop_texts), default=0)
        for length in range(start + 1, end + 1):
            if int(tokens[length - 1]) in job.stop_ids:
                return length
            if job.stop_texts:
                tail = tokens[max(0, length - window) : length].tolist()
                (text,) = self._decode([tail], special=True)
                if any(stop in text for stop in job.stop_texts):
                    return length
        return None


def render(job: SampleJob, scorer: Scorer, params: Any) -> bytes:
    """Return the response to a finished job, with the log-probs that it asked for."""
    message = MESSAGES["SampleResponse"]()
    for _, response in sorted(job.responses.items()):
        message.sequences.add(
            stop_reason=STOPPED if response.stopped else TRUNCATED,
            tokens=response.tokens.astype(np.int32).tobytes(),
            logprobs=response.logprobs.astype(np.float32).tobytes(),
        )
    if job.likeliest is not None:
        scores = scorer.score(job.prompt.tolist(), job.likeliest, params)
        first = max(1, len(scores) - job.scored)
        values = [np.nan if at < first else score.logprob for at, score in enumerate(scores)]
        message.prompt_logprobs = np.array(values, np.float32).tobytes()
        if job.likeliest:
            rows = [[] if at < first else score.likeliest for at, score in enumerate(scores)]
            message.topk_prompt_logprobs.CopyFrom(topk_logprobs(rows, job.likeliest))
    return message.SerializeToString()
