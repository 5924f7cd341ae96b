"""DPO on offline pairs (arXiv 2305.18290): the online preset's update, a file's answers.

The reference's log-probs are computed once, before the first step, and the reference is then freed:
memory holds one policy, and a pass costs no second model.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms import Algorithm, dpo
from dapo_jax.config.experiment import DpoConfig
from dapo_jax.data.supervised_rows import PAIRS, Example
from dapo_jax.learner.advantages import Feedback, estimate, gather_feedback
from dapo_jax.learner.packing import Segment, make_batch, pack, place_tokens
from dapo_jax.learner.update import Learner
from dapo_jax.model import load_huggingface
from dapo_jax.reporting.metrics import feedback_metrics
from dapo_jax.run.components import check_same_model
from dapo_jax.run.supervised.common import Start, open_examples, own_segments, score_responses
from dapo_jax.run.supervised.resume import model_digests
from dapo_jax.run.supervised.training import train_supervised
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.ownership import PREFERRING
from dapo_jax.structs import Rollouts, ScoredBatch, TrainBatch

MEASURED_PAIRS = 256  # of the training pairs, before and after


def algorithm_of(config: DpoConfig) -> Algorithm:
    """Preset `dpo` with the beta of the run."""
    return dataclasses.replace(dpo(), preference_beta=config.beta)


def pair_segments(pairs: Sequence[Example]) -> list[Segment]:
    """Chosen and rejected responses in turn; the chosen one counts as correct."""
    segments = own_segments(pairs)
    return [segment._replace(correct=i % 2 == 0) for i, segment in enumerate(segments)]


def weigh(rollouts: Rollouts, policy: np.ndarray, reference: Sequence[np.ndarray]) -> Feedback:
    """Feedback on packed pairs: log-ratios of policy to reference.

    Args:
        policy: log-probs of the policy, as packed.
        reference: log-probs of the reference, by response.
    """
    index, count = np.asarray(rollouts.response_index), len(reference)
    return gather_feedback(
        index,
        np.zeros(count),
        log_ratios=policy - place_tokens(reference, index),
        groups=np.arange(count) // 2,
        correct=np.arange(count) % 2 == 0,
    )


def preference_batch(
    algorithm: Algorithm, segments: Sequence[Segment], rollouts: Rollouts, feedback: Feedback
) -> TrainBatch:
    """Minibatch whose gradient is that of the mean of -log sigmoid(beta margin) over pairs."""
    advantages, _ = estimate(algorithm, feedback)
    scored, budget = ScoredBatch(rollouts, None), rollouts.tokens.shape[-1]
    return make_batch(scored, segments, advantages, None, algorithm, budget)


def prefer(config: DpoConfig) -> pathlib.Path:
    """Trains a policy on pairs; errors as for `train_supervised`."""
    return train_supervised(config, "dpo", PREFERRING, algorithm_of(config), _open)


def _open(
    config: DpoConfig, start: Start, learner: Learner, signals: Signals
) -> tuple["PreferenceEvaluator", Callable[[], Any]]:
    if config.reference:
        check_same_model("reference", config.reference, config.start, lambda shape: shape)
    task = PreferenceEvaluator(config, start, learner, signals)
    params = reference = start.load()
    if config.reference:
        reference = load_huggingface.load_params(
            config.reference, start.decoder, start.mesh, field="reference", cast=True
        )
    task.score_reference(reference)
    return task, lambda: params


class PreferenceEvaluator:
    """Task of DPO: pairs of files, and a policy's preferences against the reference's."""

    labels: Mapping[str, str] = {
        "preference_loss": "loss",
        "preference_accuracy": "accuracy",
        "heldout_preference_loss": "held-out loss",
        "heldout_preference_accuracy": "held-out accuracy",
    }

    def __init__(self, config: DpoConfig, start: Start, learner: Learner, signals: Signals):
        pairs, self.steps, self._numbers = open_examples(
            config, start.tokenizer, PAIRS, "pairs_per_step"
        )
        self.digests = {"data": pairs.digest()} | model_digests(config.reference)
        self._training, self._heldout = pairs.training, pairs.heldout
        size = config.pairs_per_step
        # Whole parts, so that what is scored again is scored as it was: equal to the last bit.
        self._sample = pairs.training[: size * math.ceil(MEASURED_PAIRS / size)]
        self._learner, self._packing = learner, config.packing
        self._scoring = size, config.packing, signals
        self._algorithm, self._beta = algorithm_of(config), config.beta
        self._training_reference: list[np.ndarray] = []
        self._heldout_reference: list[np.ndarray] = []

    def score_reference(self, params: Any) -> None:
        """Computes the log-probs of the reference model `params` on all pairs."""
        self._training_reference = self._logprobs(params, self._training)
        self._heldout_reference = self._logprobs(params, self._heldout)

    def _logprobs(self, params: Any, pairs: Sequence[Example]) -> list[np.ndarray]:
        """Log-probs of every token, by response: chosen and rejected in turn."""
        scored = score_responses(self._learner, params, pairs, *self._scoring)
        return [logprobs for _, logprobs in scored]

    def batch(self, step: int, params: Any) -> tuple[TrainBatch, int, dict[str, float]]:
        """Minibatch of a step, its microbatches in use, and metrics of its feedback."""
        numbers = self._numbers(step)
        segments = pair_segments([self._training[i] for i in numbers])
        rollouts, used = pack(segments, self._packing.row_tokens, self._packing.rows_per_microbatch)
        policy = to_host(self._learner.score(params, rollouts, used))
        reference = [
            logprobs for i in numbers for logprobs in self._training_reference[2 * i : 2 * i + 2]
        ]
        feedback = weigh(rollouts, policy, reference)
        batch = preference_batch(self._algorithm, segments, rollouts, feedback)
        advantages = np.asarray(batch.advantages)
        return batch, used, feedback_metrics(self._algorithm, feedback, advantages, None)

    def _measure(
        self, params: Any, pairs: Sequence[Example], reference: Sequence[np.ndarray], prefix: str
    ) -> dict[str, float]:
        """DPO's loss, and the share of pairs told right, in which a margin of 0 counts half."""
        if not pairs:
            return {}
        both = zip(self._logprobs(params, pairs), reference, strict=False)
        gains = np.array([np.sum(np.float64(now) - before) for now, before in both])
        margins = gains[0::2] - gains[1::2]
        return {
            f"{prefix}preference_loss": float(np.logaddexp(0.0, -self._beta * margins).mean()),
            f"{prefix}preference_accuracy": float(np.mean((np.sign(margins) + 1) / 2)),
        }

    def measure_training(self, params: Any) -> dict[str, float]:
        """Loss and accuracy on the first training pairs."""
        return self._measure(params, self._sample, self._training_reference, "")

    def measure_heldout(self, params: Any) -> dict[str, float]:
        """Loss and accuracy on the held-out pairs; empty without any."""
        return self._measure(params, self._heldout, self._heldout_reference, "heldout_")
