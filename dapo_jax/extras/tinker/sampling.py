"""Sampling for Tinker's API: one decode state at a time, for all requests of the same weights."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.serve.errors import need
from dapo_jax.extras.serve.fields import read_fields
from dapo_jax.extras.serve.logprobs import Scorer
from dapo_jax.extras.tinker.messages import MESSAGES, STOPPED, TRUNCATED, topk_logprobs
from dapo_jax.extras.tinker.requests import (
    Limits,
    ModelInput,
    ModelShape,
    SamplingParams,
    check_tokens,
    read_body,
)
from dapo_jax.extras.tinker.store import Request
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.sampling import SAMPLE_BY_SEED
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import Completion, Prompt, RolloutKey, SamplingRule, Stop


class Weights(NamedTuple):
    """Weights that requests sample from: a checkpoint's path, empty for the base model."""

    path: str
    shape: ModelShape | None
    created: float = 0.0


@dataclasses.dataclass(eq=False)
class SampleJob:
    """A validated request to sample, and its progress."""

    stored: Request
    weights: Weights
    prompt: np.ndarray  # [n] int32
    samples: int
    budget: int  # maximum tokens of a response
    rule: SamplingRule
    seed: int
    stop: Stop
    likeliest: int | None  # per prompt token; None: no log-probs of the prompt
    scored: int  # number of last prompt tokens that have log-probs
    running: Any = None  # the scheduler's request, once it is submitted


def read_job(
    stored: Request, weights: Weights, content: bytes, key: str, limits: Limits
) -> SampleJob:
    """Return the job of a valid body. Without a seed in it, the seed is a hash of `key`."""
    body = read_body(content)
    chunks = read_fields(ModelInput, body.prompt, "prompt.").chunks
    tokens = np.array([token for chunk in chunks for token in chunk.tokens], np.int32)
    prompt = check_tokens(tokens, "prompt", limits.vocab, limits.longest_prompt)
    params = read_fields(SamplingParams, body.sampling_params, "sampling_params.")
    longest = min(limits.max_response_tokens, limits.context - len(prompt))
    budget = params.max_tokens or longest
    need(budget <= longest, "sampling_params.max_tokens", budget, f"at most {longest}")
    stops = params.stop or []
    ends = () if params.stop == [] else limits.end_ids
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    ids = (*ends, *(stop for stop in stops if not isinstance(stop, str)))
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    scores_prompt = body.topk_prompt_logprobs or body.prompt_logprobs
    return SampleJob(
        stored,
        weights,
        prompt,
        body.num_samples,
        budget,
        SamplingRule(params.temperature, params.top_p, max(0, params.top_k)),
        seed if params.seed is None else params.seed,
        Stop(texts, ids),
        body.topk_prompt_logprobs if scores_prompt else None,
        body.prompt_logprobs_last_n or len(prompt),
    )


class Decoding:
    """Slots that decode responses with one set of weights; `params` are laid out for decoding."""

    def __init__(self, weights: Weights, engine: PolicyEngine, params: Any, tokenizer: Tokenizer):
        self.weights = weights
        self.params = params
        self._scheduler = Scheduler(engine, tokenizer, seed=0)
        key = RolloutKey(SAMPLE_BY_SEED)
        self._scheduler.open(params, key, SamplingRule(), rule_per_slot=True)
        self.began = time.time()

    def burst(self, jobs: Sequence[SampleJob]) -> list[tuple[SampleJob, tuple[Completion, ...]]]:
        """Decode a few tokens of every job; return those that this finished, with responses."""
        for job in (job for job in jobs if job.running is None):
            prompt = Prompt(0, job.stored.id, "", job.prompt, "", "")
            options = job.rule, job.budget, job.stop
            job.running = self._scheduler.submit(prompt, job.samples, *options, seed=job.seed)
        finished = dict(self._scheduler.step())
        return [(job, finished[job.running]) for job in jobs if job.running in finished]


def render(job: SampleJob, responses: Sequence[Completion], scorer: Scorer, params: Any) -> bytes:
    """Return the response to a finished job, with the log-probs that it asked for."""
    message = MESSAGES["SampleResponse"]()
    for response in responses:
        message.sequences.add(
            stop_reason=TRUNCATED if response.truncated else STOPPED,
            tokens=response.tokens.astype(np.int32).tobytes(),
            logprobs=response.sampler_logprobs.astype(np.float32).tobytes(),
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
