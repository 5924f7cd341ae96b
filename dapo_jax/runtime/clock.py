"""Durations of the parts of a step, measured by decorating functions."""

import contextlib
import contextvars
import time
from collections.abc import Iterator

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


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """Add the duration of a context, or of each call of a function, to a part of the clock."""
    clock = _running.get()
    start = time.perf_counter()
    try:
        yield
    finally:
        if clock is not None:
            spent = time.perf_counter() - start
            clock.seconds[part] = clock.seconds.get(part, 0.0) + spent
