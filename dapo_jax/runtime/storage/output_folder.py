"""Output folders of commands: permission to write, lock, and replacement as a whole.

A command writes into new folders, empty folders and its own earlier output. A mark in the folder
names the command that made it; any other folder that holds something is rejected.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.storage.paths import Folder, folder_at, is_remote
from dapo_jax.runtime.storage.retries import is_refusal, reason, storage_fault, write_text

OWN_PREFIX = ".dapo_jax."  # of the mark and the lock
MARK, LOCK = f"{OWN_PREFIX}json", f"{OWN_PREFIX}lock"
RUN, EVALUATION, TRAINED, EXPORTED = "run", "evaluation", "trained model", "exported model"
PREFERRING, UNFINISHED = "model trained on pairs", "output that is not finished"
ALLOWED = {
    RUN: "a new or empty folder, or that of a run",
    EVALUATION: "a new or empty folder, or that of an evaluation",
    TRAINED: "a new or empty folder, or one that holds only what dapo-jax sft wrote",
    PREFERRING: "a new or empty folder, or one that holds only what dapo-jax dpo wrote",
    EXPORTED: "a new or empty folder, or one that holds only what dapo-jax export wrote",
    UNFINISHED: "a new or empty folder, or unfinished output of an earlier command",
}
# Kinds that are replaced as a whole: the new folder is complete before the old one is removed.
REPLACED = (TRAINED, PREFERRING, EXPORTED)
FOLDERS_OF_A_RUN = ("checkpoints", "evaluations", "groups", "rollouts", "tensorboard", "updates")
FILES_OF_A_RUN = ("config.json", "metrics.jsonl", "summary.json")
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
FREE_SPACE = "a folder of storage with free space"
LOCK_SECONDS = 0.2  # for a process that is about to release the folder


def _entries(folder: pathlib.Path) -> list[os.DirEntry]:
    """Return the entries of a folder by name, without mark and lock."""
    with os.scandir(folder) as scan:
        return sorted(
            (entry for entry in scan if not entry.name.startswith(OWN_PREFIX)),
            key=lambda entry: entry.name,
        )


def _remove(folder: pathlib.Path) -> None:
    """Remove an output folder, its mark last, so that a killed removal can be repeated."""
    with contextlib.suppress(OSError):
        for entry in _entries(folder):
            os.unlink(entry)
        shutil.rmtree(folder)


def _stamp(entry: os.DirEntry) -> list[int]:
    """Return size in bytes and modification time in ns of a file."""
    status = entry.stat(follow_symlinks=False)
    return [status.st_size, status.st_mtime_ns]


def _read_mark(folder: pathlib.Path) -> dict[str, Any] | None:
    """Return the content of a folder's mark; None without one. Raises OSError or ValueError."""
    path = folder / MARK
    if not os.path.lexists(path):
        return None
    mark = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(mark, dict) or mark.get("kind") not in ALLOWED:
        raise ValueError(f"{MARK} is not of a kind that is known here")
    return mark


