"""Durations of the parts of a step, measured by decorating functions."""

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_running: contextvars.ContextVar["Clock | None"] = contextvars.ContextVar("clock", default=None)


class Clock:
    """A stopwatch with named parts."""

    def __init__(self):
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}  # by part

    def total(self) -> float:
        """Return the seconds since the clock was created."""
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure calls of `timed` functions inside the context."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)


def timed(part: str) -> Callable[[F], F]:
    """Return a decorator that adds the duration of each call to a part of the running clock."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            clock = _running.get()
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if clock is not None:
                    spent = time.perf_counter() - start
                    clock.seconds[part] = clock.seconds.get(part, 0.0) + spent

        return cast(F, measured)

    return decorate
