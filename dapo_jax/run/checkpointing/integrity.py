"""Integrity of checkpoints: a list with a digest of every file, checked before reading.

The list is the last file that is written before a checkpoint gets its name: a folder without one
was never complete, or is half deleted.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.ownership import Folder, folder_at, is_remote
from dapo_jax.runtime.storage.retries import print_error, sync_folder, write_text

CHECKSUMS = "checksums.json"
INCOMPLETE = "incomplete"  # half deleted, or never finished
COMMITTED = "commit_success.txt"  # marks a complete checkpoint on an object store
# Orbax goes on writing these two, and reading a state or record needs neither.
OF_ORBAX = ("_CHECKPOINT_METADATA", COMMITTED)
MISSING = "No such file or directory"
THREADS = 8
CHUNK_BYTES = 1 << 22


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        yield from _files(path) if path.is_dir() else [path]


def _digest(path: epath.Path, sync: bool = False) -> list[Any]:
    """[bytes, sha256] of a file; [message] where it can't be read.

    Args:
        sync: bring the file to the disk first.
    """
    size, digest = 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size += len(chunk)
                digest.update(chunk)
            if sync:
                os.fsync(file.fileno())
    except FileNotFoundError:  # whose text a bucket words in its own way
        return [MISSING]
    except (OSError, ValueError) as error:  # of a name that was damaged, too
        return [getattr(error, "strerror", None) or str(error)]
    return [size, digest.hexdigest()]


def _digests(folder: epath.Path, names: list[str], sync: bool = False) -> dict[str, list[Any]]:
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        digests = pool.map(lambda name: _digest(folder / name, sync), names)
        return dict(zip(names, digests, strict=True))


def seal(folder: epath.Path) -> None:
    """Writes the list of all files that this process sees in a folder.

    Raises OSError where a file can't be read: the list would make a sound checkpoint a damaged one.
    """
    names = [str(path.relative_to(folder)) for path in _files(folder)]
    names = [name for name in names if name not in (CHECKSUMS, *OF_ORBAX)]
    digests = _digests(folder, names, sync=not is_remote(folder))
    for name, digest in digests.items():
        if len(digest) == 1:
            raise OSError(f"{name}: {digest[0]}")
    write_text(folder / CHECKSUMS, json.dumps(digests, indent=0))
    if not is_remote(folder):
        for place in {folder, *(path.parent for path in _files(folder))}:
            sync_folder(pathlib.Path(place))


def _damage(name: str, written: Any, digest: list[Any]) -> str:
    """Damage of a file; empty for a sound one."""
    if digest == written:
        return ""
    if len(digest) == 1:
        return f"{name}: {digest[0]}"
    if isinstance(written, list) and written and written[0] != digest[0]:
        return f"{name} has {digest[0]} bytes, not {written[0]}"
    return f"{name} is not what was written"


def damage(folder: epath.Path) -> str:
    """Damage of a checkpoint, in a few words; empty for a sound one.

    Every process calls it, and each reads a share of the files.
    """

    def listed() -> dict[str, Any] | str:
        try:
            digests = json.loads((folder / CHECKSUMS).read_text())
        except FileNotFoundError:
            return INCOMPLETE
        except (OSError, ValueError) as error:
            return f"{CHECKSUMS} can't be read: {error}"
        return digests if isinstance(digests, dict) and digests else f"{CHECKSUMS} lists no file"

    written = processes.broadcast_from_host0(listed, "what a checkpoint holds")
    if isinstance(written, str):
        return written
    share = sorted(written)[processes.index() :: processes.count()]
    digests = _digests(folder, share)
    damages = [text for name in share if (text := _damage(name, written[name], digests[name]))]
    damages = sum(processes.all_gather_json(damages[:2], "damaged files"), [])
    return damages[0] + ", and more" * (len(damages) > 1) if damages else ""


def checkpoint_folder(run_dir: str | os.PathLike) -> Folder:
    """Folder of a run's checkpoints, absolute, as Orbax wants it."""
    folder = folder_at(run_dir, "checkpoints")
    return folder if is_remote(run_dir) else folder.absolute()


def find_steps(run_dir: str | os.PathLike) -> list[int]:
    """Steps of all checkpoints, ascending, sound or damaged; this process alone looks."""
    folder = checkpoint_folder(run_dir)
    if not is_remote(run_dir):
        return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    # A glob fails where the bucket does; `is_dir` would be False.
    names = [path.parent.name for path in folder.glob(f"*/{COMMITTED}")]
    return sorted(int(name) for name in names if name.isdigit())


def saved_steps(run_dir: str | os.PathLike) -> list[int]:
    """Steps of all checkpoints, ascending, sound or damaged. Every process calls it."""
    return processes.broadcast_from_host0(lambda: find_steps(run_dir), "checkpoints")


def latest_valid(
    run_dir: str | os.PathLike, warn: Callable[[str], None] = print_error, field: str = "run_dir"
) -> int | None:
    """Step of the newest sound checkpoint; None where there are none at all.

    Raises `ConfigError` where all are damaged.
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
            "checkpoint before it is sound: bring one back from a copy, or take another folder"
        )
    return None
