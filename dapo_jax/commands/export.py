"""Write the policy of a run as a model folder in the Hugging Face layout.

    dapo-jax export runs/arithmetic_dapo --out=FOLDER

exports the latest checkpoint of any mesh, and needs no accelerator. The folder has config.json,
tokenizer and generation settings of the run's initial model, so `transformers` and inference
servers load it in the same way. README.md is its model card; `hf upload NAME FOLDER` publishes it.
The folder of adapters in PEFT's format may take the place of a run, with --model=BASE.
"""

from dapo_jax.config.experiment import ExportConfig
from dapo_jax.run import command_line


def work(config: ExportConfig) -> None:
    """Write the folder."""
    from dapo_jax.run.export import export

    export(config)


def main() -> int:
    """Run the command. Exit code 0: done; 2: wrong settings."""
    return command_line.run(ExportConfig, __doc__, work, single_process="dapo-jax export")
