"""Files, sinks and callbacks of a run: settings, metrics, rollouts, summary."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.sinks import MetricRows, RolloutFiles, StepLines, find_sinks
from dapo_jax.reporting.trackers import TensorBoardEvents, WandbSink
from dapo_jax.run.heldout import stamp, write_responses
from dapo_jax.runtime import processes
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.jsonl import read_object
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, suppress_storage_errors, write_text
from dapo_jax.types.contracts import RunSink
from dapo_jax.types.errors import ConfigError, nearest, require

CONFIG = "config.json"
SUMMARY = "summary.json"
EVENTS = ("on_step", "on_evaluation", "on_checkpoint", "on_row", "on_rollouts", "on_summary")


def read_summary(folder: Folder) -> dict[str, Any]:
    """Return the summary of a finished run; empty without one that can be read."""
    with suppress_storage_errors():
        return read_object((folder / SUMMARY).read_bytes()) or {}
    return {}


class RunFiles:
    """Sinks of a run, and the files that only the run itself writes.

    The first process writes; on the others every method does nothing. A file that can't be written
    is a warning, and is tried again with the next one. Rows after `last_row` are cut off.
    """

    def __init__(
        self,
        config: Config,
        folder: Folder,
        storage: Storage,
        tokenizer: Tokenizer,
        last_row: int,
        console: Progress,
    ):
        self.folder = folder
        self._config = config
        self._storage = storage
        self._rows: MetricRows | None = None
        self.sinks: list[RunSink] = []
        if not processes.is_first():
            return
        log = config.log
        self._rows = MetricRows(folder, last_row, storage)
        rows = self._rows.read()
        self.sinks += [WandbSink(folder, config, rows)] if config.log.wandb else []
        self.sinks.append(self._rows)
        self.sinks += [TensorBoardEvents(folder, last_row, storage)] if log.tensorboard else []
        self.sinks += [RolloutFiles(folder, log, tokenizer.split, storage)] if log.rollouts else []
        self.sinks += [make(folder, config) for make in find_sinks(log.sinks)]
        self.sinks.append(StepLines(console, config.total_steps))
        settings = folder / CONFIG
        if settings.exists() and read_object(settings.read_bytes()) is None:
            self.write_settings()  # the file is damaged

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close, kind is not None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        return self._rows.read() if self._rows else []

    def write_settings(self) -> None:
        """Write config.json; a run can be repeated from it."""
        self._write_json(CONFIG, dataclasses.asdict(self._config))

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        if processes.is_first():
            text = json.dumps(content, indent=2)
            self._storage.attempt(name, lambda: write_text(self.folder / name, text))

    def send(self, event: str, *arguments: Any) -> None:
        """Call a method of `RunSink` of all sinks."""
        for sink in self.sinks:
            getattr(sink, event)(*arguments)

    def write_row(self, step: int, values: dict[str, float]) -> None:
        """Send the metrics of a step to all sinks."""
        self.send("on_row", step, values)

    def write_evaluation(self, step: int, responses: Sequence[Any]) -> None:
        """Write evaluations/step_N.jsonl, and send the responses to all sinks."""
        self.send("on_evaluation", step, responses)
        if processes.is_first() and self._config.log.rollouts:
            path = self.folder / "evaluations" / f"step_{step:06d}.jsonl"
            lines = stamp(self._config, f"step {step}")
            self._storage.attempt("evaluations/", lambda: write_responses(path, responses, lines))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, and send the summary to all sinks."""
        self._write_json(SUMMARY, summary)
        self.send("on_summary", summary)


def _check_callback(field: str, callback: Any) -> None:
    names = [name for name in dir(callback) if name.startswith("on_")]
    is_object = bool(names) and not isinstance(callback, type)
    allowed = f"an object with one or more of the methods {', '.join(EVENTS)}"
    require(is_object, field, callback, allowed)
    for name in names:
        hint = nearest(name, EVENTS) or f"; the events are {', '.join(EVENTS)}"
        if name not in EVENTS:
            raise ConfigError(f"{field}.{name}: there is no such event{hint}", field)


class Callbacks(RunSink):
    """The sink that calls a user's callbacks, on the first process only.

    If a callback returns True or raises, the run stops at the next safe point and saves;
    `raise_error` then raises the first exception.

    Raises `ConfigError` for an object without a method of `EVENTS`, or with an unknown one.
    """

    def __init__(
        self,
        signals: Signals,  # of the run; a callback stops the run through it
        callbacks: Sequence[Any] = (),  # objects with methods of `EVENTS`, or `close`: a `RunSink`
        on_step: Any = None,  # function that every process calls after the callbacks
    ):
        for i, callback in enumerate(callbacks):
            _check_callback(f"callbacks[{i}]", callback)
        self._signals = signals
        self._callbacks = list(callbacks) if processes.is_first() else []
        self._on_step = on_step
        self._error: Exception | None = None

    def on_row(self, step: int, values: dict[str, float]) -> None:
        self._send("on_row", step, values)
        if step > 0:
            self._send("on_step", step, values)
            self._call("on_step", self._on_step, step, values)

    def close(self, failed: bool) -> None:
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                if hasattr(callback, "close"):
                    stack.callback(callback.close, failed)
        self._callbacks = []

    def _send(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            self._call(event, getattr(callback, event, None), *arguments)

    on_rollouts: Any = functools.partialmethod(_send, "on_rollouts")
    on_evaluation: Any = functools.partialmethod(_send, "on_evaluation")
    on_checkpoint: Any = functools.partialmethod(_send, "on_checkpoint")  # once it is complete
    on_summary: Any = functools.partialmethod(_send, "on_summary")

    def _call(self, event: str, function: Any, *arguments: Any) -> None:
        if function is None:
            return
        try:
            stops = function(*arguments)
        except Exception as error:  # of the user: raised again after the save
            self._error = self._error or error
            stops = True
        if isinstance(stops, bool | np.bool_) and stops:
            self._signals.received = self._signals.received or event

    def raise_error(self) -> None:
        """Raise the first exception of a callback, if there was one."""
        if self._error is not None:
            raise self._error
