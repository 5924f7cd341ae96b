"""Seconds of hosts while their devices wait: serial work of a step beside the compiled programs.

Fitted to `python tests/benchmarks/hosts.py`, a step of 8,192 responses of 4k tokens by the run's
own code on an AMD EPYC (docs/performance.md has the table). Another processor takes other seconds;
a write to a bucket is assumed.
"""

from dapo_jax.config.experiment import Config
from dapo_jax.runtime.storage.paths import is_remote

# Of every process: nothing here gets faster with more of them.
SLOT_SECONDS = 9.2e-7  # of a slot of any replica, in a burst: schedule, refilling, filter
PACKED_SECONDS = 1.22e-7  # of a token of a trained response: packed into rows
WEIGHED_SECONDS = 1.9e-7  # the same, beside the score pass: rewards to loss weights
MEASURED_SECONDS = 2.2e-7  # the same, beside the updates: metrics and traces
# Of process 0, in the background.
JOURNAL_SECONDS = 4.3e-7  # of a token of a judged group that is compressed for groups/
LISTED_SECONDS = 2.0e-8  # of a token of a judged response that is written to rollouts/
WRITE_SECONDS = 0.125  # of a file of finished groups in a bucket (assumed)
# Texts, 1.4e-7 s a token, are decoded while the next burst runs: they are no cost.


def host_costs(config: Config, hosts: int) -> dict[str, float]:
    """Costs of hosts, by field of `Costs`, as far as the config asks for that work.

    Several hosts write to a bucket, whatever folder the config names for now.
    """
    costs = {"host_slot": SLOT_SECONDS, "host_packed": PACKED_SECONDS}
    costs |= {"host_weighed": WEIGHED_SECONDS, "host_measured": MEASURED_SECONDS}
    if config.checkpoint.keep_groups:
        remote = hosts > 1 or is_remote(config.run_dir)
        costs |= {"host_judged": JOURNAL_SECONDS, "host_write": WRITE_SECONDS * remote}
    if config.log.rollouts:
        costs["host_listed"] = LISTED_SECONDS
    return costs
