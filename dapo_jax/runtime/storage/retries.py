"""Storage errors: one-line descriptions, retries, atomic files, and writes that may fail."""

import collections
import contextlib
import errno
import io
import logging
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.paths import Folder, is_remote

REPEAT_SECONDS = 600.0  # between two warnings of the same kind
MAX_WAITING = 4  # background writes; each may hold a step's responses in memory
SHOWN_CHARACTERS = 200
UNSAVED = 74  # EX_IOERR of sysexits.h, a run's exit code
BUCKET_CLIENTS = {"aiohttp", "fsspec", "gcsfs", "google", "requests"}  # packages
# Errors of storage; no mistake of the program has these numbers.
FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


class NotSaved(OSError):
    """Raised if a checkpoint could not be written; older ones are unchanged."""


def is_bucket_error(error: BaseException) -> bool:
    """Return True for an error of gcsfs, the client of buckets, or of what it calls.

    Some are not OSErrors. gcsfs retries for half a minute or longer before it raises them.
    """
    return type(error).__module__.split(".")[0] in BUCKET_CLIENTS or is_refusal(error)


def is_refusal(error: BaseException) -> bool:
    """Return True if a bucket refused: no permission, or no valid credentials."""
    status = getattr(error, "code", 0)  # of gcsfs's HttpError, but 403 is an OSError there
    return status in (401, "401") or str(error).startswith("Forbidden: ")


def is_storage_error(error: BaseException) -> bool:
    """Return True for an error of the file system or of a bucket."""
    return isinstance(error, OSError) or is_bucket_error(error)


@contextlib.contextmanager
def suppress_storage_errors() -> Iterator[None]:
    """Suppress storage errors."""
    try:
        yield
    except Exception as error:
        if not is_storage_error(error):
            raise


def reason(error: BaseException) -> str:
    """Return the cause of an error of the system, of TensorStore or of a bucket, in one line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = re.sub(r"(http\S+/)?\bb/([\w.-]+)/o\b\S*", r"gs://\2", str(error))  # gcsfs's paths
    text = (text.splitlines() or [""])[0][:SHOWN_CHARACTERS]
    is_said = text and isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return text if is_said else f"{type(error).__name__}: {text}"


def storage_fault(error: BaseException) -> str:
    """Return the storage fault that caused an error; empty for errors of another cause."""
    # Rust libraries, such as safetensors, have the number in their text.
    match = re.search(r"\(os error (\d+)\)", str(error))
    number = int(match[1]) if match else getattr(error, "errno", None)
    return os.strerror(number) if number in FAULTS else ""


def print_error(text: str) -> None:
    """Print a warning on the first process, for use before there is a console."""
    if processes.is_first():
        processes.print_error(f"warning: {text}")


def sync_folder(folder: pathlib.Path) -> None:
    """Flush directory entries so that they survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Folder) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `path` when the block succeeds.

    Its content is flushed before it is renamed: a power loss leaves the old or the new file.
    """
    if is_remote(path):  # an object is complete or absent, and renaming would copy it
        with io.BytesIO() as file:
            yield file
            path.write_bytes(file.getvalue())
        return
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(pathlib.Path(path.parent))
    except BaseException:
        with contextlib.suppress(Exception):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Folder, text: str) -> None:
    """Replace a file by a text, completely or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


class Storage:
    """Writes that may fail without ending a run; failures are warned about, each kind rarely.

    `attempt_later` writes in one background thread, in order. When the program ends, what was
    queued is written first.
    """

    def __init__(self, warn: Callable[[str], None] = print_error):
        self.warn = warn
        self._warned: dict[str, float] = {}  # time of the newest warning, by what failed
        self._backoff_until = -math.inf  # for a bucket that did not answer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._queue: collections.deque[Future[Any]] = collections.deque()

    def attempt(self, what: str, work: Callable[[], Any]) -> bool:
        """Call `work`, and return True if it succeeded; clients of buckets retry by themselves.

        A bucket that did not answer is left alone for as long as that took. Raises errors that are
        not storage errors.
        """
        started = time.monotonic()
        if started < self._backoff_until:
            return False
        try:
            work()
        except Exception as error:
            if not is_storage_error(error):
                raise
            if is_bucket_error(error):
                self._backoff_until = 2 * time.monotonic() - started
            self.report_failure(what, reason(error))
            return False
        self.report_recovery(what)
        return True

    def attempt_later(self, what: str, work: Callable[[], Any]) -> None:
        """Attempt `work` in the background, after earlier work.

        Waits if `MAX_WAITING` pieces of work wait already. Raises errors of earlier pieces that are
        not storage errors.
        """
        while self._queue and (len(self._queue) > MAX_WAITING or self._queue[0].done()):
            self._queue.popleft().result()
        self._queue.append(self._thread.submit(self.attempt, what, work))

    def drain(self) -> None:
        """Wait until everything has been attempted. Raises as `attempt_later`."""
        while self._queue:
            self._queue.popleft().result()

    def clear_backoff(self) -> None:
        """Try the next write at once, even if a bucket has just failed."""
        self._backoff_until = -math.inf

    def report_failure(self, what: str, cause: str) -> None:
        """Warn of a failed write, unless a recent warning says so already."""
        if time.monotonic() - self._warned.get(what, -math.inf) > REPEAT_SECONDS:
            self._warned[what] = time.monotonic()
            self.warn(f"{what} could not be written: {cause}. The run continues without it")

    def report_recovery(self, what: str) -> None:
        """Tell the user that a write works again, and end the back-off of all others."""
        self.clear_backoff()
        if what in self._warned:
            del self._warned[what]
            self.warn(f"{what} can be written again")


def silence_orbax() -> None:
    """Silence errors that Orbax logs in each of its threads before it raises them once."""
    before = sys.unraisablehook
    if getattr(before, "__name__", "") == "hide_closed_loops":
        return
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname
    )

    def hide_closed_loops(event: Any) -> None:
        # TensorStore reports results that nobody awaits to a closed event loop.
        if str(event.exc_value) != "Event loop is closed":
            before(event)

    sys.unraisablehook = hide_closed_loops
