"""The models of a run: compiled programs, states, and an update of those that are trained."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dapo_jax.config.experiment import Config, Optimizer
from dapo_jax.learner.batches import CRITIC, Mean, TrainBatch, TrainState
from dapo_jax.learner.metrics import RATIO_HISTOGRAM
from dapo_jax.learner.packing import Segment
from dapo_jax.learner.policy import IMPORTANCE_SQUARE
from dapo_jax.learner.update import AveragedLearner, Learner, UpdateOutputs, learning_rate
from dapo_jax.model.decoder import DecoderConfig

POLICY = "policy"


class Model(NamedTuple):
    """Shape and parameters of a frozen model; the parameters may be abstract."""

    decoder: DecoderConfig
    params: Any


@dataclasses.dataclass(frozen=True)
class TokenScorer:
    """A model beside the policy: its program, and its parameters if it is frozen."""

    # None: no score pass, the policy's update reads the parameters
    learner: "Learner | AveragedLearner | None"
    params: Any = None  # None: the model is trained, and `LearnerStates` has them
    # Responses -> those that it scores, behind prompts of its own; None: it scores the policy's.
    tell: Callable[[Sequence[Segment]], list[Segment]] | None = None


@dataclasses.dataclass(frozen=True)
class LearnerPrograms:
    """Compiled programs of the policy, and of the models that score its tokens, by name."""

    policy: Learner
    scorers: Mapping[str, TokenScorer] = dataclasses.field(default_factory=dict)

    def trained(self) -> dict[str, Any]:
        """Return the programs of the models that have a state, by name; the policy is the first."""
        pairs = self.scorers.items()
        others = {name: s.learner for name, s in pairs if s.learner and s.params is None}
        return {POLICY: self.policy} | others


@dataclasses.dataclass(frozen=True)
class LearnerStates:
    """The train states of the policy and of the other trained models, by name."""

    policy: TrainState
    others: Mapping[str, TrainState] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, states: Mapping[str, TrainState]) -> "LearnerStates":
        """Return the states of a mapping that has all of them."""
        return cls(states[POLICY], {k: state for k, state in states.items() if k != POLICY})

    def by_name(self) -> dict[str, TrainState]:
        """Return all of them by name; the policy is the first."""
        return {POLICY: self.policy, **self.others}


@dataclasses.dataclass(frozen=True)
class UpdateRecord:
    """The batch and metrics of an optimizer update; arrays may still be computed on devices."""

    learner: str  # name of the model
    minibatch: int  # its index in the step
    batch: TrainBatch
    microbatches: int  # number of microbatches that are not empty
    means: dict[str, Mean]  # by name; empty if the learning rate is 0 and nothing was updated
    token_logprobs: jax.Array | None = None  # [M, R, T] of the policy, with `log.token_ratios`
    ratio_histogram: Mean | None = None  # counts of the policy's ratios, for their quantiles
    importance_square: Mean | None = None  # of weights, for the effective sample size


def optimizers(config: Config) -> dict[str, Optimizer]:
    """Return the optimizer settings of the trained models, by name."""
    critic = {CRITIC: config.critic.optimizer} if config.algorithm.critic else {}
    return {POLICY: config.optimizer} | critic


def learning_rates(config: Config, step: int) -> dict[str, float]:
    """Return the rates by model; the policy's is 0 while only the critic is trained."""
    rates = {}
    for name, settings in optimizers(config).items():
        wait = config.critic_pretrain_steps() if name == POLICY else 0
        own = step - wait, config.total_steps - wait
        rates[name] = learning_rate(settings, *own) if step >= wait else 0.0
    return rates


def update(
    programs: LearnerPrograms,
    states: LearnerStates,
    rates: Mapping[str, float],  # by model
    minibatch: int,
    batch: TrainBatch,
    microbatches: int,
) -> tuple[LearnerStates, list[UpdateRecord]]:
    """Take an optimizer step of each trained model; skip a batch without loss weights.

    The new states and metrics are returned while the devices still compute them.
    """
    if not batch.loss_weights.any():  # all responses were filtered
        return states, []
    new, records = states.by_name(), []
    for name, learner in programs.trained().items():
        if isinstance(learner, AveragedLearner):
            new[name] = learner.update(new[name], new[POLICY].params)
            continue
        outputs = UpdateOutputs({})
        if rates[name]:
            new[name], outputs = learner.update(new[name], batch, microbatches, rates[name])
        means, logprobs = outputs
        histogram = means.pop(RATIO_HISTOGRAM, None)
        square = means.pop(IMPORTANCE_SQUARE, None)
        records.append(
            UpdateRecord(name, minibatch, batch, microbatches, means, logprobs, histogram, square)
        )
    return LearnerStates.of(new), records
