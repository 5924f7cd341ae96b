"""Cost model of the simulator: seconds per unit of what is counted, and the clock that adds up."""

import collections
import dataclasses

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
    decode_products: float = 0.0  # the same of phases of a decode step, where they are known
    decode_exchange: float = 0.0
    decode_draw: float = 0.0
    slot_step: float = 0.0  # a decode step of one of a replica's slots, busy or not
    read_token: float = 0.0  # of a replica's cache, that attention reads in a decode step
    response: float = 0.0  # finished; the host's work on it
    judged: float = 0.0  # a worker's seconds for a response, beside decoding
    score_pass: float = 0.0
    score_token: float = 0.0  # places in packed rows, padding included, as in updates
    update: float = 0.0
    update_token: float = 0.0
    host_slot: float = 0.0  # of any replica, in a burst
    host_packed: float = 0.0  # a token of a trained response
    host_weighed: float = 0.0  # the same, beside the score pass
    host_measured: float = 0.0  # the same, beside the updates
    host_judged: float = 0.0  # in the background: a token of a judged group that is kept
    host_write: float = 0.0  # a file of judged groups
    host_listed: float = 0.0  # a token of a response in rollouts/


SCORE, UPDATE = ("score_pass", "score_token"), ("update", "update_token")
LEARNING = (*SCORE, *UPDATE, "host_packed", "host_weighed", "host_measured")
BACKGROUND = "host_background"  # seconds that are waited for it
HOSTS = ("host_slot", "host_packed", "host_weighed", "host_measured", BACKGROUND)


class Meter:
    """Virtual clock: counts what is used, and adds up what that costs.

    Attributes:
        counts: by field of `Costs`.
        seconds: the same in seconds, and what was waited for.
        background_free: when what was given to the background is done.
        launched: when the burst was launched beside which hosts now work.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self.counts: Counts = collections.defaultdict(float)
        self.seconds: Counts = collections.defaultdict(float)
        self.background_free = self.launched = 0.0

    def add(self, **used: float) -> None:
        """Books amounts, by field of `Costs`."""
        for name, amount in used.items():
            self.counts[name] += amount
            self.seconds[name] += amount * getattr(self.costs, name)

    def add_behind(self, **used: float) -> None:
        """Books amounts of the background, which begins with them once it is free."""
        for name, amount in used.items():
            self.counts[name] += amount
            begins = max(self.now, self.background_free)
            self.background_free = begins + amount * getattr(self.costs, name)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return sum(self.seconds.values())

    def wait(self, name: str, until: float) -> None:
        """Waits until a second of the clock, under a name of its own."""
        self.seconds[name] += max(0.0, until - self.now)
