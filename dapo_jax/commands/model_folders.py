"""Commands that write a model folder: `dapo-jax sft`, `dapo-jax dpo`, `dapo-jax export`."""

import signal
from collections.abc import Callable
from typing import Any

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import DpoConfig, ExportConfig, SftConfig
from dapo_jax.config.sections import GENERATED
from dapo_jax.config.validation import check_warmup
from dapo_jax.runtime.settings import leaves

SFT_USAGE = """\
Trains a policy on examples: a user's own, or generated ones of the embedded task.

    dapo-jax sft --config.data.source=FILE \\
        --config.start=FOLDER --config.out=FOLDER
    dapo-jax sft arithmetic_base

writes a model folder in the Hugging Face layout. A row of the file has messages, or prompt and
response, prompt and completion, problem and solution, or question and answer. The update is the one
of reinforcement learning, with every coefficient 1.
"""
DPO_USAGE = """\
Trains a policy on pairs of a chosen and a rejected answer, by DPO (arXiv 2305.18290).

    dapo-jax dpo --config.data.source=FILE \\
        --config.start=FOLDER --config.out=FOLDER

writes a model folder in the Hugging Face layout. A row of the file has prompt, chosen and rejected:
texts, or lists of messages whose last one is the answer; or chosen and rejected alone, whole
conversations that begin alike.
"""
EXPORT_USAGE = """\
Writes the policy of a run as a model folder in the Hugging Face layout.

    dapo-jax export --run=runs/arithmetic_dapo --out=FOLDER

takes the newest checkpoint, whatever mesh it was written on, and needs no accelerator. The folder
has config.json, tokenizer and generation settings of the model that the run began with, so that
`transformers` and servers load it like that one. README.md is its model card; --push_to_hub=NAME
sends the folder to a hub, and nothing is sent without.
"""


def check_folder(config: SftConfig | DpoConfig) -> None:
    """Raises `ConfigError` where the folder must not be written, or the data has no file."""
    from dapo_jax.data.supervised import find_source
    from dapo_jax.runtime.storage.ownership import PREFERRING, TRAINED, check_free

    check_warmup(config)
    kind = TRAINED if isinstance(config, SftConfig) else PREFERRING
    check_free("out", config.out, kind)
    if config.lora.rank:
        from dapo_jax.run.export import adapter_folder

        check_free("out", adapter_folder(config.out), kind)
    if isinstance(config, DpoConfig) or config.data.source not in GENERATED:
        find_source(config.data)


def exit_code(train: Callable[[Any], Any], config: SftConfig | DpoConfig) -> int:
    """Trains and returns 0; after a signal 128 + its number, as a shell has it."""
    from dapo_jax.run.supervised.resume import Stopped
    from dapo_jax.runtime import processes

    try:
        train(config)
    except Stopped as stopped:
        (name,) = stopped.args
        goes_on = "No step is kept: the same command begins anew"
        if stopped.step:
            goes_on = f"Saved after step {stopped.step}: the same command goes on from there"
        processes.print_error(f"stopped by {name}: {config.out} is as it was. {goes_on}")
        return 128 + signal.Signals[name]
    return 0


def sft() -> int:
    """Trains on examples. Exit code 0: done; 2: wrong settings; 128 + n: stopped by signal n."""

    def work(config: SftConfig) -> int:
        from dapo_jax.run.supervised.sft import make_base

        return exit_code(make_base, config)

    return command_line.run(SftConfig, SFT_USAGE, work, needs_file=False, door=check_folder)


def dpo() -> int:
    """Trains on pairs, with the exit codes of `sft`."""

    def work(config: DpoConfig) -> int:
        from dapo_jax.run.supervised.dpo import prefer

        return exit_code(prefer, config)

    return command_line.run(DpoConfig, DPO_USAGE, work, needs_file=False, door=check_folder)


def export() -> int:
    """Exports a checkpoint. Exit code 0: done; 2: wrong settings."""
    names = {name: name for name, _, _ in leaves(ExportConfig())}

    def work(config: ExportConfig) -> None:
        from dapo_jax.run.export import export

        export(config)

    return command_line.run(
        ExportConfig, EXPORT_USAGE, work, names, needs_file=False, alone="dapo-jax export"
    )
