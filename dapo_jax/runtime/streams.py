"""Standard streams of a program that outlives its terminal or pipe."""

import errno
import os
import select
import sys
from typing import Any

READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a closed pipe, a terminal that hung up


class BrokenPipeSafeStream:
    """A standard stream that discards output once its reader is gone, so that a run continues.

    The current stream of `sys`, 'stdout' or 'stderr', is looked up at each write.
    """

    def __init__(self, name: str):
        self._name = name

    def _stream(self) -> Any:
        stream: Any = getattr(sys, self._name)
        return getattr(stream, "rich_proxied_file", stream)  # below the live line of rich

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self._stream(), method)(*arguments)
        except UnicodeError:
            raise
        except (OSError, ValueError, AttributeError) as error:  # failed, closed, or None
            if getattr(error, "errno", None) in READER_GONE:  # Python flushes again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream().fileno())

    def write(self, text: str) -> int:
        """Write a text if the stream still has a reader."""
        self._call("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it still has a reader."""
        self._call("flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)


def has_reader(name: str) -> bool:
    """Return whether a standard stream, if it is a pipe, still has a reader."""
    poll = select.poll()
    poll.register(getattr(sys, name).fileno(), 0)
    return not poll.poll(0)
