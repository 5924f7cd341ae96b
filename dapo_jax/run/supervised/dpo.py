"""DPO on offline pairs (arXiv 2305.18290): the online preset's update, a file's answers.

The reference says its log-probs once, before the first step, and is then gone: memory holds one
policy, and a pass costs no second model.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.markup import escape

from dapo_jax.algorithms import Algorithm, dpo
from dapo_jax.config.experiment import DpoConfig
from dapo_jax.data.supervised_examples import Examples
from dapo_jax.data.supervised_rows import PAIRS, Example
from dapo_jax.learner.advantages import Feedback, estimate, gather_feedback
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.packing import Segment, make_batch, pack, place_tokens
from dapo_jax.learner.policy import policy_learner
from dapo_jax.learner.update import Learner
from dapo_jax.model import load_huggingface
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.metrics import feedback_metrics
from dapo_jax.run.components import check_processes, check_same_model
from dapo_jax.run.compute import open_mesh
from dapo_jax.run.supervised.common import (
    WRITTEN,
    TrainingLog,
    open_examples,
    own_segments,
    score_responses,
    starting_point,
    write_policy,
)
from dapo_jax.run.supervised.resume import ResumePoint, forget, model_digests
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import replace
from dapo_jax.runtime.storage.ownership import PREFERRING
from dapo_jax.structs import Rollouts, ScoredBatch, TrainBatch, TrainState

LOOKED_AT = 256  # training pairs that are measured before and after
SHOWN = {
    "preference_loss": "loss",
    "preference_accuracy": "accuracy",
    "heldout_preference_loss": "held-out loss",
    "heldout_preference_accuracy": "held-out accuracy",
}


def algorithm_of(config: DpoConfig) -> Algorithm:
    """The preset `dpo` with the beta of the run."""
    return dataclasses.replace(dpo(), preference_beta=config.beta)


def pair_segments(pairs: Sequence[Example]) -> list[Segment]:
    """Chosen and rejected in turn; the chosen one is the right one."""
    return [one._replace(correct=i % 2 == 0) for i, one in enumerate(own_segments(pairs))]


def weigh(rollouts: Rollouts, policy: np.ndarray, reference: Sequence[np.ndarray]) -> Feedback:
    """The feedback on packed pairs.

    Args:
        policy: log-probs of the policy, as packed.
        reference: those of the reference, of each response.
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
    """The minibatch whose gradient is that of the mean of -log sigmoid(beta margin) over pairs."""
    advantages, _ = estimate(algorithm, feedback)
    scored, budget = ScoredBatch(rollouts, None), rollouts.tokens.shape[-1]
    return make_batch(scored, segments, advantages, None, algorithm, budget)


