"""Trains a policy on pairs of a chosen and a rejected answer, by DPO (arXiv 2305.18290).

    dapo-jax dpo --config.data.source=FILE \\
        --config.start=FOLDER --config.out=FOLDER

writes a model folder in the Hugging Face layout. A row of the file has prompt, chosen and rejected:
texts, or lists of messages whose last one is the answer; or chosen and rejected alone, whole
conversations that begin alike.
"""

import sys

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import DpoConfig
from dapo_jax.data.supervised_examples import find_source
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.ownership import PREFERRING, check_free


def check(config: DpoConfig) -> None:
    """Raises `ConfigError` where the folder must not be written, or there is no such file."""
    check_free("out", config.out, PREFERRING)
    find_source(config.data)


def main() -> int:
    """The exit code: 0 done, 2 wrong settings, 128 + its number after a signal."""
    config = command_line.load(DpoConfig, __doc__, needs_file=False, door=check)
    from dapo_jax.run.supervised.common import exit_code
    from dapo_jax.run.supervised.dpo import prefer

    return processes.run(lambda: exit_code(lambda: prefer(config), config.out))


if __name__ == "__main__":
    sys.exit(main())
