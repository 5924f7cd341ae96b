"""Cost model of the simulator: seconds per counted unit, and the clock that adds them up."""

import collections
import dataclasses

from dapo_jax.config.experiment import Config
from dapo_jax.runtime.storage.paths import is_remote

Counts = dict[str, float]  # amount used of each field of `Costs`


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds per unit. Replicas decode at the same time, so one replica's work counts.

    Packed tokens of score passes and updates include padding.
    """

    load: float = 0.0  # the weights, once per rollout
    prefill_call: float = 0.0
    prefill_token: float = 0.0  # of a replica's padded prompts
    insert_call: float = 0.0
    insert: float = 0.0  # per response
    burst: float = 0.0
    decode_step: float = 0.0
    decode_products: float = 0.0  # per decode step, as the two below
    decode_exchange: float = 0.0
    decode_draw: float = 0.0
    slot_step: float = 0.0  # per slot of a replica in a decode step, busy or not
    read_token: float = 0.0  # per cached token that a replica's attention reads in a decode step
    response: float = 0.0  # the host's work on a finished response
    judged: float = 0.0  # a worker's seconds per response, concurrent with decoding
    score_pass: float = 0.0
    score_token: float = 0.0
    update: float = 0.0
    update_token: float = 0.0
    host_slot: float = 0.0  # per slot of all replicas in a burst
    host_packed: float = 0.0  # per token of a trained response
    host_weighed: float = 0.0  # the same, concurrent with the score pass
    host_measured: float = 0.0  # the same, concurrent with the updates
    host_judged: float = 0.0  # in the background: per token of a saved group
    host_write: float = 0.0  # in the background: per file of saved groups
    host_listed: float = 0.0  # in the background: per token of a response in rollouts/


SCORE = ("score_pass", "score_token")
UPDATE = ("update", "update_token")
LEARNING = (*SCORE, *UPDATE, "host_packed", "host_weighed", "host_measured")
BACKGROUND = "host_background"  # seconds of waiting for background work
HOSTS = ("host_slot", "host_packed", "host_weighed", "host_measured", BACKGROUND)
WRITE_SECONDS = 0.125  # per file of finished groups in a bucket (assumed)


def host_costs(config: Config, hosts: int) -> Counts:
    """Return the costs of host work, by field of `Costs`.

    They were fitted to `python tests/benchmarks/hosts.py`, a step of 8,192 responses of 4k tokens
    on an AMD EPYC (the table is in docs/performance.md). More processes do not make them smaller.
    Decoding texts, 1.4e-7 s a token, overlaps the next burst and costs nothing.
    """
    costs = {
        "host_slot": 9.2e-7,  # scheduling, refilling, filter
        "host_packed": 1.22e-7,  # packing into rows
        "host_weighed": 1.9e-7,  # rewards to loss weights
        "host_measured": 2.2e-7,  # metrics and traces
    }
    if config.checkpoint.keep_groups:
        # Several hosts write to a bucket, even if the config names a local folder now.
        remote = hosts > 1 or is_remote(config.run_dir)
        costs |= {"host_judged": 4.3e-7, "host_write": WRITE_SECONDS * remote}
    if config.log.rollouts:
        costs["host_listed"] = 2.0e-8
    return costs


class Meter:
    """Virtual clock that counts amounts and adds up their costs.

    Attributes:
        counts: amounts by field of `Costs`.
        seconds: the costs of the same, and seconds of waiting.
        background_free: time at which the background work is done.
        launched: time at which the burst was launched that host work now overlaps.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self.counts: Counts = collections.defaultdict(float)
        self.seconds: Counts = collections.defaultdict(float)
        self.background_free = 0.0
        self.launched = 0.0

    def add(self, **amounts: float) -> None:
        """Add amounts, by field of `Costs`."""
        for name, amount in amounts.items():
            self.counts[name] += amount
            self.seconds[name] += amount * getattr(self.costs, name)

    def add_behind(self, **amounts: float) -> None:
        """Add background work, which starts once earlier background work is done."""
        for name, amount in amounts.items():
            self.counts[name] += amount
            begins = max(self.now, self.background_free)
            self.background_free = begins + amount * getattr(self.costs, name)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return sum(self.seconds.values())

    def wait(self, name: str, until: float) -> None:
        """Wait until a time of the clock, under a separate name."""
        self.seconds[name] += max(0.0, until - self.now)
