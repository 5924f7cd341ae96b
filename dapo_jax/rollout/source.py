"""The rollouts of a step, by whichever policy draws them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dapo_jax.reporting.metrics import Clock
from dapo_jax.rollout.dynamic_sampling import collect
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING, SamplingRule
from dapo_jax.rollout.scheduler import SamplerCounts
from dapo_jax.run.components import Parts
from dapo_jax.structs import Carried, Collected


@dataclasses.dataclass(frozen=True)
class Order:
    """Which rollouts to make.

    Attributes:
        params: of the policy that draws, which has learned for `policy_step` steps.
        step: keys the draws.
        position: place in the data.
        kept_fraction: the running estimate.
        carried: what the step before left.
    """

    params: Any
    policy_step: int
    step: int
    position: int
    kept_fraction: float
    carried: tuple[Carried, ...] = ()


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What an order gave, what it cost, and how long it took."""

    collected: Collected
    counts: SamplerCounts
    seconds: float


def make_rollouts(parts: Parts, order: Order, interrupted: Callable[[], bool]) -> Gathered:
    """Samples, judges and filters what the order says. Raises what `filtering.collect` raises."""
    settings, clock = parts.config.sampler, Clock()
    rule = SamplingRule(settings.temperature, settings.top_p, settings.top_k)
    keyed = {"purpose": SAMPLE_FOR_TRAINING, "step": order.step}
    parts.sampler.begin(order.params, rule=rule, policy_step=order.policy_step, **keyed)
    assert parts.prompts is not None  # in a run that trains
    parts.prompts.position = order.position
    with parts.progress.collecting(order.step + 1, parts.sampler) as show:
        data = parts.prompts, parts.sampler, parts.judge
        collected = collect(
            parts.config,
            *data,
            order.kept_fraction,
            step=order.step,
            carried=order.carried,
            known=parts.finished.begin(order.step),
            on_judged=parts.finished.add,
            on_burst=show,
            interrupted=interrupted,
        )
    parts.sampler.release()  # where an update follows, it needs the memory of the caches
    return Gathered(collected, dataclasses.replace(parts.sampler.counts), clock.total())
