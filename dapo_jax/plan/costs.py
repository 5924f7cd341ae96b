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
class Chip:
    """What a chip does in a second, as far as programs reach it."""

    bytes_per_second: float
    flops_per_second: float
    step_seconds: float = 1.5e-3  # overhead of a decode step


def roofline(
    chip: Chip,
    *,
    parameters: float,
    token_bytes: float,
    chips: int,
    replicas: int,
    slots: int,
    microbatch_chips: int | None = None,
    weight_bytes: float = 2.0,
) -> Costs:
    """Costs from a chip's speed: memory while decoding, arithmetic elsewhere.

    A decode step reads the weights, or multiplies by them if that takes longer, and then the
    cache. A training token takes 6 operations a parameter, a scored or prefilled one 2; attention's
    own are left out, and what is recomputed in backward is for `flops_per_second` to hold.

    Args:
        parameters: of the policy.
        token_bytes: of keys and values of a token, all layers and heads.
        chips, replicas: a replica decodes on chips / replicas of them.
        slots: of a replica.
        microbatch_chips: those that learn; None: all.
    """
    tensor, learners = chips / replicas, microbatch_chips or chips
    read = parameters * weight_bytes / tensor / chip.bytes_per_second
    operations = 2 * parameters / chip.flops_per_second
    return Costs(
        load=parameters * weight_bytes / tensor / chip.bytes_per_second,
        prefill_token=operations / tensor,
        decode_step=chip.step_seconds + max(read, slots * operations / tensor),
        read_token=token_bytes / tensor / chip.bytes_per_second,
        score_token=operations / learners,
        update_token=3 * operations / learners,
    )


def overlapped_seconds(rollouts: Sequence[float], updates: Sequence[float], lag: int) -> float:
    """Of steps whose rollouts and updates have devices of their own (`rollout.lag`).

    Without a lag their sum; with one the longer of an update and the rollout beside it.
    """
    if not lag:
        return sum(rollouts) + sum(updates)
    beside = zip(rollouts[1:], updates[:-1], strict=True)
    return rollouts[0] + sum(max(pair) for pair in beside) + updates[-1]
