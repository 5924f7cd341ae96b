"""Signal handlers that forked children do not inherit; started programs inherit no handlers.

Otherwise children of user code could not be ended, or ending them would end this process's work.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_forking = threading.local()


class _Handler(NamedTuple):
    handle: Callable[[int, Any], Any]
    previous: Any  # handler that forked children get

    def __call__(self, number: int, frame: Any) -> None:
        self.handle(number, frame)


def install(number: int, handle: Callable[[int, Any], Any]) -> Any:
    """Handle a signal in this process alone, and return the previous handler."""
    previous = signal.getsignal(number)
    signal.signal(number, _Handler(handle, previous))
    return previous


def ignore(number: int, _: Any) -> None:
    """Ignore a signal in this process; unlike it, SIG_IGN is inherited by started programs."""


def _block() -> None:
    # A signal that reaches the child early waits for `_reset`.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset() -> None:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if isinstance(handler, _Handler):
            while isinstance(handler, _Handler):
                handler = handler.previous
            signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)
