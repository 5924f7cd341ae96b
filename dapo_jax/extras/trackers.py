"""Trackers: the rows of a run as event files of TensorBoard, and in Weights & Biases.

`log.tensorboard` and `log.wandb` ask for them; each needs the package of that name.
"""

import dataclasses
import importlib.util
import io
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from dapo_jax.config.experiment import Config, Log
from dapo_jax.runtime.storage.files import AppendFile, Folder, Storage, is_remote
from dapo_jax.types.contracts import RunSink
from dapo_jax.types.errors import ConfigError, require

FORBIDDEN_CHARACTERS = "/\\#?%:"  # in names of projects
MAX_CHARACTERS = 128


def check_trackers(log: Log) -> None:
    """Raise `ConfigError` if W&B rejects its project's name or a package is not installed."""
    project, field = log.wandb, "log.wandb"
    is_allowed = project == project.strip() and not set(FORBIDDEN_CHARACTERS) & set(project)
    allowed = (
        f"empty, or at most {MAX_CHARACTERS} characters, none of {' '.join(FORBIDDEN_CHARACTERS)}"
    )
    require(is_allowed and len(project) <= MAX_CHARACTERS, field, project, allowed)
    for name, value, without in (
        ("wandb", project, "empty"),
        ("tensorboard", log.tensorboard, "false"),
    ):
        # A folder called wandb with offline runs looks like a package without an origin.
        package = importlib.util.find_spec(name) if value else None
        is_installed = package is not None and package.origin is not None
        allowed = f"{without} without the package {name}: pip install {name}"
        require(is_installed or not value, f"log.{name}", value, allowed)


def open_trackers(
    run_dir: Folder, config: Config, rows: Sequence[dict[str, Any]], last_row: int, storage: Storage
) -> list[RunSink]:
    """Return the sinks that the config asks for; `rows` are in metrics.jsonl up to `last_row`."""
    sinks: list[RunSink] = []
    if config.log.wandb:
        sinks.append(WandbSink(run_dir, config, rows))
    if config.log.tensorboard:
        sinks.append(TensorBoardEvents(run_dir, last_row, storage))
    return sinks


class TensorBoardEvents(RunSink):
    """An event file of TensorBoard in `tensorboard/`."""

    def __init__(self, run_dir: Folder, last_row: int, storage: Storage | None = None):
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        path, warned = run_dir / "tensorboard" / name, storage or Storage()
        self._file = AppendFile(path, warned, "TensorBoard's file")
        self._add(file_version="brain.Event:2")
        # TensorBoard then drops earlier events of the steps that are repeated.
        self._add(step=last_row + 1, session_log={"status": "START"})

    def on_row(self, step: int, values: dict[str, float]) -> None:
        entries = [{"tag": name, "simple_value": value} for name, value in values.items()]
        self._add(step=step, summary={"value": entries})

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2  # an extra
        from tensorboard.summary.writer.record_writer import RecordWriter

        packed = io.BytesIO()
        # Protobuf creates the class when the module is imported.
        event = event_pb2.Event(wall_time=time.time(), **fields)  # pyright: ignore[reportAttributeAccessIssue]
        RecordWriter(packed).write(event.SerializeToString())
        self._file.append(packed.getvalue())


class WandbSink(RunSink):
    """The rows of a run in the W&B project `config.log.wandb`.

    It sends the rows that W&B lacks, under an identity that a resumed run keeps: those after the
    newest one that the service has, or that an earlier start had sent when it closed. After a kill
    without a connection, some may be sent twice.

    Args:
        rows: of metrics.jsonl.

    Raises:
        ConfigError: the service cannot be used: no key, no such mode, no answer.
    """

    def __init__(self, run_dir: Folder, config: Config, rows: Sequence[dict[str, Any]]):
        path = run_dir / "wandb_id"
        identity = path.read_text().strip() if path.exists() else ""
        try:
            self._run = _open_run(identity, run_dir, config)
        except Exception as error:  # the package has many exceptions of its own
            reason = " ".join(str(error).split())
            field = "log.wandb"
            raise ConfigError(f"config.{field} = {config.log.wandb!r}: {reason}", field) from None
        if self._run.id != identity:
            path.write_text(self._run.id)
        self._closed = run_dir / "wandb_closed"
        closed = self._closed.read_text().strip() if self._closed.exists() else ""
        self._next = max(int(closed or 0), self._run.starting_step)
        for row in rows:
            values = {name: row[name] for name in row if name not in ("step", "time")}
            self.on_row(row["step"], values)

    def on_row(self, step: int, values: dict[str, float]) -> None:
        if step >= self._next:
            self._run.log(values, step=step, commit=True)
            self._next = step + 1

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._closed.write_text(str(self._next))


def _open_run(identity: str, run_dir: Folder, config: Config) -> Any:
    """Continue the run of this identity, or begin one if it is empty."""
    import wandb  # pyright: ignore[reportMissingImports]: an extra

    return wandb.init(
        project=config.log.wandb,
        id=identity or secrets.token_hex(8),
        resume="allow",
        name=pathlib.Path(config.run_dir).name,
        dir=None if is_remote(config.run_dir) else str(run_dir),
        config=dataclasses.asdict(config),
        allow_val_change=True,  # a resumed run may have other values
        # A copy of the console would repeat every state of the live line.
        settings=wandb.Settings(console="off", quiet=True),
    )
