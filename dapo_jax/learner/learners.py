"""Policy and critic together: compiled programs, states, and an update of both."""

import dataclasses
from typing import Any

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.learner.batches import Mean, TrainBatch, TrainState
from dapo_jax.learner.policy import IMPORTANCE_SQUARE
from dapo_jax.learner.ratios import RATIO_HISTOGRAM
from dapo_jax.learner.update import Learner, UpdateOutputs, learning_rate


@dataclasses.dataclass(frozen=True)
class LearnerPrograms:
    """Compiled programs of policy, critic and teacher, and the parameters of frozen models."""

    policy: Learner
    critic: Learner | None = None
    reference: Any = None  # parameters of the reference, None without one
    teacher: Learner | None = None
    teacher_params: Any = None  # for 'jsd', the policy's update reads them too


@dataclasses.dataclass(frozen=True)
class LearnerStates:
    """The train states of policy and critic."""

    policy: TrainState
    critic: TrainState | None = None


@dataclasses.dataclass(frozen=True)
class UpdateRecord:
    """The batch and metrics of an optimizer update; arrays may still be computed on devices."""

    learner: str  # "policy" or "critic"
    minibatch: int  # its index in the step
    batch: TrainBatch
    microbatches: int  # number of microbatches that are not empty
    means: dict[str, Mean]  # by name; empty if the learning rate is 0 and nothing was updated
    token_logprobs: jax.Array | None = None  # [M, R, T] of the policy, with `log.token_ratios`
    ratio_histogram: Mean | None = None  # counts of the policy's ratios, for their quantiles
    importance_square: Mean | None = None  # of weights, for the effective sample size


def learning_rates(config: Config, step: int) -> tuple[float, float]:
    """Return the rates of policy and critic; the policy's is 0 while only the critic is trained."""
    pretrain_steps = config.critic_pretrain_steps()
    policy = 0.0
    if step >= pretrain_steps:
        remaining = config.total_steps - pretrain_steps
        policy = learning_rate(config.optimizer, step - pretrain_steps, remaining)
    if not config.algorithm.critic:
        return policy, 0.0
    return policy, learning_rate(config.critic.optimizer, step, config.total_steps)


def update(
    programs: LearnerPrograms,
    states: LearnerStates,
    rates: tuple[float, float],  # of policy and critic
    minibatch: int,
    batch: TrainBatch,
    microbatches: int,
) -> tuple[LearnerStates, list[UpdateRecord]]:
    """Take an optimizer step of policy and critic; skip a batch without loss weights.

    The new states and metrics are returned while the devices still compute them.
    """
    if not batch.loss_weights.any():  # all responses were filtered
        return states, []

    def record(learner: str, outputs: UpdateOutputs) -> UpdateRecord:
        means, logprobs = outputs
        histogram = means.pop(RATIO_HISTOGRAM, None)
        square = means.pop(IMPORTANCE_SQUARE, None)
        return UpdateRecord(
            learner, minibatch, batch, microbatches, means, logprobs, histogram, square
        )

    policy = states.policy
    critic = states.critic
    outputs = UpdateOutputs({})
    rate, critic_rate = rates
    if rate:
        policy, outputs = programs.policy.update(policy, batch, microbatches, rate)
    records = [record("policy", outputs)]
    if programs.critic and critic:
        critic, outputs = programs.critic.update(critic, batch, microbatches, critic_rate)
        records.append(record("critic", outputs))
    return LearnerStates(policy, critic), records
