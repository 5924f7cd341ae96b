"""Checks of the records in a run folder before the run resumes."""

from typing import Any

from dapo_jax.config.experiment import Log
from dapo_jax.runtime.storage.jsonl import objects, read_object, spell
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import suppress_storage_errors

READ_BYTES = 1 << 28  # of each kind of records, the newest files first
JSON_FILES = ("config.json", "summary.json")


def rollouts_name(step: int) -> str:
    """Return the name of a step's file in rollouts/."""
    return f"step_{step:06d}.jsonl"


def read_rows(path: Folder) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; none if there is no file."""
    return list(objects(path)) if path.exists() else []


def describe_gaps(run_dir: Folder, last_row: int, log: Log) -> list[str]:
    """Return messages about missing and damaged records.

    Damage is an unreadable line or file end; a changed character inside a text is not detected.

    Args:
        last_row: newest step that should have a row.
        log: says which records the run writes and keeps.
    """
    steps = {row.get("step") for row in read_rows(run_dir / "metrics.jsonl")}
    texts = []
    if missing := [step for step in range(1, last_row + 1) if step not in steps]:
        texts.append(f"metrics.jsonl lacks the rows of steps {spell(missing)}")
    for name in JSON_FILES:
        if is_damaged(run_dir / name):
            texts.append(f"{name} is damaged: it is no JSON object")
    if not log.rollouts:
        return texts
    names = {path.name for path in _files(run_dir / "rollouts")}
    first_kept = last_row + 1 - log.rollouts_keep if log.rollouts_keep else 1
    kept = range(max(1, first_kept), last_row + 1)
    if missing := [step for step in kept if rollouts_name(step) not in names]:
        texts.append(f"rollouts/ lacks steps {spell(missing)}: deleted, or never written")
    for folder in "rollouts", "evaluations":
        if damaged := _damaged_files(run_dir / folder):
            texts.append(f"{folder}/ has damaged files: {', '.join(damaged)}")
    return texts


def is_damaged(path: Folder) -> bool:
    """Return True if the file exists and is no JSON object."""
    return path.exists() and read_object(_read(path)) is None


def _damaged_files(folder: Folder) -> list[str]:
    damaged = []
    left = READ_BYTES
    for path in sorted(_files(folder), reverse=True):
        content = _read(path)
        left -= len(content)
        if left < 0:
            break
        *lines, rest = content.split(b"\n")
        is_complete = not rest and bool(lines)
        if not is_complete or any(read_object(line) is None for line in lines):
            damaged.append(path.name)
    return damaged[::-1]


def _read(path: Folder) -> bytes:
    """Return the content of a file; empty, thus damaged, if it cannot be read."""
    content = b""
    with suppress_storage_errors():
        content = path.read_bytes()
    return content


def _files(folder: Folder) -> list[Folder]:
    return list(folder.glob("step_*.jsonl")) if folder.exists() else []
