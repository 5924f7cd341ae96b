"""Storage errors: one-line descriptions, retries, and writes that do not end a run."""

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
from typing import IO, Any

from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.background import Background
from dapo_jax.runtime.storage.ownership import Folder, is_remote

PAUSES = (0.0, 0.1, 0.5)  # seconds before each try of a write
REPEAT_SECONDS = 600.0  # between two warnings of the same kind
SHOWN_CHARACTERS = 200
UNSAVED = 74  # EX_IOERR of sysexits.h, a run's exit code
REFUSALS = (
    "PermissionDeniedError",
    "UnauthenticatedError",
    "NotFoundError",
    "InvalidArgumentError",
)
# Errors of storage; no mistake of the program has these numbers.
TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


class NotSaved(OSError):
    """Raised where a checkpoint could not be written; older ones are as they were."""


def is_bucket_error(error: BaseException) -> bool:
    """True for an error of TensorFlow's, which reads and writes buckets.

    TensorFlow's errors are no OSErrors; it has retried for a minute or two before it raises them.
    """
    return "tensorflow" in type(error).__module__


def is_refusal(error: BaseException) -> bool:
    """True if a bucket refused: no permission, or no such bucket."""
    return is_bucket_error(error) and type(error).__name__ in REFUSALS


@contextlib.contextmanager
def suppress_storage_errors() -> Iterator[None]:
    """Suppresses storage errors."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or is_bucket_error(error)):
            raise


def reason(error: BaseException) -> str:
    """Cause of an error of the system, of TensorStore or of a bucket, in one line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if is_bucket_error(error):  # the answer's body says in many lines what its status does
        text = re.sub(r" with body '.*'", "", str(error), flags=re.DOTALL)
        text = re.sub(r"^.*Error executing an HTTP request: ", "", text)
        return " ".join(text.split())[:SHOWN_CHARACTERS]
    text = (str(error).splitlines() or [""])[0][:SHOWN_CHARACTERS]
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


def storage_fault(error: BaseException) -> str:
    """Fault of the storage that caused an error; empty for errors of another cause."""
    # Rust's libraries, such as safetensors, have the number in their text.
    match = re.search(r"\(os error (\d+)\)", str(error))
    number = int(match[1]) if match else getattr(error, "errno", None)
    return os.strerror(number) if number in TROUBLE else ""


def print_error(text: str) -> None:
    """Prints a warning on the first process, where there is no `Progress` yet."""
    if processes.is_first():
        processes.print_error(f"warning: {text}")


def sync_folder(folder: pathlib.Path) -> None:
    """Brings the names in a folder to the disk, where a loss of power leaves them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Folder) -> Iterator[IO[bytes]]:
    """Temporary file that replaces `path` when the block ends well, and is removed otherwise.

    The content is on the disk before the name is: a loss of power leaves the old or the new file.
    """
    if is_remote(path):  # an object is whole or absent by itself, and renaming would copy it
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
    """Replaces a file by a text, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


class Storage:
    """Writes that may fail without ending a run, with a warning at once and then rarely.

    Args:
        warn: receives the warnings.
    """

    def __init__(self, warn: Callable[[str], None] = print_error):
        self.warn = warn
        self._warned: dict[str, float] = {}  # time of the newest warning, by what failed
        self._rests_until = -math.inf  # of a bucket that did not answer
        self._background = Background()

    def attempt(self, what: str, work: Callable[[], Any]) -> bool:
        """Calls `work` up to three times, and returns whether one succeeded.

        A bucket that did not answer is left alone for as long as that took. Raises errors that are
        not the storage's.
        """
        why, started = "", time.monotonic()
        if started < self._rests_until:
            return False
        for pause in PAUSES:
            time.sleep(pause)
            try:
                work()
            except Exception as error:
                if not (isinstance(error, OSError) or is_bucket_error(error)):
                    raise
                why = reason(error)
                if is_bucket_error(error):
                    now = time.monotonic()
                    self._rests_until = now + (now - started)
                    break
            else:
                self.works(what)
                return True
        self.failed(what, why)
        return False

    def attempt_later(self, what: str, work: Callable[[], Any]) -> None:
        """Attempts `work` in the background, after what was given before.

        Raises errors of earlier pieces of work that are not the storage's.
        """
        self._background.give(lambda: self.attempt(what, work))

    def drain(self) -> None:
        """Returns when everything has been attempted. Raises as `attempt_later`."""
        self._background.drain()

    def clear_backoff(self) -> None:
        """Ends a pause: the next write is tried at once."""
        self._rests_until = -math.inf

    def failed(self, what: str, why: str) -> None:
        """Warns of a failed write, unless there was such a warning a short while ago."""
        if time.monotonic() - self._warned.get(what, -math.inf) > REPEAT_SECONDS:
            self._warned[what] = time.monotonic()
            self.warn(f"{what} could not be written: {why}. The run goes on without")

    def works(self, what: str) -> None:
        """Reports that a write works again."""
        if what in self._warned:
            del self._warned[what]
            self.warn(f"{what} can be written again")


def quiet_orbax() -> None:
    """Silences what Orbax logs in each of its threads and then raises once."""
    logging.getLogger("absl").addFilter(_is_news)
    if not getattr(sys.unraisablehook, "passes_on", False):
        before = sys.unraisablehook

        def hook(event: Any) -> None:
            # TensorStore reports results that nobody waits for any more to a closed loop.
            if str(event.exc_value) != "Event loop is closed":
                before(event)

        hook.passes_on = True  # type: ignore[attr-defined]
        sys.unraisablehook = hook


def let_orbax_use_buckets() -> None:
    """Makes Orbax take a bucket for a flat one where it can't find out whether it has folders.

    Orbax asks by the package google-cloud-storage, which it does not install, and which needs the
    right to look at the bucket; the answer matters for removing empty folders only.
    """
    from orbax.checkpoint._src.path import gcs_utils  # the one place that asks

    asked = gcs_utils.is_hierarchical_namespace_enabled
    if getattr(asked, "passes_on", False):
        return

    def ask(path: Any) -> bool:
        with contextlib.suppress(Exception):  # ImportError, no account, no right
            return bool(asked(path))
        return False

    ask.passes_on = True  # type: ignore[attr-defined]
    gcs_utils.is_hierarchical_namespace_enabled = ask


def _is_news(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
