"""Records of a run folder, looked through before a run goes on."""

from dapo_jax.config.sections import Log
from dapo_jax.reporting.writers import rollouts_name
from dapo_jax.runtime.storage.jsonl import objects, read_object, spell
from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import suppress_storage_errors

# Of each kind of records so many bytes are read, the newest files first.
READ_BYTES = 1 << 28
JSON_FILES = ("config.json", "summary.json")


def describe_gaps(run_dir: Folder, last_row: int, log: Log) -> list[str]:
    """Texts about records that are missing or damaged.

    Damage is an unreadable line or end of a file; a changed character inside a text is not seen.

    Args:
        last_row: newest step that should have a row.
        log: which records the run writes and keeps.
    """
    rows = run_dir / "metrics.jsonl"
    steps = {row.get("step") for row in objects(rows)} if rows.exists() else set()
    texts = []
    if missing := [step for step in range(1, last_row + 1) if step not in steps]:
        texts.append(f"metrics.jsonl lacks the rows of steps {spell(missing)}")
    texts += [
        f"{name} is damaged: it is no JSON object"
        for name in JSON_FILES
        if is_damaged(run_dir / name)
    ]
    if not log.rollouts:
        return texts
    names = {path.name for path in _files(run_dir / "rollouts")}
    kept = range(max(1, last_row + 1 - log.rollouts_keep if log.rollouts_keep else 1), last_row + 1)
    if missing := [step for step in kept if rollouts_name(step) not in names]:
        texts.append(f"rollouts/ lacks steps {spell(missing)}: deleted, or never written")
    for folder in "rollouts", "evaluations":
        damaged, left = [], READ_BYTES
        for path in sorted(_files(run_dir / folder), reverse=True):
            content = _read(path)
            left -= len(content)
            if left < 0:
                break
            if not _is_whole(content):
                damaged.append(path.name)
        if damaged:
            texts.append(f"{folder}/ has damaged files: {', '.join(reversed(damaged))}")
    return texts


def is_damaged(path: Folder) -> bool:
    """True for a file that is no JSON object."""
    return path.exists() and read_object(_read(path)) is None


def _read(path: Folder) -> bytes:
    """Content of a file; nothing where it can't be read, which counts as damaged."""
    content = b""
    with suppress_storage_errors():
        content = path.read_bytes()
    return content


def _files(folder: Folder) -> list[Folder]:
    return list(folder.glob("step_*.jsonl")) if folder.exists() else []


def _is_whole(content: bytes) -> bool:
    """Test for lines of JSON objects, at least one, the last one ended."""
    *lines, rest = content.split(b"\n")
    return not rest and bool(lines) and all(read_object(line) is not None for line in lines)
