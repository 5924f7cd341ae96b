"""Trackers: send the rows of a run to Weights & Biases, MLflow or Trackio."""

import contextlib
import dataclasses
import importlib.util
import io
import pathlib
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from dapo_jax.config.experiment import Config, Log
from dapo_jax.runtime.settings import ConfigError, leaves, require
from dapo_jax.runtime.storage.paths import Folder, is_remote
from dapo_jax.structs import CollectedGroups

# Names of projects that the services reject.
FORBIDDEN_CHARACTERS = {"wandb": "/\\#?%:", "mlflow": "/:.%\"'", "trackio": "/\\:"}
MAX_CHARACTERS = 128


class Sink:
    """A `contracts.RunSink` that ignores everything: a sink overrides what it uses."""

    def on_row(self, step: int, values: dict[str, float]) -> None: ...

    def on_rollouts(self, step: int, collected: CollectedGroups) -> None: ...

    def on_evaluation(self, step: int, responses: Sequence[Any]) -> None: ...

    def on_summary(self, summary: dict[str, Any]) -> None: ...

    def close(self, failed: bool) -> None: ...


def check_trackers(log: Log) -> None:
    """Raise `ConfigError` if a tracker rejects its project's name or is not installed."""
    projects = {"wandb": log.wandb, "mlflow": log.mlflow, "trackio": log.trackio}
    for name, project in projects.items():
        field = f"log.{name}"
        forbidden = FORBIDDEN_CHARACTERS[name]
        is_allowed = project == project.strip() and not set(forbidden) & set(project)
        allowed = f"empty, or at most {MAX_CHARACTERS} characters, none of {' '.join(forbidden)}"
        require(is_allowed and len(project) <= MAX_CHARACTERS, field, project, allowed)
        if not project:
            continue
        package = importlib.util.find_spec(name)
        # A folder called wandb with offline runs looks like a package without an origin.
        is_installed = package is not None and package.origin is not None
        allowed = f"empty without the package {name}: pip install 'dapo_jax[{name}]'"
        require(is_installed, field, project, allowed)


class Tracker(Sink):
    """Base of the trackers: sends each row once, under an identity that a resumed run keeps.

    Args:
        sent: newest step that an earlier start of this run has sent.

    Raises:
        ConfigError: the service cannot be used: no key, no such mode, no answer.
    """

    name = ""  # of the setting in `config.log`

    def __init__(self, run_dir: Folder, config: Config, sent: int):
        self._sent = sent
        self._project = getattr(config.log, self.name)
        path = run_dir / f"{self.name}_id"
        identity = path.read_text().strip() if path.exists() else ""
        try:
            self._identity = self._open(identity, run_dir, config)
        except Exception as error:  # each service has exceptions of its own
            reason = " ".join(str(error).split())
            field = f"config.log.{self.name}"
            raise ConfigError(f"{field} = {self._project!r}: {reason}", field) from None
        if self._identity != identity:
            path.write_text(self._identity)

    def _open(self, identity: str, run_dir: Folder, config: Config) -> str:
        """Continue the run of this identity, or begin one if it is empty; return its identity."""
        raise NotImplementedError

    def _log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def on_row(self, step: int, values: dict[str, float]) -> None:
        if step > self._sent:
            self._log(step, values)


class WandbSink(Tracker):
    """The rows of a run in the W&B project `config.log.wandb`."""

    name = "wandb"

    def _open(self, identity: str, run_dir: Folder, config: Config) -> str:
        import wandb  # pyright: ignore[reportMissingImports]: an extra

        self._run = wandb.init(
            project=self._project,
            id=identity or secrets.token_hex(8),
            resume="allow",
            name=pathlib.Path(config.run_dir).name,
            dir=None if is_remote(config.run_dir) else str(run_dir),
            config=dataclasses.asdict(config),
            allow_val_change=True,  # a resumed run may have other values
            # A copy of the console would repeat every state of the live line.
            settings=wandb.Settings(console="off", quiet=True),
        )
        return self._run.id

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step, commit=True)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowSink(Tracker):
    """The rows of a run in the MLflow experiment `config.log.mlflow`, by MLFLOW_TRACKING_URI."""

    name = "mlflow"

    def _open(self, identity: str, run_dir: Folder, config: Config) -> str:
        import mlflow  # pyright: ignore[reportMissingImports]: an extra
        from mlflow import entities  # pyright: ignore[reportMissingImports]

        self._metric = entities.Metric
        self._client: Any = mlflow.MlflowClient()
        if identity:
            self._client.update_run(identity, status="RUNNING")
            return identity
        experiment = self._client.get_experiment_by_name(self._project)
        number = experiment and experiment.experiment_id
        number = number or self._client.create_experiment(self._project)
        name = pathlib.Path(config.run_dir).name
        run = self._client.create_run(number, run_name=name)
        settings = [entities.Param(name, str(value)) for name, _, value in leaves(config)]
        self._client.log_batch(run.info.run_id, params=settings)
        return run.info.run_id

    def _log(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._identity, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._identity, "FAILED" if failed else "FINISHED")


class TrackioSink(Tracker):
    """The rows of a run in the Trackio project `config.log.trackio`; see also TRACKIO_SPACE_ID."""

    name = "trackio"

    def _open(self, identity: str, run_dir: Folder, config: Config) -> str:
        import trackio  # pyright: ignore[reportMissingImports]: an extra

        identity = identity or f"{pathlib.Path(config.run_dir).name}-{secrets.token_hex(4)}"
        with contextlib.redirect_stdout(sys.stderr if config.log.console else io.StringIO()):
            self._run = trackio.init(
                self._project,
                identity,
                resume="allow",
                config={name: value for name, _, value in leaves(config)},
                embed=False,
                auto_log_cpu=False,
            )
        return identity

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


TRACKERS = (WandbSink, MlflowSink, TrackioSink)


def open_trackers(run_dir: Folder, config: Config, sent: int) -> list[Tracker]:
    """Return the trackers that `config.log` names."""
    return [kind(run_dir, config, sent) for kind in TRACKERS if getattr(config.log, kind.name)]
