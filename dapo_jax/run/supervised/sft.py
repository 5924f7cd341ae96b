"""Supervised training on examples, by the update of reinforcement learning."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms import sft
from dapo_jax.config.experiment import GENERATED, Packing, SftConfig
from dapo_jax.data import arithmetic
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.supervised import EXAMPLES
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.batches import ScoredBatch, TrainBatch
from dapo_jax.learner.minibatches import make_batch
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.update import Learner
from dapo_jax.run.supervised.common import Start, open_examples, own_segments, score_responses
from dapo_jax.run.supervised.training import Task, train_supervised
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
            text, turns = arithmetic.make_worked_sum(config.seed, index, examples)
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
    """Return a minibatch of the mean cross-entropy over trained tokens, and its microbatches.

    Args:
        budget: tokens of the longest response.
    """
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
    if config.data.source in GENERATED:

        def generated_batch(step: int, _: Any) -> tuple[TrainBatch, int, dict[str, float]]:
            segments = example_segments(config, start.tokenizer, step)
            return *imitation_batch(segments, config.packing, config.max_response_tokens), {}

        return Task(config.total_steps, start.load, generated_batch, labels)
    examples, steps, numbers = open_examples(config, start.tokenizer, EXAMPLES, "examples_per_step")

    def batch(step: int, _: Any) -> tuple[TrainBatch, int, dict[str, float]]:
        segments = own_segments([examples.training[i] for i in numbers(step)])
        return *imitation_batch(segments, config.packing, config.packing.row_tokens), {}

    def heldout_nll(params: Any) -> dict[str, float]:
        total = tokens = 0.0
        for segment, logprobs in score_responses(
            learner, params, examples.heldout, config.examples_per_step, config.packing, signals
        ):
            weights = np.asarray(segment.token_weights)
            total, tokens = total + weights @ logprobs, tokens + weights.sum()
        return {"heldout_nll": -float(total / tokens)} if tokens else {}

    return Task(steps, start.load, batch, labels, {"data": examples.digest()}, heldout_nll)
