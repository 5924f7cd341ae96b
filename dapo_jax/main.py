"""Trains a policy by reinforcement learning from a rule reward.

    python -m dapo_jax.main --config=configs/arithmetic.py
    python -m dapo_jax.main --config=configs/arithmetic.py:grpo --config.algorithm.clip_high=0.28

A config file returns the experiment; what stands behind the colon picks a preset; every setting
below can be overridden. A run folder with a checkpoint in it is resumed.
"""

import sys

from dapo_jax import cli, processes
from dapo_jax.experiment.config import Config


def main() -> int:
    """The exit code: 0 done, or saved after SIGTERM; 2 wrong settings; 3 no signal left.

    75: another process of several is dead; start all again.
    """
    config = cli.load(Config, __doc__, door=cli.check_run)
    # JetStream brings TensorFlow, seconds to import: only once the settings are known to be good.
    from dapo_jax.filtering import Starved
    from dapo_jax.run import train

    def work() -> int:
        try:
            return cli.guarded(lambda: train(config))
        except Starved as error:
            processes.complain(f"stopped: {error}")
            return 3

    return processes.run(work)


if __name__ == "__main__":
    sys.exit(main())
