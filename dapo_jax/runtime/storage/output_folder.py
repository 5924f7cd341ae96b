"""Output folders of commands: permission to write, lock, and replacement as a whole.

A command writes into new folders, empty folders and its own earlier output. A mark in the folder
names the command that made it; any other folder that holds something is rejected.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import NoReturn

from filelock import FileLock, Timeout

from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.files import (
    Folder,
    folder_at,
    is_bucket_error,
    is_refusal,
    is_remote,
    reason,
    storage_fault,
    write_text,
)
from dapo_jax.types.errors import require

OWN_PREFIX = ".dapo_jax."  # of the mark and the lock
MARK, LOCK = f"{OWN_PREFIX}json", f"{OWN_PREFIX}lock"
RUN, EVALUATION, TRAINED, EXPORTED = "run", "evaluation", "trained model", "exported model"
PREFERRING, UNFINISHED = "model trained on pairs", "output that is not finished"
TINKER = "models of Tinker's API"
ALLOWED = {
    RUN: "a new or empty folder, or that of a run",
    EVALUATION: "a new or empty folder, or that of an evaluation",
    TRAINED: "a new or empty folder, or one that holds only what dapo-jax sft wrote",
    PREFERRING: "a new or empty folder, or one that holds only what dapo-jax dpo wrote",
    EXPORTED: "a new or empty folder, or one that holds only what dapo-jax export wrote",
    UNFINISHED: "a new or empty folder, or unfinished output of an earlier command",
    TINKER: "a new or empty folder, or one that dapo-jax serve --tinker wrote",
}
# Kinds that are replaced as a whole: the new folder is complete before the old one is removed.
REPLACED = (TRAINED, PREFERRING, EXPORTED)
LOCK_SECONDS = 0.2  # for a process that is about to release the folder


def _names(folder: pathlib.Path) -> list[str]:
    """Return the names in a folder, without mark and lock."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(OWN_PREFIX))


