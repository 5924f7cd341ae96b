"""Training on examples or pairs: `dapo-jax sft`, `dapo-jax dpo`."""

import functools
import pathlib

from dapo_jax.extras.sft.settings import DpoConfig, SftConfig, Supervised
from dapo_jax.run import command_line
from dapo_jax.runtime.signals import Signals

SFT_USAGE = """\
Train a policy on examples: your own, or generated ones of the built-in task.

    dapo-jax sft --config.data.source=FILE \\
        --config.start=FOLDER --config.out=FOLDER
    dapo-jax sft arithmetic_base

writes a model folder in the Hugging Face layout. A row of the file has messages, or prompt and
response, prompt and completion, problem and solution, or question and answer. The update is that of
reinforcement learning with every coefficient 1.
"""
DPO_USAGE = """\
Train a policy on pairs of a chosen and a rejected answer, by DPO (arXiv 2305.18290).

    dapo-jax dpo --config.data.source=FILE \\
        --config.start=FOLDER --config.out=FOLDER

writes a model folder in the Hugging Face layout. A row of the file has prompt, chosen and rejected
(texts, or lists of messages ending with the answer), or only chosen and rejected: two conversations
with the same beginning.
"""


def check_folder(config: Supervised) -> None:
    """Raise `ConfigError` if the folder must not be written, or the data has no file or fields."""
    from dapo_jax.data.files import find_files
    from dapo_jax.data.sources import is_generated
    from dapo_jax.extras.sft.rows import read_fields
    from dapo_jax.run.export import adapter_folder
    from dapo_jax.runtime.storage.output_folder import check_free

    read_fields(config.data, config.kind)
    for out in [config.out, adapter_folder(config.out)][: 1 + (config.lora.rank > 0)]:
        check_free("out", out, config.output)
    if config.kind == "pairs" or not is_generated(config.data.source):
        find_files("data.source", config.data.source, config.data.folder, "train")


def train(config: Supervised, signals: Signals) -> pathlib.Path | None:
    """Train; return the folder, or None if a signal stopped it."""
    from dapo_jax.extras.sft.training import train_supervised

    return train_supervised(config, signals)


def run(kind: type, usage: str) -> int:
    """Run a command. Exit code 0: done; 2: wrong settings; 128 + n: stopped by signal n."""
    signals = Signals()

    def work(config: Supervised) -> int:
        return 0 if train(config, signals) else signals.exit_code

    return command_line.run(kind, usage, work, check_output=check_folder)


sft = functools.partial(run, SftConfig, SFT_USAGE)
dpo = functools.partial(run, DpoConfig, DPO_USAGE)
