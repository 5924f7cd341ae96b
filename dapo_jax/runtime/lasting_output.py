"""Standard output and error of a program that outlives its terminal or pipe."""

import contextlib
import errno
import os
import sys
from typing import IO, Any

# Errors of a reader that is gone: a closed pipe, a terminal that hung up.
GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class BrokenPipeSafeStream:
    """Stream that goes on where its reader is gone: what is written then is lost, and nothing else.

    The other stream gets a line about it, once.

    Args:
        name: 'stdout' or 'stderr'; the stream that `sys` has under that name at each write.
    """

    def __init__(self, name: str):
        self._name, self._other = name, "stderr" if name == "stdout" else "stdout"

    def _stream(self) -> Any:
        stream: Any = getattr(sys, self._name)
        return getattr(stream, "rich_proxied_file", stream)  # not what rich shows above a live line

    def write(self, text: str) -> int:
        """Writes a text, or nothing where that fails."""
        with self._lasting():
            self._stream().write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes what is written."""
        with self._lasting():
            self._stream().flush()

    @contextlib.contextmanager
    def _lasting(self):
        try:
            yield
        except UnicodeError:  # a mistake in the text, not of the stream
            raise
        except (OSError, ValueError, AttributeError) as error:  # failed, closed, or None
            if getattr(error, "errno", None) not in GONE:
                return
            with contextlib.suppress(OSError, ValueError):  # nor fails what Python writes at exit
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream().fileno())
                os.close(nowhere)
            other: IO[str] | None = getattr(sys, self._other)
            with contextlib.suppress(OSError, ValueError):
                print(f"{self._name} is closed; work goes on without it", file=other, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)