def _empty(folder: pathlib.Path) -> None:
    for name in _names(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove(folder: pathlib.Path) -> None:
    """Remove an output folder, its mark last, so that a killed removal can be repeated."""
    with contextlib.suppress(OSError):
        _empty(folder)
        shutil.rmtree(folder)


@dataclasses.dataclass(frozen=True)
class _Target:
    """A local folder that the setting `field` names by `value`, or one below or beside it."""

    field: str
    value: str
    kind: str
    path: pathlib.Path

    def reject(self, cause: str, allowed: str = "") -> NoReturn:
        require(False, self.field, self.value, f"{allowed or ALLOWED[self.kind]}; {cause}")
        raise AssertionError

    def check(self, hint: str = "") -> None:
        """Raise `ConfigError` if the command must not write the folder; `hint` ends the error."""
        try:
            cause = self._objection()
        except (OSError, ValueError) as error:
            cause = f"{str(self.path)!r} can't be read: {error}"
        if cause:
            self.reject(cause + hint)

    def _objection(self) -> str:
        shown = repr(str(self.path))
        if not self.path.is_dir():
            return f"{shown} is a file" if self.path.exists() else ""
        names, mark = _names(self.path), self.path / MARK
        if not mark.exists():
            return f"{shown} holds {names[0]!r} and no mark of dapo_jax" if names else ""
        content = json.loads(mark.read_text(encoding="utf-8"))
        if self.kind not in (UNFINISHED, content["kind"]):
            return f"{shown} is marked as: {content['kind']}"
        others = set(names) - set(content.get("files", ())) if self.kind in REPLACED else ()
        return f"{shown} also holds {min(others)!r}" if others else ""

    def beside(self, ending: str, kind: str) -> "_Target":
        path = self.path.with_name(f"{self.path.name}.{ending}")
        return dataclasses.replace(self, path=path, kind=kind)

    @contextlib.contextmanager
    def claimed(self, exclusive: bool = True) -> Iterator[None]:
        """Create, lock and mark the folder; remove a new one that is still empty at the end."""
        self.check()
        mark = self.path / MARK
        is_new = not mark.exists()
        created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        with contextlib.ExitStack() as stack:
            if is_new:
                stack.callback(self._remove_if_empty, created)
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                if exclusive:
                    stack.enter_context(self._locked())
                if is_new:
                    write_text(mark, json.dumps({"kind": self.kind}))
            except OSError as error:
                self.reject(f"{str(self.path)!r} can't be written: {error.strerror}")
            yield

    def _remove_if_empty(self, created: list[pathlib.Path]) -> None:
        """Remove a folder without files, then the empty ones that were created for it."""
        with contextlib.suppress(OSError):
            paths = self.path.rglob("*")
            if not any(p.is_file() and not p.name.startswith(OWN_PREFIX) for p in paths):
                shutil.rmtree(self.path, ignore_errors=True)
                for path in created[1:]:
                    path.rmdir()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder; the lock names its holder and dies with the process."""
        path = self.path / LOCK
        lock = FileLock(path)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            holder = path.read_text(errors="replace")[:200] or "another process"
            cause = f"{str(self.path)!r} is being written by {holder}"
            self.reject(cause, "a folder that no other process writes")
        try:
            path.write_text(f"process {os.getpid()} on {os.uname().nodename}")
            yield
        finally:
            lock.release()


def _target(field: str, value: str, kind: str, below: str = "") -> _Target:
    """Return the folder that a setting names. Raises `ConfigError` for an impossible name."""
    target = _Target(field, str(value), kind, pathlib.Path())
    if not target.value:
        target.reject("this names no folder")
    if target.value.startswith("~"):
        target.reject("shells do not expand ~ behind '=': write $HOME")
    try:
        path = pathlib.Path(value, below).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # links in a circle, a zero byte
        target.reject(str(error))
    return dataclasses.replace(target, path=path)


def check_free(field: str, value: str, kind: str) -> None:
    """Raise `ConfigError` if a command must not write a folder; change nothing."""
    if is_remote(value):
        require(kind in (RUN, EVALUATION), field, value, "a folder of this file system")
        return
    target = _target(field, value, kind)
    target.check()
    if kind in REPLACED:
        target.beside("unfinished", UNFINISHED).check()
        target.beside("replaced", UNFINISHED).check()


@contextlib.contextmanager
def claim(
    field: str, value: str, kind: str, below: str = "", *, exclusive: bool = True
) -> Iterator[Folder]:
    """Create and mark an output folder if needed, and lock it while the block lasts.

    A new folder that is still empty when the block ends is removed. Of several processes the first
    one locks it for all; a folder of an object store has no lock.
    """
    folder = folder_at(value, below)
    if not processes.is_first():
        yield folder
    elif is_remote(value):
        try_bucket(folder, field, value)
        yield folder
    else:
        with _target(field, value, kind, below).claimed(exclusive):
            yield folder


def try_bucket(folder: Folder, field: str, value: str) -> None:
    """Raise `ConfigError` if a bucket does not let this process write a folder."""
    path = folder / f"{OWN_PREFIX}{os.getpid()}"
    try:
        path.write_bytes(b"")
        path.unlink(missing_ok=True)  # a try whose answer was lost has removed it
    except Exception as error:
        is_away = is_bucket_error(error) or not isinstance(error, OSError)
        if is_away and not is_refusal(error):
            raise  # a run that is started again may find it
        require(False, field, value, f"a folder of a bucket that you may write; {reason(error)}")


@contextlib.contextmanager
def replace(field: str, value: str, kind: str) -> Iterator[pathlib.Path]:
    """Yield an empty folder that replaces the named one when the block succeeds.

    The old folder stays until the new one is complete. Two renames exchange them; if the process is
    killed between these, the next command puts the old folder back. Only one process calls it.
    """
    check_free(field, value, kind)
    target = _target(field, value, kind)
    new, old = target.beside("unfinished", UNFINISHED), target.beside("replaced", UNFINISHED)
    with new.claimed():
        if old.path.exists() and not target.path.exists():
            old.path.rename(target.path)
        _remove(old.path)
        _empty(new.path)
        try:
            yield new.path
            for path in filter(pathlib.Path.is_file, new.path.rglob("*")):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            mark = {"kind": kind, "files": _names(new.path)}
            write_text(new.path / MARK, json.dumps(mark, indent=2))
        except BaseException as error:
            _remove(new.path)
            if fault := storage_fault(error):
                cause = f"{str(new.path)!r} can't be written: {fault}"
                target.reject(cause, "a folder of storage with free space")
            raise
        hint = f"; what was written is complete in {str(new.path)!r}"
        target.check(hint)  # somebody may have written there meanwhile
        try:
            _exchange(new.path, target.path, old.path)
        except OSError as error:
            target.reject(f"{error}{hint}")


def _exchange(new: pathlib.Path, target: pathlib.Path, old: pathlib.Path) -> None:
    """Rename `target` to `old` and `new` to `target`, then remove `old`."""
    (new / LOCK).unlink(missing_ok=True)
    if target.exists():
        new.chmod(target.stat().st_mode & 0o7777)
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    _remove(old)
