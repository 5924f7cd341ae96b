"""Ownership of output folders: a command may write new ones, empty ones, and its own.

A mark in the folder names the kind of command that made it. Nothing is changed here;
`output_folder.py` makes, marks and locks folders.
"""

import dataclasses
import fnmatch
import json
import os
import pathlib
from typing import Any, NoReturn

from etils import epath

from dapo_jax.runtime.settings import require

MARK, LOCK = ".dapo_jax.json", ".dapo_jax.lock"
OURS = ".dapo_jax."  # prefix of these two, and of a mark that is being written
RUN, EVALUATION, TRAINED, EXPORTED = "run", "evaluation", "trained model", "exported model"
PREFERRING, HALFWAY = "model trained on pairs", "training that is not finished"
ALLOWED = {
    RUN: "a new or empty folder, or that of a run",
    EVALUATION: "a new or empty folder, or that of an evaluation",
    TRAINED: "a new or empty folder, or one that holds only what dapo-jax sft wrote",
    PREFERRING: "a new or empty folder, or one that holds only what dapo-jax dpo wrote",
    HALFWAY: "a new or empty folder, or what dapo-jax sft or dapo-jax dpo had not finished",
    EXPORTED: "a new or empty folder, or one that holds only what dapo-jax export wrote",
}
# Folders that are replaced whole: the new one is complete before the old one goes.
REPLACED = (TRAINED, PREFERRING, EXPORTED)
SECTIONS_OF_A_RUN = {"algorithm", "rollout", "sampler"}  # of its config.json
FOLDERS_OF_A_RUN = ("checkpoints", "evaluations", "groups", "rollouts", "tensorboard", "updates")
FILES_OF_A_RUN = ("config.json", "metrics.jsonl", "summary.json")


Folder = pathlib.Path | epath.Path  # of this file system, or remote


def is_remote(name: str | os.PathLike) -> bool:
    """True for a folder in an object store (gs://...), where there are no locks or marks."""
    return "://" in str(name)


def folder_at(name: str | os.PathLike, below: str = "") -> Folder:
    """Folder of that name, or the folder `below` in it."""
    return epath.Path(name) / below if is_remote(name) else pathlib.Path(name, below)


def read_mark(folder: pathlib.Path) -> dict[str, Any] | None:
    """Content of a folder's mark; None without one. Raises OSError or ValueError."""
    path = folder / MARK
    if not os.path.lexists(path):
        return None
    try:
        mark = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{MARK}: {error}") from None
    known = isinstance(mark, dict) and mark.get("kind") in tuple(ALLOWED)
    if not known or not isinstance(mark.get("files", {}), dict):
        raise ValueError(f"{MARK} is not of a kind that is known here")
    return mark


def stamp(entry: os.DirEntry) -> list[int]:
    """Size in bytes and modification time in ns of a file."""
    status = entry.stat(follow_symlinks=False)
    return [status.st_size, status.st_mtime_ns]


def is_written(entry: os.DirEntry, mark: dict[str, Any]) -> bool:
    """True if a command wrote a file and nobody changed it since.

    The mark of a finished folder lists names and stamps; that of an unfinished one can only say
    how the files are called that the command writes.
    """
    if not entry.is_file(follow_symlinks=False):
        return False
    if "files" in mark:
        return mark["files"].get(entry.name) == stamp(entry)
    return any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in mark.get("writes", ()))


def is_ours(name: str) -> bool:
    """True for a mark, a lock, or a mark that a process was writing."""
    return name in (MARK, LOCK) or name.startswith(OURS) and name.removeprefix(OURS).isdigit()


def entries(folder: pathlib.Path) -> list[os.DirEntry]:
    """Entries of a folder beside mark and lock, by name."""
    with os.scandir(folder) as scan:
        return sorted((e for e in scan if not is_ours(e.name)), key=lambda entry: entry.name)


@dataclasses.dataclass(frozen=True)
class OutputFolder:
    """Folder that a setting names, or one below or beside it, and its kind.

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

    def refuse(self, reason: str, allowed: str = "") -> NoReturn:
        """Raises `ConfigError` with field, value, what is allowed, and the reason."""
        allowed = allowed or ALLOWED[self.kind]
        allowed = f"one in which {self.below!r} is {allowed}" if self.below else allowed
        require(False, self.field, self.value, f"{allowed}; {reason}")
        raise AssertionError

    def check(self, hint: str = "") -> None:
        """Raises `ConfigError` where the command must not write the folder.

        Args:
            hint: follows the reason.
        """
        try:
            objection = self._objection()
        except (OSError, ValueError, RuntimeError) as error:
            objection = f"{str(self.path)!r} can't be read: {error}"
        if objection:
            self.refuse(objection + hint)

    def _objection(self) -> str:
        """Reason why the folder may not be written; empty where it may. Raises what systems do."""
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not existing.is_dir():
            return f"{str(existing)!r} is a file"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{str(existing)!r} can't be written"
        if existing != self.path:
            return ""
        content, mark, shown = entries(existing), read_mark(existing), repr(str(existing))
        replaced = self.kind in REPLACED
        if existing in (pathlib.Path.cwd(), pathlib.Path.home()) and (replaced or mark is None):
            return f"{shown} is your home or the folder that you are in"
        if replaced and os.path.ismount(existing):
            return f"{shown} is a mount point, whose place nothing can take"
        if mark is None:
            return f"{shown} holds {content[0].name!r} and no mark of ours" if content else ""
        if mark["kind"] != self.kind:
            return f"{shown} is marked as that of: {mark['kind']}"
        for entry in content if self.kind == RUN else ():
            if entry.name in FOLDERS_OF_A_RUN and not entry.is_dir():
                return f"{entry.path!r} is a file, where a run has a folder"
            if entry.name in FILES_OF_A_RUN and entry.is_dir():
                return f"{entry.path!r} is a folder, where a run has a file"
        others = [e.name for e in content if replaced and not is_written(e, mark)]
        return f"{shown} also holds {others[0]!r}, which is new or was changed" if others else ""

    def beside(self, ending: str) -> "OutputFolder":
        """Folder beside this one, whose name has an ending more."""
        path = self.path.with_name(f"{self.path.name}.{ending}")
        return dataclasses.replace(self, path=path)


def resolve_folder(field: str, value: str, kind: str, below: str = "") -> OutputFolder:
    """Folder that a setting names. Raises `ConfigError` for a name that no folder can have."""
    folder = OutputFolder(field, str(value), kind, pathlib.Path(), below)
    if not folder.value or "\0" in folder.value:
        folder.refuse("this names no folder")
    if folder.value.startswith("~"):
        folder.refuse("shells leave ~ as it is behind '=': $HOME is read there")
    try:
        return dataclasses.replace(folder, path=pathlib.Path(value, below).resolve())
    except (OSError, RuntimeError) as error:  # links in a circle
        folder.refuse(str(error))


def check_free(field: str, value: str, kind: str, below: str = "") -> None:
    """Raises `ConfigError` where a command must not write a folder; changes nothing.

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
        folder.beside("unfinished").check()
        folder.beside("replaced").check()
