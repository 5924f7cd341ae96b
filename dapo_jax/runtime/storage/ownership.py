"""Which folders a command may write: new ones, empty ones, and those its mark says it made.

Nothing here changes anything; `runtime/storage/output_folder.py` makes, marks and holds them.
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
OURS = ".dapo_jax."  # what these two begin with, and a mark that is being written
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
REPLACED = (
    TRAINED,
    PREFERRING,
    EXPORTED,
)  # whole: the new folder is complete before the old one goes
SECTIONS_OF_A_RUN = {"algorithm", "rollout", "sampler"}
FOLDERS_OF_A_RUN = ("checkpoints", "evaluations", "groups", "rollouts", "tensorboard", "updates")
FILES_OF_A_RUN = ("config.json", "metrics.jsonl", "summary.json")


Folder = pathlib.Path | epath.Path  # of this file system, or remote


def is_remote(name: str | os.PathLike) -> bool:
    """Whether a folder is of an object store (gs://...), where there are no locks or marks."""
    return "://" in str(name)


def folder_at(name: str | os.PathLike, below: str = "") -> Folder:
    """The folder of that name, or the one below it."""
    return epath.Path(name) / below if is_remote(name) else pathlib.Path(name, below)


def read_mark(folder: pathlib.Path) -> dict[str, Any] | None:
    """What the folder says of itself; None without a mark. Raises OSError or ValueError."""
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
    """What changes when a file does: its bytes and its time (ns)."""
    status = entry.stat(follow_symlinks=False)
    return [status.st_size, status.st_mtime_ns]


def is_written(entry: os.DirEntry, mark: dict[str, Any]) -> bool:
    """Whether a command wrote that file and nobody changed it since.

    The mark of a finished folder lists names and stamps; that of an unfinished one can only say
    how the files are called that the command writes.
    """
    if not entry.is_file(follow_symlinks=False):
        return False
    if "files" in mark:
        return mark["files"].get(entry.name) == stamp(entry)
    return any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in mark.get("writes", ()))


def is_ours(name: str) -> bool:
    """Whether a file is a mark, a lock, or a mark that a process was writing."""
    return name in (MARK, LOCK) or name.startswith(OURS) and name.removeprefix(OURS).isdigit()


def entries(folder: pathlib.Path) -> list[os.DirEntry]:
    """What a folder holds beside mark and lock, by name."""
    with os.scandir(folder) as found:
        theirs = [entry for entry in found if not is_ours(entry.name)]
    return sorted(theirs, key=lambda entry: entry.name)


def is_unmarked_run(folder: pathlib.Path) -> bool:
    """Whether a run wrote it before there were marks."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    ours = isinstance(settings, dict) and settings.keys() >= SECTIONS_OF_A_RUN
    return ours and (folder / "checkpoints").is_dir()


@dataclasses.dataclass(frozen=True)
class OutputFolder:
    """A folder that a setting names, or one below or beside that, and what it is to be.

    Attributes:
        kind: a key of `ALLOWED`.
        path: absolute, without links.
        below: the way to it from the folder that `value` names.
    """

    field: str
    value: str
    kind: str
    path: pathlib.Path
    below: str = ""

    def refuse(self, reason: str, allowed: str = "") -> NoReturn:
        """Raises `ConfigError` naming field, value, what is allowed, and what is there instead."""
        allowed = allowed or ALLOWED[self.kind]
        allowed = f"one in which {self.below!r} is {allowed}" if self.below else allowed
        require(False, self.field, self.value, f"{allowed}; {reason}")
        raise AssertionError

    def check(self, hint: str = "") -> None:
        """Raises `ConfigError` where the command must not write there.

        Args:
            hint: said after the reason.
        """
        try:
            objection = self._objection()
        except (OSError, ValueError, RuntimeError) as error:
            objection = f"{str(self.path)!r} can't be read: {error}"
        if objection:
            self.refuse(objection + hint)

    def _objection(self) -> str:
        """Why it may not be written, empty where it may; or raises what says so."""
        existing = next(one for one in (self.path, *self.path.parents) if one.exists())
        if not existing.is_dir():
            return f"{str(existing)!r} is a file"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{str(existing)!r} can't be written"
        if existing != self.path:
            return ""
        found, mark, shown = entries(existing), read_mark(existing), repr(str(existing))
        replaced, unmarked_run = self.kind in REPLACED, mark is None and is_unmarked_run(existing)
        own = mark is not None or (unmarked_run and self.kind == RUN)
        if existing in (pathlib.Path.cwd(), pathlib.Path.home()) and (replaced or not own):
            return f"{shown} is your home or the folder that you are in"
        if replaced and os.path.ismount(existing):
            return f"{shown} is a mount point, whose place nothing can take"
        if not own:
            return f"{shown} holds {found[0].name!r} and no mark of ours" if found else ""
        if mark and mark["kind"] != self.kind:
            return f"{shown} is marked as that of: {mark['kind']}"
        for entry in found if self.kind == RUN else ():
            if entry.name in FOLDERS_OF_A_RUN and not entry.is_dir():
                return f"{entry.path!r} is a file, where a run has a folder"
            if entry.name in FILES_OF_A_RUN and entry.is_dir():
                return f"{entry.path!r} is a folder, where a run has a file"
        strange = [
            entry.name for entry in found if replaced and not (mark and is_written(entry, mark))
        ]
        return f"{shown} also holds {strange[0]!r}, which is new or was changed" if strange else ""

    def beside(self, ending: str) -> "OutputFolder":
        """The folder whose name has that ending too."""
        path = self.path.with_name(f"{self.path.name}.{ending}")
        return dataclasses.replace(self, path=path)


def resolve_folder(field: str, value: str, kind: str, below: str = "") -> OutputFolder:
    """The place that a setting names. Raises `ConfigError` for a name that can be no folder's."""
    named = OutputFolder(field, str(value), kind, pathlib.Path(), below)
    if not named.value or "\0" in named.value:
        named.refuse("this names no folder")
    try:
        return dataclasses.replace(named, path=pathlib.Path(value, below).resolve())
    except (OSError, RuntimeError) as error:  # links in a circle
        named.refuse(str(error))


def check_free(field: str, value: str, kind: str, below: str = "") -> None:
    """Raises `ConfigError` where a command must not write the folder; it changes nothing.

    Args:
        field: the setting that names the folder by its `value`.
        kind: what the folder is to be, a key of `ALLOWED`.
        below: the way from there to the folder that is meant.
    """
    if is_remote(value):
        require(kind in (RUN, EVALUATION), field, value, "a folder of this file system")
        return
    place = resolve_folder(field, value, kind, below)
    place.check()
    if kind in REPLACED:
        place.beside("unfinished").check()
        place.beside("replaced").check()
