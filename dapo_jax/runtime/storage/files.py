"""Files of a run, local or in a bucket (gs://...): whole ones, those that grow, and their errors.

A file is replaced completely or not at all. A write that fails does not end a run.
"""

import collections
import contextlib
import errno
import io
import json
import logging
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import fsspec.config
from etils import epath

from dapo_jax.runtime import processes

logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs what it then raises
# Other processes write into the same bucket: what a listing showed before does not count.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)

Folder = pathlib.Path | epath.Path  # local, or in a bucket
REPEAT_SECONDS = 600.0  # between two warnings of the same kind
MAX_WAITING = 4  # background writes; each may hold a step's responses in memory
MAX_TIME_FRACTION = 0.05  # of the run, for an object that grows line by line
SHOWN_CHARACTERS = 200
UNSAVED = 74  # EX_IOERR of sysexits.h, a run's exit code
BUCKET_CLIENTS = {"aiohttp", "fsspec", "gcsfs", "google", "requests"}  # packages
# Errors of storage; no mistake of the program has these numbers.
FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


def is_remote(name: str | os.PathLike) -> bool:
    """Return True for a folder in an object store. It has no locks and no renames."""
    return "://" in str(name)


def folder_at(name: str | os.PathLike, below: str = "") -> Folder:
    """Return the folder `name`, or the folder `below` in it."""
    return epath.Path(name) / below if is_remote(name) else pathlib.Path(name, below)


# --- errors -----------------------------------------------------------------------------------


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


# --- whole files ------------------------------------------------------------------------------


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


# --- lines ------------------------------------------------------------------------------------


def read_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def json_line(values: Mapping[str, Any]) -> bytes:
    """Return values as a line of JSON."""
    return json.dumps(values).encode() + b"\n"


def write_lines(path: Folder, lines: Iterable[bytes]) -> None:
    """Replace a file by lines, completely or not at all; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.writelines(lines)


def objects(path: Folder, max_bytes: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines, from at most `max_bytes` bytes."""
    with path.open("rb") as file:
        for line in file:
            max_bytes -= len(line)
            if max_bytes < 0:
                return
            value = read_object(line)
            if value is not None:
                yield value


def rewind(path: Folder, step: int) -> int:
    """Remove the rows after `step`, and a line that a kill cut off.

    Returns the number of other lines that are not rows; these are removed too.
    """
    content, rows, broken = path.read_bytes() if path.exists() else b"", [], 0
    for line in io.BytesIO(content):
        row = read_object(line)
        if row is not None and type(row.get("step")) is int:
            rows += [line.rstrip(b"\n") + b"\n"] if row["step"] <= step else []
        elif line.strip() and line.endswith(b"\n"):
            broken += 1
    if b"".join(rows) != content:
        write_lines(path, rows)
    return broken


class AppendFile:
    """File that grows; after a failed write, the next one repeats its content.

    An object of a store can't be appended to: it is rewritten from memory.

    Args:
        storage: warns of failed writes of `what`.
        rarely: rewrite an object for at most `MAX_TIME_FRACTION` of the time; call `flush` at last.
    """

    def __init__(self, path: Folder, storage: "Storage", what: str = "", rarely: bool = False):
        self.path = path
        self._storage, self._what, self._rarely = storage, what or path.name, rarely
        self._waiting = b""
        self._valid_bytes = -1  # before a write that failed; -1: no write failed
        self._content: bytes | None = None  # of an object
        self._next_write = -math.inf  # of an object that is rewritten rarely

    def append(self, content: bytes) -> None:
        """Append content, and what could not be written before."""
        self._waiting += content
        if not self._rarely or time.monotonic() >= self._next_write:
            self.flush()

    def flush(self) -> None:
        """Write what waits; readers skip the part of a line that a failed write leaves."""
        if self._waiting:
            self._storage.attempt(self._what, self._write)

    def _write(self) -> None:
        if isinstance(self.path, pathlib.Path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._extend(self.path)
        else:
            started = time.monotonic()
            if self._content is None:
                self._content = self.path.read_bytes() if self.path.exists() else b""
            self.path.write_bytes(self._content + self._waiting)
            self._content += self._waiting
            ended = time.monotonic()
            self._next_write = ended + (ended - started) / MAX_TIME_FRACTION
        self._waiting, self._valid_bytes = b"", -1

    def _extend(self, path: pathlib.Path) -> None:
        content = self._waiting
        with path.open("ab", buffering=0) as file:
            if self._valid_bytes >= 0:  # a failed write may have left a part
                file.truncate(min(file.tell(), self._valid_bytes))
            self._valid_bytes = file.seek(0, os.SEEK_END)
            while content:  # a full disk may take a part first
                content = content[file.write(content) :]
            os.fsync(file.fileno())


# --- writes that may fail ---------------------------------------------------------------------


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
