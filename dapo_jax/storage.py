"""Storage that fails: what is said of it in one line, and how a run goes on meanwhile."""

import contextlib
import errno
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from dapo_jax import processes
from dapo_jax.marks import Folder

PAUSES = (0.0, 0.1, 0.5)  # seconds before each try of a write
REPEAT_SECONDS = 600.0  # until the same trouble is said again
SHOWN_CHARACTERS = 200
UNSAVED = 74  # EX_IOERR of sysexits.h, a run's exit code


# Of what is written; nothing that the program does wrong has them.
TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


class NotSaved(OSError):
    """A checkpoint could not be written; those before it are as they were."""


def reason(error: BaseException) -> str:
    """What a person wants to know of an error of the system, of TensorStore or a bucket."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = (str(error).splitlines() or [""])[0][:SHOWN_CHARACTERS]
    return said if isinstance(error, OSError) and said else f"{type(error).__name__}: {said}"


def full_or_broken(error: BaseException) -> str:
    """What is wrong with the storage that an error is about; empty where it is about another."""
    # Rust's libraries, as safetensors, say the number in their text.
    said = re.search(r"\(os error (\d+)\)", str(error))
    number = int(said[1]) if said else getattr(error, "errno", None)
    return os.strerror(number) if number in TROUBLE else ""


def complain(text: str) -> None:
    """A warning of the first process, where there is no `Progress` yet."""
    if processes.is_first():
        processes.complain(f"warning: {text}")


@contextlib.contextmanager
def replacing(path: Folder) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends well; else nothing of it stays."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(Exception):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Folder, text: str) -> None:
    """The whole text or nothing, in place of what was there."""
    with replacing(path) as file:
        file.write(text.encode())


class Storage:
    """Writes that may fail without ending a run: said at once, and again rarely.

    Args:
        warn: is told.
    """

    def __init__(self, warn: Callable[[str], None] = complain):
        self.warn = warn
        self._said: dict[str, float] = {}  # when, by what failed last

    def attempt(self, what: str, work: Callable[[], Any]) -> bool:
        """Whether `work` was done, after a few tries; what is wrong with the program is raised."""
        error = None
        for pause in PAUSES:
            time.sleep(pause)
            try:
                work()
            except Exception as problem:
                # TensorFlow, which reads and writes buckets, has errors of its own.
                known = isinstance(problem, OSError) or "tensorflow" in type(problem).__module__
                if not known:
                    raise
                error = problem
                continue
            self.works(what)
            return True
        assert error is not None
        self.failed(what, reason(error))
        return False

    def failed(self, what: str, why: str) -> None:
        """Says so, where that was not said a short while ago."""
        if time.monotonic() - self._said.get(what, -math.inf) > REPEAT_SECONDS:
            self._said[what] = time.monotonic()
            self.warn(f"{what} could not be written: {why}. The run goes on without")

    def works(self, what: str) -> None:
        """Takes it back."""
        if what in self._said:
            del self._said[what]
            self.warn(f"{what} can be written again")


def quiet_orbax() -> None:
    """Says nothing of what Orbax says in each of its threads and then raises once."""
    logging.getLogger("absl").addFilter(_is_news)
    if not getattr(sys.unraisablehook, "passes_on", False):
        before = sys.unraisablehook

        def hook(found: Any) -> None:
            # TensorStore tells a loop of results that nobody waits for any more.
            if str(found.exc_value) != "Event loop is closed":
                before(found)

        hook.passes_on = True  # type: ignore[attr-defined]
        sys.unraisablehook = hook


def _is_news(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
