"""Trains a policy on examples: a user's own, or generated ones of the embedded task.

    dapo-jax sft --config.data.source=FILE \\
        --config.start=FOLDER --config.out=FOLDER
    dapo-jax sft --config=configs/arithmetic_base.py

writes a model folder in the Hugging Face layout. A row of the file has messages, or prompt and
response, prompt and completion, problem and solution, or question and answer. The update is the one
of reinforcement learning, with every coefficient 1.
"""

import sys

from dapo_jax.commands import command_line
from dapo_jax.config.combinations import GENERATED
from dapo_jax.config.experiment import SftConfig
from dapo_jax.data.supervised_examples import find_source
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.ownership import TRAINED, check_free


def check(config: SftConfig) -> None:
    """Raises `ConfigError` where the folder must not be written, or there is no such file."""
    check_free("out", config.out, TRAINED)
    if config.data.source != GENERATED:
        find_source(config.data)


def main() -> int:
    """The exit code: 0 done, 2 wrong settings, 128 + its number after a signal."""
    config = command_line.load(SftConfig, __doc__, needs_file=False, door=check)
    from dapo_jax.run.supervised.common import exit_code
    from dapo_jax.run.supervised.sft import make_base

    return processes.run(lambda: exit_code(lambda: make_base(config), config.out))


if __name__ == "__main__":
    sys.exit(main())
