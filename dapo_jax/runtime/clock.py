"""Seconds of the parts of a step, measured without a clock in the code that is measured."""

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_running: contextvars.ContextVar["Clock | None"] = contextvars.ContextVar("clock", default=None)


class Clock:
    """Stopwatch with named parts.

    Attributes:
        seconds: of every part that was measured, by its name.
    """

    def __init__(self):
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the calls of `timed` functions are measured by this clock."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)


def timed(part: str) -> Callable[[F], F]:
    """Decorator that adds the seconds of each call to a part of the running clock, if one runs."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            clock, start = _running.get(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if clock is not None:
                    spent = time.perf_counter() - start
                    clock.seconds[part] = clock.seconds.get(part, 0.0) + spent

        return cast(F, measured)

    return decorate
