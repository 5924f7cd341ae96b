"""Policy and critic together: their compiled programs, their states and one update of both."""

import dataclasses
from typing import Any

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.learner.batches import Mean, TrainBatch, TrainState
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.policy import IMPORTANCE_SQUARE
from dapo_jax.learner.ratio_quantiles import RATIO_HISTOGRAM
from dapo_jax.learner.update import TOKEN_LOGPROBS, Learner

# Outputs of an update that are fields of its record and no metrics.
NO_METRICS = (TOKEN_LOGPROBS, RATIO_HISTOGRAM, IMPORTANCE_SQUARE)


@dataclasses.dataclass(frozen=True)
class LearnerPrograms:
    """Compiled programs of policy and critic, and the frozen parameters that score beside them.

    Attributes:
        teacher: scores tokens with `teacher_params`; never updated.
        teacher_params: of its own shape; with algorithm.distillation = 'jsd' the policy's update
            reads them too.
    """

    policy: Learner
    critic: Learner | None = None
    reference: Any = None
    teacher: Learner | None = None
    teacher_params: Any = None


@dataclasses.dataclass(frozen=True)
class LearnerStates:
    """Parameters and optimizer states of policy and critic."""

    policy: TrainState
    critic: TrainState | None = None


@dataclasses.dataclass(frozen=True)
class UpdateRecord:
    """Record of an optimizer update: its batch and its means, which may still be on the devices.

    Attributes:
        learner: "policy" or "critic".
        minibatch: place among those of the step.
        microbatches: of the batch that were used.
        means: by metric; empty where a learning rate of 0 left the learner alone.
        token_logprobs: [M, R, T] of the policy that was differentiated, with `log.token_ratios`.
        ratio_histogram: counts of the policy's ratios, for their quantiles.
        importance_square: mean squared importance weight, for the effective sample size.
    """

    learner: str
    minibatch: int
    batch: TrainBatch
    microbatches: int
    learning_rate: float
    means: dict[str, Mean]
    token_logprobs: jax.Array | None = None
    ratio_histogram: Mean | None = None
    importance_square: Mean | None = None


def learning_rates(config: Config, step: int) -> tuple[float, float]:
    """Learning rates of the policy (0 while the critic learns alone) and of the critic."""
    alone, total = config.critic_pretrain_steps(), config.total_steps
    policy = learning_rate(config.optimizer, step - alone, total - alone) if step >= alone else 0.0
    return policy, learning_rate(config.critic.optimizer, step, total)


def update(
    config: Config,
    learners: LearnerPrograms,
    states: LearnerStates,
    step: int,
    minibatch: int,
    batch: TrainBatch,
    microbatches: int,
) -> tuple[LearnerStates, list[UpdateRecord]]:
    """Optimizer step of policy and critic; a batch without loss weights is left out.

    Returns at once: the new states and the means are still being computed.
    """
    if not batch.loss_weights.any():  # all filtered, or nothing right
        return states, []
    (rate, critic_rate), means = learning_rates(config, step), {}
    kept: dict[str, Any] = {}
    policy, critic = states.policy, states.critic
    if rate:
        policy, means = learners.policy.update(policy, batch, microbatches, rate)
        kept = {name: means.pop(name, None) for name in NO_METRICS}
    records = [UpdateRecord("policy", minibatch, batch, microbatches, rate, means, **kept)]
    if learners.critic and critic:
        critic, means = learners.critic.update(critic, batch, microbatches, critic_rate)
        records.append(UpdateRecord("critic", minibatch, batch, microbatches, critic_rate, means))
    return LearnerStates(policy, critic), records
