"""Storage that fails: what is said of it in one line, and how a run goes on meanwhile."""

import contextlib
import errno
import io
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.ownership import Folder, is_remote

PAUSES = (0.0, 0.1, 0.5)  # seconds before each try of a write
REPEAT_SECONDS = 600.0  # until the same trouble is said again
SHOWN_CHARACTERS = 200
UNSAVED = 74  # EX_IOERR of sysexits.h, a run's exit code
REFUSALS = (
    "PermissionDeniedError",
    "UnauthenticatedError",
    "NotFoundError",
    "InvalidArgumentError",
)
# Of what is written; nothing that the program does wrong has them.
TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


class NotSaved(OSError):
    """A checkpoint could not be written; those before it are as they were."""


def of_a_bucket(error: BaseException) -> bool:
    """Whether TensorFlow says it, which reads and writes buckets.

    Its errors are none of the system's. Of what may pass it has tried again for a minute or two.
    """
    return "tensorflow" in type(error).__module__


def is_refusal(error: BaseException) -> bool:
    """Whether a bucket says that this account may not do that, or that there is no such bucket."""
    return of_a_bucket(error) and type(error).__name__ in REFUSALS


@contextlib.contextmanager
def overlooked() -> Iterator[None]:
    """What storage can't do is left undone, and not said."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or of_a_bucket(error)):
            raise


def reason(error: BaseException) -> str:
    """What a person wants to know of an error of the system, of TensorStore or a bucket."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if of_a_bucket(error):  # the answer's body says in many lines what its status does
        text = re.sub(r" with body '.*'", "", str(error), flags=re.DOTALL)
        text = re.sub(r"^.*Error executing an HTTP request: ", "", text)
        return " ".join(text.split())[:SHOWN_CHARACTERS]
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
    if is_remote(path):  # an object is whole or absent by itself, and renaming would copy it
        with io.BytesIO() as file:
            yield file
            path.write_bytes(file.getvalue())
        return
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
        self._rests_until = -math.inf  # of a bucket that did not answer

    def attempt(self, what: str, work: Callable[[], Any]) -> bool:
        """Whether `work` was done, after a few tries; what is wrong with the program is raised.

        A bucket that did not answer for so long is left alone for as long.
        """
        error, begun = None, time.monotonic()
        if begun < self._rests_until:
            return False
        for pause in PAUSES:
            time.sleep(pause)
            try:
                work()
            except Exception as problem:
                if not (isinstance(problem, OSError) or of_a_bucket(problem)):
                    raise
                error = problem
                if of_a_bucket(problem):
                    now = time.monotonic()
                    self._rests_until = now + (now - begun)
                    break
                continue
            self.works(what)
            return True
        assert error is not None
        self.failed(what, reason(error))
        return False

    def rested(self) -> None:
        """The next write is tried at once."""
        self._rests_until = -math.inf

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


def let_orbax_use_buckets() -> None:
    """Takes a bucket for a flat one where Orbax can't find out whether it has folders.

    It would ask by the package google-cloud-storage, which it does not bring along, and which
    needs the right to look at the bucket; the answer matters for removing empty folders only.
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
