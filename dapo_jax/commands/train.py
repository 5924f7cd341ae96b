"""Trains a policy by reinforcement learning from a rule reward.

    dapo-jax train --config=configs/arithmetic.py
    dapo-jax train --config=configs/arithmetic.py:grpo --config.seed=1
    dapo-jax train --config=OLD_RUN --config.run_dir=runs/new

A config file returns the experiment; what stands behind the colon picks a preset; the config.json
of a run repeats it; every setting below can be overridden. A run folder with a checkpoint in it is
resumed.
"""

import sys

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import Config
from dapo_jax.reporting.console import Progress
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.retries import UNSAVED, NotSaved


def main() -> int:
    """The exit code: 0 done, or saved after SIGTERM; 2 wrong settings; 3 no signal left.

    4: numbers are not finite; 74: what the run ended with could not be saved; 75: another process
    of several is dead, start all again.
    """
    config = command_line.load(Config, __doc__, door=command_line.check_run)

    def work() -> int:
        # JetStream brings TensorFlow, seconds to import: only once the settings are good.
        with Progress(config.log.console).working("loading the libraries"):
            from dapo_jax.rollout.dynamic_sampling import Starved
            from dapo_jax.run.run import train
        try:
            return command_line.guarded(lambda: train(config))
        except Starved as error:
            processes.complain(f"stopped: {error}")
            return 3
        except NotSaved as error:
            processes.complain(
                f"error: config.run_dir = {config.run_dir!r}: the last checkpoint could not be "
                f"written: {error}. Those before it are whole; make room, and start it again"
            )
            return UNSAVED

    return processes.run(work)


if __name__ == "__main__":
    sys.exit(main())
