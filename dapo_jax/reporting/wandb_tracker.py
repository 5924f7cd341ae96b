"""Trackers: the base of sinks, and the sink of Weights & Biases that `log.wandb` switches on."""

import dataclasses
import importlib.util
import pathlib
import secrets
from collections.abc import Sequence
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.runtime.storage.paths import Folder, is_remote
from dapo_jax.structs import CollectedGroups

RUN_ID = "wandb_id"  # file in the run folder
FORBIDDEN_CHARACTERS = "/\\#?%:"  # in the name of a project, by wandb's rules
MAX_CHARACTERS = 128


class Sink:
    """A `contracts.RunSink` that ignores everything: a sink overrides what it uses."""

    def on_row(self, step: int, values: dict[str, float]) -> None: ...

    def on_rollouts(self, step: int, collected: CollectedGroups) -> None: ...

    def on_evaluation(self, step: int, responses: Sequence[Any]) -> None: ...

    def on_summary(self, summary: dict[str, Any]) -> None: ...

    def close(self, failed: bool) -> None: ...


def check_project(project: str) -> None:
    """Raise `ConfigError` if wandb rejects the name or is not installed."""
    is_allowed = project == project.strip() and not set(FORBIDDEN_CHARACTERS) & set(project)
    characters = " ".join(FORBIDDEN_CHARACTERS)
    allowed = f"empty, or at most {MAX_CHARACTERS} characters, none of {characters}"
    require(is_allowed and len(project) <= MAX_CHARACTERS, "log.wandb", project, allowed)
    package = importlib.util.find_spec("wandb")
    # A folder called wandb with offline runs looks like a package without an origin.
    is_installed = package is not None and package.origin is not None
    allowed = "empty without the package wandb: pip install 'dapo_jax[wandb]'"
    require(is_installed or not project, "log.wandb", project, allowed)


class WandbSink(Sink):
    """The rows of a run, sent to the project `config.log.wandb`.

    A resumed run repeats rows bit for bit; they are not sent again.

    Raises:
        ConfigError: wandb cannot start: no key, no such mode, no answer.
    """

    def __init__(self, run_dir: Folder, config: Config):
        import wandb  # pyright: ignore[reportMissingImports]: an extra

        path = run_dir / RUN_ID
        identity = path.read_text().strip() if path.exists() else ""
        if not identity:
            identity = secrets.token_hex(8)
            path.write_text(identity)
        try:
            self._run = wandb.init(
                project=config.log.wandb,
                id=identity,
                resume="allow",
                name=pathlib.Path(config.run_dir).name,
                dir=None if is_remote(config.run_dir) else str(run_dir),
                config=dataclasses.asdict(config),
                allow_val_change=True,  # a resumed run may have other values
                # A copy of the console would repeat every state of the live line.
                settings=wandb.Settings(console="off", quiet=True),
            )
        except (wandb.Error, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"config.log.wandb = {config.log.wandb!r}: {reason}") from None

    def on_row(self, step: int, values: dict[str, float]) -> None:
        if step >= self._run.step:
            self._run.log(values, step=step, commit=True)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
