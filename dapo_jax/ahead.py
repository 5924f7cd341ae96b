"""The rollouts of a step: made now, or beside the update of the step before (`rollout.lag`)."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dapo_jax.filtering import Collected, Interrupted, collect
from dapo_jax.parts import Parts
from dapo_jax.reporting.metrics import Clock
from dapo_jax.sampler.rollout import SamplerCounts
from dapo_jax.sampler.sampling import SAMPLE_FOR_TRAINING, SamplingRule


@dataclasses.dataclass(frozen=True)
class Order:
    """Which rollouts to make.

    Attributes:
        params: of the policy that draws, which has learned for `policy_step` steps.
        step: keys the draws.
        position: place in the data.
        kept_fraction: the running estimate.
    """

    params: Any
    policy_step: int
    step: int
    position: int
    kept_fraction: float


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What an order gave, what it cost, how long it took, and how old its policy was."""

    collected: Collected
    counts: SamplerCounts
    seconds: float
    lag: int  # steps


def _begin(parts: Parts, order: Order) -> None:
    settings = parts.config.sampler
    rule = SamplingRule(settings.temperature, settings.top_p, settings.top_k)
    keyed = {"purpose": SAMPLE_FOR_TRAINING, "step": order.step}
    parts.sampler.begin(order.params, rule=rule, policy_step=order.policy_step, **keyed)


def _collect(parts: Parts, order: Order, interrupted: Callable[[], bool]) -> Gathered:
    clock, parts.prompts.position = Clock(), order.position
    with parts.progress.collecting(order.step + 1, parts.sampler) as show:
        data = parts.prompts, parts.sampler, parts.judge
        collected = collect(
            parts.config, *data, order.kept_fraction, on_burst=show, interrupted=interrupted
        )
    parts.sampler.release()  # where an update follows, it needs the memory of the caches
    counts, lag = dataclasses.replace(parts.sampler.counts), order.step - order.policy_step
    return Gathered(collected, counts, clock.total(), lag)


def make_rollouts(
    parts: Parts,
    order: Order,
    interrupted: Callable[[], bool],
    started: Future[Gathered] | None = None,
) -> Gathered:
    """What `started` gives, which was the same order, or what the order gives now.

    Raises what `filtering.collect` raises, and `Interrupted` where a signal came meanwhile.
    """
    if started is None:
        _begin(parts, order)
        return _collect(parts, order, interrupted)
    gathered = started.result()
    if interrupted():
        raise Interrupted
    return gathered


def start_rollouts(parts: Parts, order: Order, interrupted: Callable[[], bool]) -> Future[Gathered]:
    """Begins in the background; the order's parameters are read before this returns.

    Until the result is there nobody else may use the sampler and the prompts.
    """
    _begin(parts, order)
    future: Future[Gathered] = Future()

    def run() -> None:
        try:
            future.set_result(_collect(parts, order, interrupted))
        except BaseException as error:  # whoever takes the result gets it
            future.set_exception(error)

    threading.Thread(target=run, name="rollouts", daemon=True).start()
    return future
