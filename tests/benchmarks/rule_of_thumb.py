"""Simulator costs from a chip's published speed, for benchmarks that compile nothing."""

import dataclasses
from collections.abc import Sequence

from dapo_jax.commands.plan.cost_model import Costs


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a chip does in a second.

    Attributes:
        bytes_per_second: of its memory, as far as programs reach it.
        flops_per_second: of a matrix product; inf: arithmetic takes no time.
        utilisation: the share of that which training, scoring and prefill reach, what backward
            computes again counted as lost.
        step_seconds: overhead of a decode step.
    """

    bytes_per_second: float
    flops_per_second: float
    utilisation: float = 0.4
    step_seconds: float = 1.5e-3


def rule_of_thumb(
    chip: Speed,
    *,
    parameters: float,
    token_bytes: float,
    chips: int,
    replicas: int,
    slots: int,
    learners: int | None = None,
) -> Costs:
    """Costs from a chip's speed: memory while decoding, arithmetic elsewhere.

    A decode step reads the weights (2 bytes each), or multiplies all slots by them if that takes
    longer, and then the cache. A training token takes 6 operations a parameter, a scored or
    prefilled one 2; attention's own are left out.

    Args:
        parameters: of the policy.
        token_bytes: of keys and values of a token, all layers and heads.
        chips, replicas: those that decode, a replica on chips / replicas of them.
        slots: of a replica.
        learners: chips that learn; None: the same.
    """
    tensor, flops = chips / replicas, chip.utilisation * chip.flops_per_second
    learning = parameters / (learners or chips) / flops
    weights = 2 * parameters / tensor  # bytes on a chip, and operations for a token
    read, product = weights / chip.bytes_per_second, slots * weights / chip.flops_per_second
    return Costs(
        load=read,
        prefill_token=weights / flops,
        decode_step=chip.step_seconds + max(read, product),
        read_token=token_bytes / tensor / chip.bytes_per_second,
        score_token=2 * learning,
        update_token=6 * learning,
    )


def overlapped_seconds(rollouts: Sequence[float], updates: Sequence[float], lag: int) -> float:
    """Of steps whose rollouts and updates have devices of their own (`rollout.lag`).

    Without a lag their sum; with one the longer of an update and the rollout beside it.
    """
    if not lag:
        return sum(rollouts) + sum(updates)
    beside = zip(rollouts[1:], updates[:-1], strict=True)
    return rollouts[0] + sum(max(pair) for pair in beside) + updates[-1]
