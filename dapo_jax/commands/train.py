"""Trains a policy by reinforcement learning from a rule reward.

    dapo-jax train arithmetic
    dapo-jax train arithmetic:grpo --config.seed=1
    dapo-jax train my_config.py
    dapo-jax train OLD_RUN --config.run_dir=runs/new
    dapo-jax train --config=FILE --dry-run

A config returns the experiment: a file of yours, or by its name one that ships with the package
(--config=FILE does the same). What stands behind the colon picks a preset; the config.json of a run
repeats it; every setting below can be overridden. A run folder with a checkpoint in it is resumed.
"""

import sys

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import Config


def check_run(config: Config) -> None:
    """Raises `ConfigError` where the run must not write, or lacks a file of its data."""
    from dapo_jax.commands import checks

    checks.check_run(config)


def work(config: Config) -> int:
    """Trains; 0: done, or saved after SIGTERM; 3: no signal left; 74: the end is not saved."""
    from dapo_jax.reporting.console import Progress
    from dapo_jax.runtime import processes
    from dapo_jax.runtime.storage.retries import UNSAVED, NotSaved

    # JetStream brings TensorFlow, which takes seconds to import.
    with Progress(config.log.console).working("loading the libraries"):
        from dapo_jax.rollout.dynamic_sampling import Starved
        from dapo_jax.run.run import train
    try:
        train(config)
    except Starved as error:
        processes.print_error(f"stopped: {error}")
        return 3
    except NotSaved as error:
        processes.print_error(
            f"error: config.run_dir = {config.run_dir!r}: the last checkpoint could not be "
            f"written: {error}. Those before it are whole; make room, and start it again"
        )
        return UNSAVED
    return 0


def try_out(config: Config) -> int:
    """Shows what the run would see; 0: it can begin."""
    from dapo_jax.reporting.console import Progress

    with Progress().working("loading the libraries"):
        from dapo_jax.commands.dry_run import dry_run
    return dry_run(config)


def main() -> int:
    """Exit code of `work`, or 2: wrong settings.

    4: numbers are not finite; 75: another process of several is dead, start all again.
    """
    flags = {"--dry-run", "--dry_run"} & set(sys.argv[1:])
    if not flags:
        return command_line.run(Config, __doc__, work, door=check_run)
    sys.argv = [argument for argument in sys.argv if argument not in flags]
    alone = "dapo-jax train --dry-run"
    return command_line.run(Config, __doc__, try_out, door=check_run, alone=alone)
