"""Supervised training on examples, by the update of reinforcement learning."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms import sft
from dapo_jax.config.experiment import Packing, SftConfig
from dapo_jax.config.sections import GENERATED
from dapo_jax.data import arithmetic, multi_digit_sums
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.supervised import EXAMPLES
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.minibatches import make_batch
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.update import Learner
from dapo_jax.run.supervised.training import (
    Batch,
    Start,
    Task,
    open_examples,
    own_segments,
    score_responses,
    train_supervised,
)
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import TRAINED
from dapo_jax.structs import Completion, Prompt, Turn


def example_segments(config: SftConfig, tokenizer: Tokenizer, step: int) -> list[Segment]:
    """Return the worked examples of one step; example i depends on (seed, i) alone.

    An example that exceeds the budget is cut, so it has no end token.
    """
    segments, examples = [], config.examples
    for i in range(config.examples_per_step):
        index = step * config.examples_per_step + i
        if config.data.source == "multi_digit_sums":
            text, turns = multi_digit_sums.make_worked_example(config.seed, index, examples)
        else:
            text, worked = arithmetic.make_worked_example(config.seed, index, examples)
            turns = [worked]
        prompt_tokens = np.asarray(tokenizer.encode_prompt(text), np.int32)
        prompt = Prompt(index, str(index), text, prompt_tokens, "", config.data.source)
        completion = _worked(turns, tokenizer, config.max_response_tokens)
        segments.append(Segment(prompt, completion, i))
    return segments


def _worked(turns: Sequence[str], tokenizer: Tokenizer, budget: int) -> Completion:
    """Return a response of turns; every second one is observed, the others have an end token."""
    parts: list[Turn] = []
    tokens: list[int] = []
    for number, text in enumerate(turns):
        is_sampled = number % 2 == 0
        ids = [*tokenizer.encode(text), *tokenizer.end_ids[:1] * is_sampled]
        ids = ids[: budget - len(tokens)]
        parts.append(Turn(is_sampled, len(ids), text))
        tokens += ids
    return Completion(
        np.asarray(tokens, np.int32),
        np.zeros(len(tokens)),
        tokens[-1] not in tokenizer.end_ids,
        0,
        "",
        turns=tuple(parts) if len(parts) > 1 else (),
    )


def make_base(config: SftConfig) -> pathlib.Path:
    """Train a policy on examples; errors as for `train_supervised`."""
    return train_supervised(config, "sft", TRAINED, sft(), _open)


def imitation_batch(
    segments: Sequence[Segment], packing: Packing, budget: int
) -> tuple[TrainBatch, int]:
    """Return a minibatch of the mean cross-entropy over trained tokens, and its microbatches."""
    algorithm = sft()
    rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
    feedback = gather_feedback(
        np.asarray(rollouts.response_index),
        np.ones(len(segments)),
        groups=np.arange(len(segments)),
        correct=np.ones(len(segments), bool),
    )
    scored = ScoredBatch(rollouts, None)
    return make_batch(scored, segments, estimate(algorithm, feedback), algorithm, budget), used


def _open(config: SftConfig, start: Start, learner: Learner, signals: Signals) -> Task:
    """Return the task of SFT: generated examples, or examples of files."""
    labels = {"policy_nll": "nll", "heldout_nll": "held-out nll"}
    packing, size = config.packing, config.examples_per_step
    if config.data.source in GENERATED:

        def generated_batch(step: int, _: Any) -> Batch:
            segments = example_segments(config, start.tokenizer, step)
            return *imitation_batch(segments, packing, config.max_response_tokens), {}

        return Task(config.total_steps, start.load, generated_batch, labels)
    examples, steps, numbers = open_examples(config, start.tokenizer, EXAMPLES, "examples_per_step")

    def batch(step: int, _: Any) -> Batch:
        segments = own_segments([examples.training[i] for i in numbers(step)])
        return *imitation_batch(segments, packing, packing.row_tokens), {}

    def heldout_nll(params: Any) -> dict[str, float]:
        total = tokens = 0.0
        heldout = examples.heldout
        for segment, logprobs in score_responses(learner, params, heldout, size, packing, signals):
            weights = np.asarray(segment.token_weights)
            total += weights @ logprobs
            tokens += weights.sum()
        return {"heldout_nll": -float(total / tokens)} if tokens else {}

    return Task(steps, start.load, batch, labels, {"data": examples.digest()}, heldout_nll)
