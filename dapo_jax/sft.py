"""Makes a base policy: supervised training from nothing on worked examples of the embedded task.

    python -m dapo_jax.sft --config=configs/arithmetic_base.py

writes a model folder in the Hugging Face layout. The update is the one of reinforcement learning,
with every coefficient 1.
"""

import sys

from dapo_jax import cli, processes
from dapo_jax.experiment.config import SftConfig
from dapo_jax.marks import TRAINED, check_free


def main() -> int:
    """The exit code."""
    config = cli.load(
        SftConfig, __doc__, door=lambda config: check_free("out", config.out, TRAINED)
    )
    from dapo_jax.supervised import make_base

    return processes.run(lambda: cli.guarded(lambda: make_base(config)))


if __name__ == "__main__":
    sys.exit(main())
