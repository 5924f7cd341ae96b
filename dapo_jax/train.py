"""DAPO's Algorithm 1 (arXiv 2503.14476): prompts to an updated policy. `run/` is the run around it.

collect     groups of responses that carry signal      rollout/dynamic_sampling.py
minibatches split, packed into rows                    learner/minibatches.py
score       log-probs of old policy and reference      learner/score_pass.py
estimate    an advantage per token                     learner/advantages.py
weights     a loss weight per token                    learner/minibatches.py
update      loss = sum(loss_weights * token_loss)      learner/learners.py, learner/policy.py
"""

import dataclasses

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.learner.advantages import Feedback, estimate
from dapo_jax.learner.learners import LearnerPrograms, LearnerStates, UpdateRecord, update
from dapo_jax.learner.minibatches import (
    Minibatches,
    TokenWeights,
    make_minibatches,
    make_train_batches,
)
from dapo_jax.learner.score_pass import await_scores, make_feedback, score_pass
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.source import Rollout, RolloutSource, SourceState


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Everything that each step works with and no step changes."""

    config: Config
    source: RolloutSource
    learners: LearnerPrograms
    decoder: DecoderConfig
    token_weights: TokenWeights | None = None


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """Everything that decides the next step, and what a checkpoint holds of the trainer."""

    step: int  # finished rollout steps
    learners: LearnerStates
    source: SourceState


@dataclasses.dataclass
class StepRecord:
    """Values that a step made, from which metrics and traces are read; None where it kept no group.

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
    """A rollout step; its updates may still be computed when this returns."""
    config, programs, learners = trainer.config, trainer.learners, state.learners
    source, rollouts = trainer.source.collect(state.source, learners.policy.params, state.step)
    record = StepRecord(state.step, rollouts)
    if rollouts.groups:
        shape = trainer.decoder, programs.policy.mesh
        minibatches = make_minibatches(config, rollouts.groups, *shape, trainer.token_weights)
        scored = score_pass(config, programs, learners, minibatches)
        feedback = make_feedback(config, minibatches, scored, rollouts.groups)
        advantages, returns = estimate(config.algorithm, feedback)
        batches = make_train_batches(config, minibatches, await_scores(scored), advantages, returns)
        record = StepRecord(state.step, rollouts, minibatches, feedback, advantages, returns)
        for u, batch in enumerate(batches):
            used = minibatches.microbatches[u]
            learners, updates = update(config, programs, learners, state.step, u, batch, used)
            record.updates += updates
    source = trainer.source.prefetch(source, state.step)
    return TrainerState(state.step + 1, learners, source), record
