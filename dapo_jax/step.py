"""DAPO's Algorithm 1 (arXiv 2503.14476): one step from prompts to an updated policy.

collect      groups of responses with a learning signal   rollout/source.py, dynamic_sampling.py
minibatches  split, packed into rows                      learner/minibatches.py
score        log-probs of old policy and reference        learner/score_pass.py
estimate     an advantage per token                       learner/advantages.py
weight       a loss weight per token                      learner/minibatches.py, learner/losses.py
update       loss = sum(loss_weights * token_loss)        learner/update.py, learner/policy.py

`run/` has the loop around the steps.
"""

import dataclasses

import numpy as np

from dapo_jax.learner.advantages import Feedback, estimate
from dapo_jax.learner.minibatches import (
    Minibatches,
    RowChoice,
    TokenWeights,
    entropy_bonus,
    make_minibatches,
    make_train_batches,
)
from dapo_jax.learner.packing import RowShape
from dapo_jax.learner.score_pass import await_scores, make_feedback, score_pass
from dapo_jax.learner.update import (
    LearnerPrograms,
    LearnerStates,
    UpdateRecord,
    learning_rates,
    update,
)
from dapo_jax.rollout.source import GroupSource, Rollout, SourceState


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The parts of a run that no step changes."""

    source: GroupSource
    programs: LearnerPrograms
    rows: RowChoice
    token_weights: TokenWeights | None = None


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """Everything that decides the next step; a checkpoint holds it."""

    step: int  # finished rollout steps
    learners: LearnerStates
    source: SourceState
    shapes: tuple[RowShape, ...] = ()  # of the rows of earlier steps: their programs are compiled
    entropy_weight: float = 0.0  # of the next step, with `algorithm.entropy_target`


@dataclasses.dataclass
class StepRecord:
    """The intermediate values of a step, for metrics and traces; None if no group was kept.

    Arrays are [U updates, M microbatches, R rows, T tokens].
    """

    step: int
    rollouts: Rollout
    minibatches: Minibatches | None = None
    feedback: Feedback | None = None
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None  # with a critic
    updates: list[UpdateRecord] = dataclasses.field(default_factory=list)


def train_step(trainer: Trainer, state: TrainerState) -> tuple[TrainerState, StepRecord]:
    """Run one rollout step; the devices may still compute its updates when this returns."""
    config = trainer.source.config
    programs = trainer.programs
    learners, shapes, entropy_weight = state.learners, state.shapes, state.entropy_weight
    source, rollouts = trainer.source.collect(state.source, learners.policy.params, state.step)
    record = StepRecord(state.step, rollouts)
    if rollouts.groups:
        parts = rollouts.groups, trainer.rows, trainer.token_weights
        minibatches = make_minibatches(config, *parts, shapes)
        shapes = minibatches.shapes
        scored = score_pass(config, programs, learners, minibatches)
        feedback = make_feedback(config, minibatches, scored, rollouts.groups)
        estimates = estimate(config.algorithm, feedback)
        record = StepRecord(state.step, rollouts, minibatches, feedback, *estimates)
        scored = await_scores(scored)
        bonus, entropy_weight = entropy_bonus(config.algorithm, entropy_weight, scored, feedback)
        batches = make_train_batches(config, minibatches, scored, estimates, state.step, bonus)
        rates = learning_rates(config, state.step)
        for u, batch in enumerate(batches):
            used = minibatches.microbatches[u]
            learners, updates = update(programs, learners, rates, u, batch, used)
            record.updates += updates
    source = trainer.source.prefetch(source, state.step)
    return TrainerState(state.step + 1, learners, source, shapes, entropy_weight), record
