"""Weights & Biases: a run's rows in the project that `log.wandb` names."""

import dataclasses
import importlib.util
import pathlib
import secrets
from types import TracebackType

from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.runtime.storage.paths import Folder, is_remote

RUN_ID = "wandb_id"  # file in the run folder
REFUSED, LONGEST = "/\\#?%:", 128  # characters and length of a project's name, by wandb's rules


def check_project(project: str) -> None:
    """Raises `ConfigError` for a name that wandb refuses, or where wandb is not installed."""
    named = project == project.strip() and not set(REFUSED) & set(project)
    allowed = f"empty, or at most {LONGEST} characters, none of {' '.join(REFUSED)}"
    require(named and len(project) <= LONGEST, "log.wandb", project, allowed)
    if not project:
        return
    package = importlib.util.find_spec("wandb")
    # A folder called wandb, where offline runs go, would pass for a package without an origin.
    installed = package is not None and package.origin is not None
    allowed = "empty without the package wandb: pip install 'dapo_jax[wandb]'"
    require(installed, "log.wandb", project, allowed)


class Tracker:
    """Tracker of a run's rows in the project `config.log.wandb`; a context manager.

    A resumed run repeats rows bit for bit; those are not sent again. Raises `ConfigError` where
    wandb can't begin: no key, no such mode, no answer.
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
                allow_val_change=True,  # of what may differ between the parts of a run
                # Our output has a live line, which a copy of it would repeat for ever.
                settings=wandb.Settings(console="off", quiet=True),
            )
        except (wandb.Error, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"config.log.wandb = {config.log.wandb!r}: {reason}") from None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Sends the metrics of a step."""
        if step >= self._run.step:
            self._run.log(values, step=step, commit=True)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type | None, _: BaseException | None, __: TracebackType | None):
        self._run.finish(exit_code=int(kind is not None))
