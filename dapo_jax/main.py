"""Trains a policy by reinforcement learning from a rule reward.

    python -m dapo_jax.main --config=configs/arithmetic.py
    python -m dapo_jax.main --config=configs/arithmetic.py:grpo --config.seed=1
    python -m dapo_jax.main --config=OLD_RUN --config.run_dir=runs/new

A config file returns the experiment; what stands behind the colon picks a preset; the config.json
of a run repeats it; every setting below can be overridden. A run folder with a checkpoint in it is
resumed.
"""

import sys

from dapo_jax import cli, processes
from dapo_jax.experiment.config import Config
from dapo_jax.reporting.progress import Progress
from dapo_jax.storage import UNSAVED, NotSaved


def main() -> int:
    """The exit code: 0 done, or saved after SIGTERM; 2 wrong settings; 3 no signal left.

    4: numbers are not finite; 74: what the run ended with could not be saved; 75: another process
    of several is dead, start all again.
    """
    config = cli.load(Config, __doc__, door=cli.check_run)

    def work() -> int:
        # JetStream brings TensorFlow, seconds to import: only once the settings are good.
        with Progress(config.log.console).working("loading the libraries"):
            from dapo_jax.filtering import Starved
            from dapo_jax.run import train
        try:
            return cli.guarded(lambda: train(config))
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