@dataclasses.dataclass(frozen=True)
class OutputFolder:
    """A local folder that a setting names, or one below or beside it.

    Attributes:
        kind: a key of `ALLOWED`.
        path: absolute, without links.
        below: relative path from the folder that `value` names.
    """

    field: str
    value: str
    kind: str
    path: pathlib.Path
    below: str = ""

    def reject(self, cause: str, allowed: str = "") -> NoReturn:
        """Raise `ConfigError` with field, value, what is allowed, and the cause."""
        allowed = allowed or ALLOWED[self.kind]
        allowed = f"one in which {self.below!r} is {allowed}" if self.below else allowed
        require(False, self.field, self.value, f"{allowed}; {cause}")
        raise AssertionError

    def check(self, hint: str = "") -> None:
        """Raise `ConfigError` if the command must not write the folder; `hint` ends the error."""
        try:
            cause = self._objection()
        except (OSError, ValueError, RuntimeError) as error:
            cause = f"{str(self.path)!r} can't be read: {error}"
        if cause:
            self.reject(cause + hint)

    def _objection(self) -> str:
        """Return why the folder must not be written; empty if it may be."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        shown = repr(str(existing))
        if not existing.is_dir():
            return f"{shown} is a file"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{shown} can't be written"
        if existing != self.path:
            return ""
        content, mark, is_replaced = _entries(existing), _read_mark(existing), self.kind in REPLACED
        if existing in (pathlib.Path.cwd(), pathlib.Path.home()) and (is_replaced or mark is None):
            return f"{shown} is your home or the current folder"
        if is_replaced and os.path.ismount(existing):
            return f"{shown} is a mount point, which can't be renamed"
        if mark is None:
            return f"{shown} holds {content[0].name!r} and no mark of dapo_jax" if content else ""
        # An earlier command may have been killed after it had completed the folder.
        accepted = (UNFINISHED, *REPLACED) if self.kind == UNFINISHED else (self.kind,)
        if mark["kind"] not in accepted:
            return f"{shown} is marked as: {mark['kind']}"
        for entry in content if self.kind == RUN else ():
            if entry.name in FOLDERS_OF_A_RUN and not entry.is_dir():
                return f"{entry.path!r} is a file, but a run has a folder of that name"
            if entry.name in FILES_OF_A_RUN and entry.is_dir():
                return f"{entry.path!r} is a folder, but a run has a file of that name"
        files = mark.get("files", {})
        changed = [e.name for e in content if is_replaced and files.get(e.name) != _stamp(e)]
        return f"{shown} also holds {changed[0]!r}, which is new or was changed" if changed else ""

    def beside(self, ending: str, kind: str = "") -> "OutputFolder":
        """Return the folder beside this one with a longer name."""
        path = self.path.with_name(f"{self.path.name}.{ending}")
        return dataclasses.replace(self, path=path, kind=kind or self.kind)


def resolve_folder(field: str, value: str, kind: str, below: str = "") -> OutputFolder:
    """Return the folder that a setting names. Raises `ConfigError` for an impossible name."""
    folder = OutputFolder(field, str(value), kind, pathlib.Path(), below)
    if not folder.value or "\0" in folder.value:
        folder.reject("this names no folder")
    if folder.value.startswith("~"):
        folder.reject("shells do not expand ~ behind '=': write $HOME")
    try:
        return dataclasses.replace(folder, path=pathlib.Path(value, below).resolve())
    except (OSError, RuntimeError) as error:  # links in a circle
        folder.reject(str(error))


def check_free(field: str, value: str, kind: str, below: str = "") -> None:
    """Raise `ConfigError` if a command must not write a folder; change nothing.

    Args:
        field: the setting that names the folder by its `value`.
        kind: of the folder, a key of `ALLOWED`.
        below: relative path from there to the folder that is meant.
    """
    if is_remote(value):
        require(kind in (RUN, EVALUATION), field, value, "a folder of this file system")
        return
    folder = resolve_folder(field, value, kind, below)
    folder.check()
    if kind in REPLACED:
        folder.beside("unfinished", UNFINISHED).check()
        folder.beside("replaced").check()


@contextlib.contextmanager
def claim(
    field: str, value: str, kind: str, below: str = "", *, exclusive: bool = True
) -> Iterator[Folder]:
    """Create and mark an output folder if needed, and lock it while the block lasts.

    A folder that is still empty when the block ends is removed. Of several processes the first one
    locks it for all; a folder of an object store has no lock.

    Args:
        field, value, kind, below: as for `check_free`.
        exclusive: False takes no lock: other processes may write the folder too.
    """
    if not is_remote(value) and processes.is_first():
        with _claimed(resolve_folder(field, value, kind, below), exclusive):
            yield pathlib.Path(value, below)
        return
    if processes.is_first():
        try_bucket(folder_at(value, below), field, value)
    yield folder_at(value, below)


@contextlib.contextmanager
def _claimed(place: OutputFolder, exclusive: bool = True) -> Iterator[None]:
    place.check()
    created = [path for path in (place.path, *place.path.parents) if not path.exists()]
    with contextlib.ExitStack() as stack:
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            is_new = not (place.path / MARK).exists()
            stack.callback(_remove_if_empty, place.path, created, is_new)
            if exclusive:
                stack.enter_context(_locked(place))
                place.check()  # again, now that no other command can change it
            if is_new:
                write_text(place.path / MARK, json.dumps({"kind": place.kind}))
        except OSError as error:
            place.reject(f"{str(place.path)!r} can't be written: {error.strerror}")
        yield


def _remove_if_empty(folder: pathlib.Path, created: list[pathlib.Path], is_new: bool) -> None:
    """Remove the mark of an empty folder, and the folders that were created for it."""
    with contextlib.suppress(OSError):
        if is_new and folder.exists() and not _entries(folder):
            (folder / LOCK).unlink(missing_ok=True)
            (folder / MARK).unlink(missing_ok=True)
        for path in created:
            if path.exists():
                path.rmdir()


@contextlib.contextmanager
def _locked(place: OutputFolder) -> Iterator[None]:
    """Lock a folder; the lock names its holder and dies with the process."""
    path = place.path / LOCK
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
        path.write_text(f"process {os.getpid()} on {os.uname().nodename}")
    except Timeout:
        holder = path.read_text(errors="replace")[:200] or "another process"
        cause = f"{str(place.path)!r} is being written by {holder}"
        place.reject(cause, "a folder that no other process writes")
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warning = f"{path} can't be locked ({error.strerror}): start nothing else there"
        print(f"warning: {warning}", file=sys.stderr)
    try:
        yield
    finally:
        lock.release()


def try_bucket(folder: Folder, field: str, value: str) -> None:
    """Raise `ConfigError` if a bucket does not let this process write a folder."""
    path = folder / f"{OWN_PREFIX}{os.getpid()}"
    try:
        path.write_bytes(b"")
        path.unlink()
    except Exception as error:
        if not (isinstance(error, OSError) or is_refusal(error)):
            raise
        require(False, field, value, f"a folder of a bucket that you may write; {reason(error)}")


@contextlib.contextmanager
def replace(field: str, value: str, kind: str) -> Iterator[pathlib.Path | None]:
    """Yield an empty folder that replaces the named one when the block succeeds.

    The old folder stays until the new one is complete. Two renames exchange them; if the process is
    killed between these, the next command puts the old folder back.

    Args:
        field, value, kind: as for `check_free`.

    Yields None on processes other than the first, which write nothing.
    """
    if not processes.is_first():
        yield None
        return
    check_free(field, value, kind)
    place = resolve_folder(field, value, kind)
    new, old = place.beside("unfinished", UNFINISHED), place.beside("replaced")
    with _claimed(new):
        if old.path.exists() and not place.path.exists():
            old.path.rename(place.path)
        _remove(old.path)
        for entry in _entries(new.path):
            os.unlink(entry)
        try:
            yield new.path
            _complete(new.path, kind)
        except BaseException as error:
            _remove(new.path)
            if fault := storage_fault(error):
                place.reject(f"{str(new.path)!r} can't be written: {fault}", FREE_SPACE)
            raise
        hint = f"; what was written is complete in {str(new.path)!r}"
        place.check(hint)  # somebody may have written there meanwhile
        try:
            _exchange(new.path, place.path, old.path)
        except OSError as error:
            place.reject(f"{error}{hint}")


def _complete(folder: pathlib.Path, kind: str) -> None:
    """Flush the files of a folder, and list them in its mark."""
    for entry in _entries(folder):
        with open(entry.path, "rb") as file:
            os.fsync(file.fileno())
    files = {entry.name: _stamp(entry) for entry in _entries(folder)}
    write_text(folder / MARK, json.dumps({"kind": kind, "files": files}, indent=2))


def _exchange(new: pathlib.Path, place: pathlib.Path, old: pathlib.Path) -> None:
    """Rename `place` to `old` and `new` to `place`, then remove `old`."""
    (new / LOCK).unlink(missing_ok=True)
    if not place.exists():
        new.rename(place)
        return
    new.chmod(place.stat().st_mode & 0o7777)
    place.rename(old)
    try:
        new.rename(place)
    except OSError:
        old.rename(place)
        raise
    _remove(old)
