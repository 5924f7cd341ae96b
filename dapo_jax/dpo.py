"""Trains a policy on pairs of a chosen and a rejected answer, by DPO (arXiv 2305.18290).

    python -m dapo_jax.dpo --config.data.source=FILE \\
        --config.start=FOLDER --config.out=FOLDER

writes a model folder in the Hugging Face layout. A row of the file has prompt, chosen and rejected:
texts, or lists of messages whose last one is the answer; or chosen and rejected alone, whole
conversations that begin alike.
"""

import sys

from dapo_jax import cli, processes
from dapo_jax.data.examples import find_source
from dapo_jax.experiment.config import DpoConfig
from dapo_jax.marks import PREFERRING, check_free


def check(config: DpoConfig) -> None:
    """Raises `ConfigError` where the folder must not be written, or there is no such file."""
    check_free("out", config.out, PREFERRING)
    find_source(config.data)


def main() -> int:
    """The exit code: 0 done, 2 wrong settings, 128 + its number after a signal."""
    config = cli.load(DpoConfig, __doc__, needs_file=False, door=check)
    from dapo_jax.offline import exit_code
    from dapo_jax.preferences import prefer

    return processes.run(lambda: exit_code(lambda: prefer(config), config.out))


if __name__ == "__main__":
    sys.exit(main())
