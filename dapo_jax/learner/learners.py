"""Policy and critic together: compiled programs, states, and an update of both."""

import dataclasses
from typing import Any, NamedTuple

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.learner.batches import Mean, TrainBatch, TrainState
from dapo_jax.learner.policy import IMPORTANCE_SQUARE
from dapo_jax.learner.ratios import RATIO_HISTOGRAM
from dapo_jax.learner.update import Learner, UpdateOutputs, learning_rate


@dataclasses.dataclass(frozen=True)
class LearnerPrograms:
    """Compiled programs of policy, critic and teacher, and the parameters of frozen models.

    Attributes:
        teacher_params: with algorithm.distillation = 'jsd' the policy's update reads them too.
    """

    policy: Learner
    critic: Learner | None = None
    reference: Any = None  # parameters of the reference, None without one
    teacher: Learner | None = None
    teacher_params: Any = None


@dataclasses.dataclass(frozen=True)
class LearnerStates:
    """The train states of policy and critic."""

    policy: TrainState
    critic: TrainState | None = None


@dataclasses.dataclass(frozen=True)
class UpdateRecord:
    """The batch and metrics of an optimizer update; arrays may still be computed on devices.

    Attributes:
        means: metrics by name; empty if the learning rate is 0 and nothing was updated.
        token_logprobs: [M, R, T] of the differentiated policy, with `log.token_ratios`.
        importance_square: mean squared importance weight, for the effective sample size.
    """

    learner: str  # "policy" or "critic"
    minibatch: int  # its index in the step
    batch: TrainBatch
    microbatches: int  # number of microbatches that are not empty
    learning_rate: float
    means: dict[str, Mean]
    token_logprobs: jax.Array | None = None
    ratio_histogram: Mean | None = None  # counts of the policy's ratios, for their quantiles
    importance_square: Mean | None = None


class LearningRates(NamedTuple):
    """Learning rates of a rollout step; the policy's is 0 while only the critic is trained."""

    policy: float
    critic: float


def learning_rates(config: Config, step: int) -> LearningRates:
    """Return the learning rates of rollout step `step`."""
    pretrain_steps = config.critic_pretrain_steps()
    policy = 0.0
    if step >= pretrain_steps:
        remaining = config.total_steps - pretrain_steps
        policy = learning_rate(config.optimizer, step - pretrain_steps, remaining)
    return LearningRates(policy, learning_rate(config.critic.optimizer, step, config.total_steps))


def update(
    programs: LearnerPrograms,
    states: LearnerStates,
    rates: LearningRates,
    minibatch: int,
    batch: TrainBatch,
    microbatches: int,
) -> tuple[LearnerStates, list[UpdateRecord]]:
    """Take an optimizer step of policy and critic; skip a batch without loss weights.

    The new states and metrics are returned while the devices still compute them.
    """
    if not batch.loss_weights.any():  # all responses were filtered
        return states, []

    def record(learner: str, rate: float, outputs: UpdateOutputs) -> UpdateRecord:
        means, logprobs = outputs
        histogram = means.pop(RATIO_HISTOGRAM, None)
        square = means.pop(IMPORTANCE_SQUARE, None)
        return UpdateRecord(
            learner, minibatch, batch, microbatches, rate, means, logprobs, histogram, square
        )

    policy = states.policy
    critic = states.critic
    outputs = UpdateOutputs({})
    if rates.policy:
        policy, outputs = programs.policy.update(policy, batch, microbatches, rates.policy)
    records = [record("policy", rates.policy, outputs)]
    if programs.critic and critic:
        critic, outputs = programs.critic.update(critic, batch, microbatches, rates.critic)
        records.append(record("critic", rates.critic, outputs))
    return LearnerStates(policy, critic), records
