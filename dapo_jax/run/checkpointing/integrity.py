"""Integrity of checkpoints: a list with a digest of every file, checked before reading.

The list is the last file that is written before a checkpoint gets its name: a folder without one
is incomplete. Orbax has no checksums unless its default format is changed.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.paths import Folder, folder_at, is_remote
from dapo_jax.runtime.storage.retries import print_error, sync_folder, write_text

CHECKSUMS = "checksums.json"
INCOMPLETE = "incomplete"  # partly deleted, or never finished
COMMITTED = "commit_success.txt"  # marks a complete checkpoint on an object store
UNNAMED = ".orbax-checkpoint-tmp"  # in the name of a local checkpoint that is being written
# Orbax writes these two after the list; reading a state or record needs neither.
UNLISTED = ("_CHECKPOINT_METADATA", COMMITTED)
MISSING = "No such file or directory"
THREADS = 8
CHUNK_BYTES = 1 << 22


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        yield from _files(path) if path.is_dir() else [path]


def _digest(path: epath.Path, sync: bool = False) -> list[Any]:
    """Return [bytes, sha256] of a file; [message] if it can't be read.

    Args:
        sync: flush the file to the disk first.
    """
    size, digest = 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                digest.update(chunk)
            if sync:
                os.fsync(file.fileno())
    except FileNotFoundError:  # a bucket words it differently
        return [MISSING]
    except (OSError, ValueError) as error:  # ValueError: the name itself was damaged
        return [getattr(error, "strerror", None) or str(error)]
    return [size, digest.hexdigest()]


def _digests(folder: epath.Path, names: list[str], sync: bool = False) -> dict[str, list[Any]]:
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name, sync), names)
        return dict(zip(names, digests, strict=True))


def seal(folder: epath.Path) -> None:
    """Write the list of all files in a folder. Raises OSError if one of them can't be read."""
    names = [str(path.relative_to(folder)) for path in _files(folder)]
    names = [name for name in names if name not in (CHECKSUMS, *UNLISTED)]
    digests = _digests(folder, names, sync=not is_remote(folder))
    for name, digest in digests.items():
        if len(digest) == 1:
            raise OSError(f"{name}: {digest[0]}")
    write_text(folder / CHECKSUMS, json.dumps(digests, indent=0))
    if not is_remote(folder):
        for parent in {folder, *(path.parent for path in _files(folder))}:
            sync_folder(pathlib.Path(parent))


def _describe_damage(name: str, written: Any, digest: list[Any]) -> str:
    """Return the damage of a file; empty for a valid one."""
    if digest == written:
        return ""
    if len(digest) == 1:
        return f"{name}: {digest[0]}"
    if isinstance(written, list) and written and written[0] != digest[0]:
        return f"{name} has {digest[0]} bytes, not {written[0]}"
    return f"{name} is not what was written"


def damage(folder: epath.Path) -> str:
    """Return the damage of a checkpoint in a few words; empty for a valid one.

    Every process calls it, and each reads a part of the files.
    """

    def read_list() -> dict[str, Any] | str:
        try:
            digests = json.loads((folder / CHECKSUMS).read_text())
        except FileNotFoundError:
            return INCOMPLETE
        except (OSError, ValueError) as error:
            return f"{CHECKSUMS} can't be read: {error}"
        return digests if isinstance(digests, dict) and digests else f"{CHECKSUMS} lists no file"

    written = processes.broadcast_from_host0(read_list, "files of a checkpoint")
    if isinstance(written, str):
        return written
    own = sorted(written)[processes.index() :: processes.count()]
    digests = _digests(folder, own)
    texts = [_describe_damage(name, written[name], digests[name]) for name in own]
    texts = [text for text in texts if text]
    texts = sum(processes.all_gather_json(texts[:2], "damaged files"), [])
    return texts[0] + ", and more" * (len(texts) > 1) if texts else ""


def checkpoint_folder(run_dir: str | os.PathLike) -> Folder:
    """Return the folder of a run's checkpoints, absolute, as Orbax needs it."""
    folder = folder_at(run_dir, "checkpoints")
    return folder if is_remote(run_dir) else folder.absolute()


def find_steps(run_dir: str | os.PathLike) -> list[int]:
    """Return the steps of all named checkpoints, ascending, as this process sees them."""
    folder = checkpoint_folder(run_dir)
    if is_remote(run_dir):  # a glob raises if the bucket fails; `is_dir` would be False
        names = [path.parent.name for path in folder.glob(f"*/{COMMITTED}")]
    else:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def saved_steps(run_dir: str | os.PathLike) -> list[int]:
    """Return the steps of all named checkpoints, ascending. Every process calls it."""
    return processes.broadcast_from_host0(lambda: find_steps(run_dir), "checkpoints")


def remove_checkpoint(folder: epath.Path) -> None:
    """Remove a checkpoint, in a bucket its mark first."""
    if is_remote(folder):
        (folder / COMMITTED).unlink(missing_ok=True)
    folder.rmtree()


def remove_unfinished(folder: epath.Path) -> None:
    """Remove the checkpoints that a kill or a failed save left incomplete."""
    for path in folder.iterdir():
        is_unmarked = is_remote(folder) and path.name.isdigit() and not (path / COMMITTED).exists()
        if UNNAMED in path.name or is_unmarked:
            path.rmtree()


def latest_valid(
    run_dir: str | os.PathLike, warn: Callable[[str], None] = print_error, field: str = "run_dir"
) -> int | None:
    """Return the step of the newest valid checkpoint; None if there are no checkpoints.

    Raises `ConfigError` if all are damaged.
    """
    folder, damages = epath.Path(checkpoint_folder(run_dir)), dict[int, str]()
    for step in reversed(saved_steps(run_dir)):
        damages[step] = damage(folder / str(step))
        if not damages[step]:
            for other, text in damages.items():
                if text and text != INCOMPLETE:
                    warn(f"{folder / str(other)} is damaged ({text}): step {step} is used")
            return step
    if damages:
        step, text = next(iter(damages.items()))
        raise ConfigError(
            f"config.{field} = {str(run_dir)!r}: {folder / str(step)} is damaged ({text}), and no "
            "checkpoint before it is valid: restore one from a copy, or choose another folder"
        )
    return None
