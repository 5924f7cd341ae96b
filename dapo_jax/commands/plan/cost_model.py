"""What calls cost: seconds per unit of what is counted, from a chip's numbers or fitted to runs."""

import collections
import dataclasses
from collections.abc import Sequence

Counts = dict[str, float]  # how much of each field of `Costs` was used


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds per unit. Replicas decode at the same time: what one of them does counts."""

    load: float = 0.0  # of weights, once a rollout
    prefill_call: float = 0.0
    prefill_token: float = 0.0  # of the padded prompts of a replica
    insert_call: float = 0.0
    insert: float = 0.0  # a response
    burst: float = 0.0
    decode_step: float = 0.0
    slot_step: float = 0.0  # a decode step of one of a replica's slots, busy or not
    read_token: float = 0.0  # of a replica's cache, that attention reads in a decode step
    response: float = 0.0  # finished; the host's work on it
    judged: float = 0.0  # a worker's seconds for a response, beside decoding
    score_pass: float = 0.0
    score_token: float = 0.0  # places in packed rows, padding included, as in updates
    update: float = 0.0
    update_token: float = 0.0


LEARNING = ("score_pass", "score_token", "update", "update_token")


class Meter:
    """A virtual clock: counts what is used, and adds up what that costs.

    Attributes:
        counts: by field of `Costs`.
        seconds: the same in seconds, and what was waited for.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self.counts: Counts = collections.defaultdict(float)
        self.seconds: Counts = collections.defaultdict(float)

    def add(self, **used: float) -> None:
        """Uses so much of each."""
        for name, amount in used.items():
            self.counts[name] += amount
            self.seconds[name] += amount * getattr(self.costs, name)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return sum(self.seconds.values())

    def wait(self, name: str, until: float) -> None:
        """Nothing happens before `until`."""
        self.seconds[name] += max(0.0, until - self.now)


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
