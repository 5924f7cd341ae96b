"""DPO on offline pairs (arXiv 2305.18290), by the update of the online preset.

The log-probs of the reference are computed once, before the first step, and the reference is then
freed: memory holds one policy.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms import Algorithm, dpo
from dapo_jax.config.experiment import DpoConfig
from dapo_jax.data.supervised import PAIRS, Example
from dapo_jax.learner.advantages import Feedback, estimate, gather_feedback
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.minibatches import make_batch
from dapo_jax.learner.packing import Segment, pack, place_tokens
from dapo_jax.learner.update import Learner
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.reporting.metrics import feedback_metrics
from dapo_jax.run.components import check_same_model, load_whole
from dapo_jax.run.supervised.training import (
    Batch,
    Start,
    Task,
    open_examples,
    own_segments,
    score_responses,
    train_supervised,
)
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import PREFERRING

MEASURED_PAIRS = 256  # of the training pairs, before and after
LABELS = {
    "preference_loss": "loss",
    "preference_accuracy": "accuracy",
    "heldout_preference_loss": "held-out loss",
    "heldout_preference_accuracy": "held-out accuracy",
}


def algorithm_of(config: DpoConfig) -> Algorithm:
    """Return the preset `dpo` with the beta of the run."""
    return dataclasses.replace(dpo(), preference_beta=config.beta)


def pair_segments(pairs: Sequence[Example]) -> list[Segment]:
    """Return chosen and rejected responses in turn; the chosen one counts as correct."""
    segments = own_segments(pairs)
    return [segment._replace(correct=i % 2 == 0) for i, segment in enumerate(segments)]


def pair_feedback(
    rollouts: PackedRows, policy: np.ndarray, reference: Sequence[np.ndarray]
) -> Feedback:
    """Return the feedback on packed pairs: log-ratios of policy to reference."""
    index, count = np.asarray(rollouts.response_index), len(reference)
    return gather_feedback(
        index,
        np.zeros(count),
        log_ratios=policy - place_tokens(reference, index),
        groups=np.arange(count) // 2,
        correct=np.arange(count) % 2 == 0,
    )


def preference_batch(
    algorithm: Algorithm, segments: Sequence[Segment], rollouts: PackedRows, feedback: Feedback
) -> TrainBatch:
    """Return a minibatch of the mean of -log sigmoid(beta margin) over pairs."""
    scored = ScoredBatch(rollouts, None)
    budget = rollouts.tokens.shape[-1]
    return make_batch(scored, segments, estimate(algorithm, feedback), algorithm, budget)


def prefer(config: DpoConfig) -> pathlib.Path:
    """Train a policy on pairs; errors as for `train_supervised`."""
    return train_supervised(config, "dpo", PREFERRING, algorithm_of(config), _open)


def _preferences(
    beta: float, now: Sequence[np.ndarray], reference: Sequence[np.ndarray], prefix: str
) -> dict[str, float]:
    """Return mean loss and accuracy of pairs; a margin of 0 counts half."""
    both = zip(now, reference, strict=False)
    gains = np.array([np.sum(np.float64(policy) - before) for policy, before in both])
    margins = gains[0::2] - gains[1::2]
    return {
        f"{prefix}preference_loss": float(np.logaddexp(0.0, -beta * margins).mean()),
        f"{prefix}preference_accuracy": float(np.mean((np.sign(margins) + 1) / 2)),
    }


def _open(config: DpoConfig, start: Start, learner: Learner, signals: Signals) -> Task:
    """Return the task of DPO on the pairs of files."""
    size, packing, algorithm = config.pairs_per_step, config.packing, algorithm_of(config)
    if config.reference:
        check_same_model("reference", config.reference, config.start, lambda shape: shape)
    pairs, steps, numbers = open_examples(config, start.tokenizer, PAIRS, "pairs_per_step")
    digests = {"data": pairs.digest()}
    params = reference = start.load()
    if config.reference:
        digests[config.reference] = fingerprint(config.reference)
        reference = load_whole(
            config.reference, start.decoder, start.mesh, config.seed, field="reference"
        )

    def logprobs(params: Any, pairs: Sequence[Example]) -> list[np.ndarray]:
        scored = score_responses(learner, params, pairs, size, packing, signals)
        return [logprobs for _, logprobs in scored]

    # Log-probs of the reference, by response: chosen and rejected in turn.
    training = logprobs(reference, pairs.training)
    heldout = logprobs(reference, pairs.heldout)
    # A multiple of `size`: the pairs are packed as before, so scores repeat bit for bit.
    sample = pairs.training[: size * math.ceil(MEASURED_PAIRS / size)]

    def batch(step: int, params: Any) -> Batch:
        segments = pair_segments([pairs.training[i] for i in numbers(step)])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        policy = to_host(learner.score(params, rollouts, used).values)
        before = [logprobs for i in numbers(step) for logprobs in training[2 * i : 2 * i + 2]]
        feedback = pair_feedback(rollouts, policy, before)
        batch = preference_batch(algorithm, segments, rollouts, feedback)
        advantages = np.asarray(batch.advantages)
        return batch, used, feedback_metrics(algorithm, feedback, advantages, None)

    def measure_heldout(params: Any) -> dict[str, float]:
        now = logprobs(params, pairs.heldout)
        return _preferences(config.beta, now, heldout, "heldout_") if now else {}

    def measure_training(params: Any) -> dict[str, float]:
        return _preferences(config.beta, logprobs(params, sample), training, "")

    return Task(steps, lambda: params, batch, LABELS, digests, measure_heldout, measure_training)
