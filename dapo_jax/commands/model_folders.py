"""Commands that write a model folder: `dapo-jax sft`, `dapo-jax dpo`, `dapo-jax export`."""

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import DpoConfig, ExportConfig, SftConfig
from dapo_jax.config.validation import check_warmup

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
EXPORT_USAGE = """\
Write the policy of a run as a model folder in the Hugging Face layout.

    dapo-jax export runs/arithmetic_dapo --out=FOLDER

exports the latest checkpoint of any mesh, and needs no accelerator. The folder has config.json,
tokenizer and generation settings of the run's initial model, so `transformers` and inference
servers load it in the same way. README.md is its model card; `hf upload NAME FOLDER` publishes it.
The folder of adapters in PEFT's format may take the place of a run, with --model=BASE.
"""


def check_folder(config: SftConfig | DpoConfig) -> None:
    """Raise `ConfigError` if the folder must not be written, or the data has no file."""
    from dapo_jax.data.files import find_files
    from dapo_jax.data.sources import is_generated
    from dapo_jax.runtime.storage.output_folder import PREFERRING, TRAINED, check_free

    check_warmup(config)
    kind = TRAINED if isinstance(config, SftConfig) else PREFERRING
    check_free("out", config.out, kind)
    if config.lora.rank:
        from dapo_jax.run.export import adapter_folder

        check_free("out", adapter_folder(config.out), kind)
    if isinstance(config, DpoConfig) or not is_generated(config.data.source):
        find_files("data.source", config.data.source, config.data.folder, "train")


def exit_code(config: SftConfig | DpoConfig) -> int:
    """Train; return 0, or after a signal 128 + its number, as shells do."""
    from dapo_jax.run.supervised import train_supervised
    from dapo_jax.runtime.signals import Signals

    signals = Signals()
    return 0 if train_supervised(config, signals) else signals.exit_code


def sft() -> int:
    """Run `dapo-jax sft`. Exit code 0: done; 2: wrong settings; 128 + n: stopped by signal n."""
    return command_line.run(SftConfig, SFT_USAGE, exit_code, check_output=check_folder)


def dpo() -> int:
    """Run `dapo-jax dpo`, with the exit codes of `sft`."""
    return command_line.run(DpoConfig, DPO_USAGE, exit_code, check_output=check_folder)


def export() -> int:
    """Run `dapo-jax export`. Exit code 0: done; 2: wrong settings."""

    def work(config: ExportConfig) -> None:
        from dapo_jax.run.export import export

        export(config)

    return command_line.run(ExportConfig, EXPORT_USAGE, work, single_process="dapo-jax export")
