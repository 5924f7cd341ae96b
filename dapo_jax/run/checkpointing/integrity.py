"""Whether a checkpoint is still what was written: a digest of every file, beside them.

The list is the last file that is written before a checkpoint gets its name, so that a folder
without one was never complete, is half deleted, or is older than these lists.
"""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.ownership import Folder, folder_at, is_remote
from dapo_jax.runtime.storage.retries import complain

CHECKSUMS = "checksums.json"
INCOMPLETE = "incomplete"  # half deleted, or never finished
SEALED = "sealed"  # in the record of a checkpoint that has such a list
RECORD = epath.Path("record") / "metadata"
COMMITTED = "commit_success.txt"  # what makes a checkpoint complete on an object store
# Orbax goes on writing these two, and reading a state or record needs neither.
OF_ORBAX = ("_CHECKPOINT_METADATA", COMMITTED)
MISSING = "No such file or directory"
THREADS = 8
CHUNK_BYTES = 1 << 22


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        yield from _files(path) if path.is_dir() else [path]


def _digest(path: epath.Path) -> list[Any]:
    """[bytes, sha256]; what kept the file from being read in their place."""
    size, found = 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                found.update(chunk)
    except FileNotFoundError:  # of which a bucket says it in its own words
        return [MISSING]
    except (OSError, ValueError) as error:  # of a name that was damaged, too
        return [getattr(error, "strerror", None) or str(error)]
    return [size, found.hexdigest()]


def _digests(folder: epath.Path, names: list[str]) -> dict[str, list[Any]]:
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True))


def seal(folder: epath.Path) -> None:
    """Writes the list of all files that this process sees in the folder.

    Raises OSError where one can't be read: the list would call a sound checkpoint damaged.
    """
    names = [str(path.relative_to(folder)) for path in _files(folder)]
    names = [name for name in names if name not in (CHECKSUMS, *OF_ORBAX)]
    found = _digests(folder, names)
    for name, digest in found.items():
        if len(digest) == 1:
            raise OSError(f"{name}: {digest[0]}")
    (folder / CHECKSUMS).write_text(json.dumps(found, indent=0))


def _changed(name: str, written: Any, found: list[Any] | None) -> str:
    """What is wrong with a file; empty where nothing is."""
    if found == written:
        return ""
    if found is None or len(found) == 1:
        return f"{name}: {found[0] if found else MISSING}"
    if isinstance(written, list) and written and written[0] != found[0]:
        return f"{name} has {found[0]} bytes, not {written[0]}"
    return f"{name} is not what was written"


def _unlisted(folder: epath.Path) -> str:
    """What is wrong with a folder that has no list; empty with one that is older than these."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return INCOMPLETE
    except (OSError, ValueError) as error:
        return f"{RECORD} can't be read: {error}"
    if not isinstance(record, dict):
        return f"{RECORD} is no record"
    return INCOMPLETE if SEALED in record else ""


def damage(folder: epath.Path) -> str:
    """What is wrong with a checkpoint, in a few words; empty where nothing is.

    Every process calls it, and each reads a share of the files.
    """

    def listed() -> dict[str, Any] | str:
        try:
            found = json.loads((folder / CHECKSUMS).read_text())
        except FileNotFoundError:
            return _unlisted(folder)
        except (OSError, ValueError) as error:
            return f"{CHECKSUMS} can't be read: {error}"
        return found if isinstance(found, dict) and found else f"{CHECKSUMS} lists no file"

    written = processes.from_first(listed, "what a checkpoint holds")
    if isinstance(written, str):
        return written
    share = sorted(written)[processes.index() :: processes.count()]
    found = _digests(folder, share)
    wrong = [text for name in share if (text := _changed(name, written[name], found[name]))]
    said = sum(processes.agree(wrong[:2], "what is damaged"), [])
    return said[0] + ", and more" * (len(said) > 1) if said else ""


def checkpoint_folder(run_dir: str | os.PathLike) -> Folder:
    """Absolute, as Orbax wants it; what is remote has no other name."""
    folder = folder_at(run_dir, "checkpoints")
    return folder if is_remote(run_dir) else folder.absolute()


def find_steps(run_dir: str | os.PathLike) -> list[int]:
    """The steps of all checkpoints, ascending, sound or not; this process alone looks."""
    folder = checkpoint_folder(run_dir)
    if not is_remote(run_dir):
        return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    # One question that fails where the bucket does; `is_dir` would say that there is nothing.
    names = [path.parent.name for path in folder.glob(f"*/{COMMITTED}")]
    return sorted(int(name) for name in names if name.isdigit())


def saved_steps(run_dir: str | os.PathLike) -> list[int]:
    """The steps of all checkpoints, ascending, sound or not."""
    return processes.from_first(lambda: find_steps(run_dir), "checkpoints")


def newest_sound(
    run_dir: str | os.PathLike, warn: Callable[[str], None] = complain, field: str = "run_dir"
) -> int | None:
    """The step of the newest checkpoint that is as it was written; None without any at all.

    Raises `ConfigError` where there are some, and none is sound.
    """
    folder, wrong = epath.Path(checkpoint_folder(run_dir)), {}
    for step in reversed(saved_steps(run_dir)):
        wrong[step] = damage(folder / str(step))
        if not wrong[step]:
            for other, text in wrong.items():
                if text and text != INCOMPLETE:
                    warn(f"{folder / str(other)} is damaged ({text}): step {step} is used")
            return step
    if wrong:
        step, text = next(iter(wrong.items()))
        raise ConfigError(
            f"config.{field} = {str(run_dir)!r}: {folder / str(step)} is damaged ({text}), and no "
            "checkpoint before it is sound: bring one back from a copy, or take another folder"
        )
    return None
