"""Callbacks of `dapo_jax.train`: user objects that receive what a run reports."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.reporting.trackers import Sink
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, nearest, require
from dapo_jax.runtime.signals import Signals

EVENTS = ("on_step", "on_evaluation", "on_checkpoint", "on_row", "on_rollouts", "on_summary")


def _check(field: str, callback: Any) -> None:
    names = [name for name in dir(callback) if name.startswith("on_")]
    is_object = bool(names) and not isinstance(callback, type)
    allowed = f"an object with one or more of the methods {', '.join(EVENTS)}"
    require(is_object, field, callback, allowed)
    for name in names:
        hint = nearest(name, EVENTS) or f"; the events are {', '.join(EVENTS)}"
        if name not in EVENTS:
            raise ConfigError(f"{field}.{name}: there is no such event{hint}", field)


class Callbacks(Sink):
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
            _check(f"callbacks[{i}]", callback)
        self._signals = signals
        self._callbacks = list(callbacks) if processes.is_first() else []
        self._on_step = on_step
        self._error: Exception | None = None

    def on_row(self, step: int, values: dict[str, float]) -> None:
        self._send("on_row", step, values)
        if step > 0:
            self._send("on_step", step, values)
            self._call("on_step", self._on_step, step, values)

    def on_rollouts(self, step: int, collected: Any) -> None:
        self._send("on_rollouts", step, collected)

    def on_evaluation(self, step: int, responses: Sequence[Any]) -> None:
        self._send("on_evaluation", step, responses)

    def on_checkpoint(self, step: int, folder: str) -> None:
        """Receive the folder of a checkpoint that is complete."""
        self._send("on_checkpoint", step, folder)

    def on_summary(self, summary: dict[str, Any]) -> None:
        self._send("on_summary", summary)

    def close(self, failed: bool) -> None:
        with contextlib.ExitStack() as stack:
            for callback in self._callbacks:
                if hasattr(callback, "close"):
                    stack.callback(callback.close, failed)
        self._callbacks = []

    def _send(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            self._call(event, getattr(callback, event, None), *arguments)

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
