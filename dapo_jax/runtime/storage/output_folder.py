"""Output folders of commands: made, marked, locked against other processes, replaced whole.

`ownership.py` decides which folders may be written; no other is, so that a mistyped name costs
nobody a file.
"""

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.storage.ownership import (
    LOCK,
    MARK,
    OURS,
    Folder,
    OutputFolder,
    check_free,
    entries,
    folder_at,
    is_ours,
    is_remote,
    is_written,
    read_mark,
    resolve_folder,
    stamp,
)
from dapo_jax.runtime.storage.retries import is_refusal, reason, storage_fault

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
ROOM = "a folder of storage with room"
LOCK_SECONDS = 0.2  # for a process that is about to leave the folder
TRIES = 9  # one fails only where another process removes the folder at the same moment
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


def write_mark(folder: pathlib.Path, mark: dict[str, Any]) -> None:
    """Writes the mark of a folder, whole or not at all, also beside another process that does."""
    temporary = folder / f"{OURS}{os.getpid()}"
    temporary.write_text(json.dumps(mark, indent=2), encoding="utf-8")
    os.replace(temporary, folder / MARK)


def is_at(path: pathlib.Path, descriptor: int) -> bool:
    """True if an open file is still the file of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


class FolderLock:
    """Lock of an output folder, which is made and marked where it was missing.

    The lock lasts until `close`, and dies with its process.

    Args:
        mark: of a new folder.
        exclusive: without it there is no lock, and several processes may write the folder.

    Raises `ConfigError` where the folder must not be written or another process has it.
    """

    def __init__(self, place: OutputFolder, mark: dict[str, Any], exclusive: bool = True):
        self.path, self._place = place.path, place
        self._lock: BaseFileLock | None = None
        self._descriptor = -1
        self._made: list[pathlib.Path] = []  # removed by `close` if empty, the deepest first
        self._fresh = False  # whether `close` removes the mark of a folder that is still empty
        try:
            place.check()
            if exclusive:
                self._take()
                place.check()  # as it is now that no other command can change it
            else:
                self._make()
            if not (self.path / MARK).exists():
                self._fresh = True
                write_mark(self.path, mark)
        except OSError as error:
            self.close()
            place.refuse(f"{str(self.path)!r} can't be written: {error.strerror}")
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        folders = (self.path, *self.path.parents)
        self._made += [path for path in folders if path not in self._made and not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)

    def _take(self) -> None:
        for _ in range(TRIES):
            self._make()
            with contextlib.suppress(FileNotFoundError):  # its holder removed the folder meanwhile
                return self._acquire()
        raise OSError(errno.EAGAIN, "other processes make and remove it at the same time")

    def _acquire(self) -> None:
        path = self.path / LOCK
        try:
            self._lock = FileLock(path, fallback_to_soft=False, on_acquired=self._sign)
            self._lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            holder = path.read_text(errors="replace")[:200] or "another process"
            reason = f"{str(self.path)!r} is being written by {holder}"
            self._place.refuse(reason, "a folder that no other process writes")
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warning = f"{path} can't be locked ({error.strerror}): start nothing else there"
            print(f"warning: {warning}", file=sys.stderr)

    def _sign(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())

    def close(self) -> None:
        """Unlocks the folder; an empty one that was made here is removed."""
        with contextlib.suppress(OSError):
            if self._fresh and not entries(self.path):
                (self.path / MARK).unlink()
        if self._lock and self._lock.is_locked:  # not in a forked child
            with contextlib.suppress(OSError):
                if is_at(self.path / LOCK, self._descriptor):
                    (self.path / LOCK).unlink()
            self._lock.release()
        with contextlib.suppress(OSError):
            for made in self._made:
                made.rmdir()

    def clear(self) -> None:
        """Removes the files that a command wrote, and no other; `close` removes an empty folder."""
        self._made = list(dict.fromkeys([self.path, *self._made]))
        self._fresh = True
        mark = read_mark(self.path) or {}
        for entry in entries(self.path):
            if is_written(entry, mark):
                os.unlink(entry)
        for path in self.path.glob(f"{OURS}*"):
            if is_ours(path.name) and path.name not in (MARK, LOCK):  # a kill left it half written
                path.unlink()

    def finish(self, mark: dict[str, Any]) -> None:
        """Completes the folder: syncs the files that were written, and lists them in the mark."""
        files = {}
        for entry in entries(self.path):
            if is_written(entry, mark):
                descriptor = os.open(entry.path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
                files[entry.name] = stamp(entry)
        write_mark(self.path, {"kind": mark["kind"], "files": files})
        self._made, self._fresh = [], False

    def take_place(self, place: OutputFolder, old: "FolderLock | None") -> None:
        """Takes the name of `place`, in exchange with `old`, the folder that has it."""
        if old is None or not place.path.exists():
            self.path.rename(place.path)
            self.path = place.path
            return
        self.path.chmod(old.path.stat().st_mode & 0o7777)
        if not exchange(self.path, old.path):
            aside = place.beside("replaced").path
            old.path.rename(aside)
            try:
                self.path.rename(old.path)
            except OSError:
                aside.rename(old.path)
                raise
            aside.rename(self.path)
        self.path, old.path = old.path, self.path


def exchange(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Swaps two names in one system call; False where the system has no such call."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    return call is not None and call(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0


@contextlib.contextmanager
def claim(
    field: str, value: str, kind: str, below: str = "", *, exclusive: bool = True
) -> Iterator[Folder]:
    """Output folder, made and marked where it was missing, and locked while the block lasts.

    Arguments as for `check_free` and `FolderLock`.

    A folder that is still empty when the block ends is removed. Of several processes the first one
    locks it for all; a folder of an object store has no lock.
    """
    if is_remote(value) or not processes.is_first():
        if processes.is_first():
            _try_to_write(folder_at(value, below), field, value)
        yield folder_at(value, below)
        return
    lock = FolderLock(resolve_folder(field, value, kind, below), {"kind": kind}, exclusive)
    try:
        yield pathlib.Path(value, below)
    finally:
        lock.close()


def _try_to_write(folder: Folder, field: str, value: str) -> None:
    """Raises `ConfigError` where a bucket refuses; a run would else find out when it saves."""
    path = folder / f"{OURS}{os.getpid()}"
    try:
        path.write_bytes(b"")
        path.unlink()
    except Exception as error:
        if not (isinstance(error, OSError) or is_refusal(error)):
            raise
        require(False, field, value, f"a folder of a bucket that you may write; {reason(error)}")


@contextlib.contextmanager
def replace(
    field: str, value: str, kind: str, writes: Sequence[str]
) -> Iterator[pathlib.Path | None]:
    """Empty folder to write, which replaces the named one when the block ends well.

    A kill at any moment leaves the old folder or the new one under that name, complete. (Where the
    system can't exchange two names there is a moment between two renames with neither: the old one
    then stands beside it, and the next command puts it back.)

    Args:
        field, value, kind: as for `check_free`.
        writes: patterns of the names of files that the block writes; no other is ever removed.

    Yields None on processes beside the first, which write nothing.
    """
    if not processes.is_first():
        yield None
        return
    check_free(field, value, kind)
    place, mark = resolve_folder(field, value, kind), {"kind": kind, "writes": list(writes)}
    with contextlib.ExitStack() as stack:
        new = FolderLock(place.beside("unfinished"), mark)  # keeps other processes from here on out
        stack.callback(new.close)
        try:
            _put_back(place)
            new.clear()
            write_mark(new.path, mark)
        except OSError as error:
            place.refuse(f"{str(new.path)!r} can't be written: {error.strerror}")
        old = FolderLock(place, {"kind": kind}) if place.path.exists() else None
        if old:
            stack.callback(old.close)
        try:
            yield new.path
        except BaseException as error:
            with contextlib.suppress(OSError):
                new.clear()
            if cause := storage_fault(error):
                place.refuse(f"{str(new.path)!r} can't be written: {cause}", ROOM)
            raise
        try:
            new.finish(mark)
        except OSError as error:
            place.refuse(f"{str(new.path)!r} can't be written: {error.strerror}", ROOM)
        hint = f"; what was written is complete in {str(new.path)!r}"
        place.check(hint)  # somebody may have written there since
        try:
            new.take_place(place, old)
        except OSError as error:
            place.refuse(f"{error}{hint}")
        with contextlib.suppress(OSError):
            if old and old.path != place.path:
                old.clear()


def _put_back(place: OutputFolder) -> None:
    """Ends an exchange by renames that was killed between them."""
    aside = place.beside("replaced")
    if read_mark(aside.path) is None:
        return
    if not place.path.exists():
        aside.path.rename(place.path)
        return
    lock = FolderLock(aside, {})
    lock.clear()
    lock.close()