class Probe:
    """What the reference says of all pairs, asked once, and how a policy does against that."""

    def __init__(
        self,
        learner: Learner,
        config: DpoConfig,
        signals: Signals,
        found: Examples,
        reference: Any,
    ):
        size = config.pairs_per_step
        self._learner, self._beta = learner, config.beta
        self._around = size, config.packing, signals
        # Whole parts, so that what is scored again is scored as it was: equal to the last bit.
        self._sample = found.training[: size * math.ceil(LOOKED_AT / size)]
        self._heldout = found.heldout
        self._of_training = self._logprobs(reference, found.training)
        self._of_heldout = self._logprobs(reference, found.heldout)

    def _logprobs(self, params: Any, pairs: Sequence[Example]) -> list[np.ndarray]:
        """Of every token of every response, chosen and rejected in turn."""
        scored = score_responses(self._learner, params, pairs, *self._around)
        return [logprobs for _, logprobs in scored]

    def reference_of(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """What it says of the responses of these training pairs."""
        return [one for n in numbers for one in self._of_training[2 * n : 2 * n + 2]]

    def _measure(
        self, params: Any, pairs: Sequence[Example], reference: Sequence[np.ndarray], prefix: str
    ) -> dict[str, float]:
        if not pairs:
            return {}
        both = zip(self._logprobs(params, pairs), reference, strict=False)
        gains = np.array([np.sum(np.float64(now) - before) for now, before in both])
        margins = gains[0::2] - gains[1::2]
        return {
            f"{prefix}preference_loss": float(np.logaddexp(0.0, -self._beta * margins).mean()),
            f"{prefix}preference_accuracy": float(np.mean((np.sign(margins) + 1) / 2)),
        }

    def measure_heldout(self, params: Any) -> dict[str, float]:
        """DPO's loss and the share of pairs told right, a margin of 0 half; {} of no pairs."""
        return self._measure(params, self._heldout, self._of_heldout, "heldout_")

    def measure(self, params: Any) -> dict[str, float]:
        """The same, and that of the first training pairs."""
        training = self._measure(params, self._sample, self._of_training, "")
        return training | self.measure_heldout(params)


def report(before: dict[str, float], after: dict[str, float], steps: int) -> None:
    """A line with what became of the losses and accuracies."""
    changes = (f"{SHOWN[name]} {value:.3f} -> {after[name]:.3f}" for name, value in before.items())
    Progress().say(f"{', '.join(changes)} after {steps} steps")


def prefer(config: DpoConfig) -> pathlib.Path:
    """Trains a policy on pairs and writes its folder; returns the path. Raises `ConfigError`."""
    check_processes(config)
    with Signals() as signals, replace("out", config.out, PREFERRING, WRITTEN) as folder:
        train_and_write(config, folder, signals)
    forget(config.out)
    Progress().say(f"policy written to {escape(config.out)}")
    return pathlib.Path(config.out)


def train_and_write(config: DpoConfig, folder: pathlib.Path | None, signals: Signals) -> None:
    """The policy's files in `folder`, which is there and empty; None: another process writes."""
    packing, algorithm, other = config.packing, algorithm_of(config), config.reference
    mesh = open_mesh(config.mesh, packing.rows_per_microbatch)
    decoder, tokenizer, load = starting_point(config, mesh)
    if other:
        check_same_model("reference", other, config.start, lambda shape: shape)
    found, steps, of_step = open_examples(config, tokenizer, PAIRS, "pairs_per_step")
    learner = policy_learner(algorithm, config.compute, config.optimizer, decoder, mesh)
    params = frozen = load()
    if other:
        frozen = load_huggingface.load_params(other, decoder, mesh, field="reference", cast=True)
    probe = Probe(learner, config, signals, found, frozen)
    digests = {"data": found.digest()} | model_digests(config.start, other)
    with ResumePoint(config, digests) as half:
        state = half.begin(learner.abstract_state, lambda: learner.start(params))
        del params, frozen
        state = learn(config, Course(found, steps, of_step), learner, probe, state, half, signals)
        write_policy(folder, state.params, decoder, tokenizer, config.start, half)


class Course(NamedTuple):
    """What a run learns from: which pairs, in how many steps, which of them in a step."""

    found: Examples
    steps: int
    of_step: Callable[[int], list[int]]


def learn(
    config: DpoConfig,
    course: Course,
    learner: Learner,
    probe: Probe,
    state: TrainState,
    half: ResumePoint,
    signals: Signals,
) -> TrainState:
    """The state after all steps."""
    packing, algorithm = config.packing, algorithm_of(config)
    found, steps, of_step = course
    journal = TrainingLog(half, steps, config.optimizer.max_skipped_steps)
    if half.step:
        first = half.first_row()
        before = {name: first[name] for name in SHOWN if name in first}
    else:
        before = probe.measure(state.params)
        journal.add(0, before, {})
    for step in range(half.step, steps):
        journal.stop_if(signals)
        numbers = of_step(step)
        segments = pair_segments([found.training[i] for i in numbers])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        policy = to_host(learner.score(state.params, rollouts, used))
        feedback = weigh(rollouts, policy, probe.reference_of(numbers))
        batch = preference_batch(algorithm, segments, rollouts, feedback)
        rate = learning_rate(config.optimizer, step, steps)
        state, means = learner.update(state, batch, used, rate)
        told = feedback_metrics(algorithm, feedback, np.asarray(batch.advantages), None)
        journal.add(step + 1, {"learning_rate": rate} | told, means)
        if journal.is_due(step + 1):
            journal.tell("dpo", probe.measure_heldout(state.params), SHOWN)
        journal.done(state)
    report(before, probe.measure(state.params), steps)
    return state
