"""Versions of the policy for samplers: decoding weights in a folder, each complete or absent.

The arrays are those that `weight_transfer.Loader` makes: cast or quantised, layer by layer, and
only trained ones, so that a run of adapters writes adapters. Each process of a trainer writes the
shards of its devices. A list of checksums, which is written last, completes a version; its digest
is the version's identity. A resumed trainer writes the same files, so that answers to its killed
predecessor count; those of Orbax's default format differ from save to save.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
from etils import epath

from dapo_jax.rollout.weight_transfer import DecodingArrays
from dapo_jax.run.checkpointing.checkpoints import CHECKSUMS, damage, seal
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.paths import folder_at, is_remote
from dapo_jax.runtime.storage.retries import is_storage_error, reason, suppress_storage_errors

FOLDER = "weights"
INDEX = "arrays_{:04d}.json"  # of a process: dtype, shape, and place of each shard
SHARD_BYTES = 1 << 30  # a file is finished once it is as large
KEPT = 2  # versions: a sampler may still read the last but one


class NoVersion(OSError):
    """A version that is absent, incomplete or damaged."""


class WeightVersions:
    """The versions in a run's folder; one trainer writes, any number of processes read."""

    def __init__(self, run_dir: str):
        folder = folder_at(run_dir, FOLDER)
        self._folder = epath.Path(folder if is_remote(run_dir) else folder.absolute())

    def _path(self, version: int) -> epath.Path:
        return self._folder / f"version_{version:06d}"

    def clear(self) -> None:
        """Remove all versions: a resumed run writes those that it needs."""
        with suppress_storage_errors():
            if self._folder.exists():
                self._folder.rmtree()

    def write(self, version: int, load: Callable[[], dict[str, Any]], repair: bool = False) -> str:
        """Write a version unless it is there; remove old ones; return its digest.

        Every process calls it, and an error of one is raised on all. A damaged version is there
        unless `repair` is true, since the check reads all files.
        """
        path = self._path(version)
        if not _on_first((path / CHECKSUMS).exists) or (repair and damage(path)):
            _on_first(lambda: _empty(path))
            arrays = load()
            _on_all(lambda: _write_arrays(path, arrays))
            _on_first(lambda: seal(path))
        if processes.is_first():
            self._remove_old(path)
        return _on_first(lambda: _digest(path))

    def _remove_old(self, path: epath.Path) -> None:
        for other in sorted(set(self._folder.glob("version_*")) - {path})[: 1 - KEPT]:
            with suppress_storage_errors():  # else after the next version
                (other / CHECKSUMS).unlink(missing_ok=True)  # absent from here on
                other.rmtree()

    def read(self, version: int, digest: str) -> DecodingArrays:
        """Return the arrays of a version. Raise `NoVersion`, also if it has another digest."""
        path = self._path(version)
        with _as_no_version(path):
            if _digest(path) != digest:
                raise NoVersion(f"{path} is not the version that the trainer names")
            if flaw := damage(path):
                raise NoVersion(f"{path} is damaged: {flaw}")
            return DecodingArrays(_read_arrays(path))


def _digest(path: epath.Path) -> str:
    return hashlib.sha256((path / CHECKSUMS).read_bytes()).hexdigest()[:16]


@contextlib.contextmanager
def _as_no_version(path: epath.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, ValueError) as error:
        if isinstance(error, NoVersion):
            raise
        raise NoVersion(f"{path} can't be read: {error}") from error


def _on_all(work: Callable[[], Any]) -> list[Any]:
    """Call `work` on every process, and return all results. If one fails, all raise OSError."""
    value, error = None, ""
    try:
        value = work()
    except Exception as problem:
        if processes.count() == 1 or not is_storage_error(problem):
            raise
        error = reason(problem)
    answers = processes.all_gather_json([value, error], "a version of the weights")
    for _, error in answers:
        if error:
            raise OSError(error)
    return [value for value, _ in answers]


def _on_first(work: Callable[[], Any]) -> Any:
    return _on_all(lambda: work() if processes.is_first() else None)[0]


def _empty(path: epath.Path) -> None:
    if path.exists():  # a kill left it incomplete
        path.rmtree()
    path.mkdir(parents=True)


def _write_arrays(path: epath.Path, arrays: dict[str, jax.Array]) -> None:
    """Write the shards of this process into files of about `SHARD_BYTES`, and an index."""
    index: list[Any] = []
    number = offset = 0
    prefix = f"{processes.index():04d}"
    file = (path / f"{prefix}_{number:05d}.bin").open("wb")
    try:
        for i, (name, leaf) in enumerate(arrays.items()):
            indices = map(str, leaf.sharding.devices_indices_map(leaf.shape).values())
            replicas = max(collections.Counter(indices).values())
            for shard in leaf.addressable_shards:
                if shard.replica_id != i % replicas:  # equal shards: processes take turns
                    continue
                part = np.ascontiguousarray(shard.data)
                if offset >= SHARD_BYTES:
                    file.close()
                    number, offset = number + 1, 0
                    file = (path / f"{prefix}_{number:05d}.bin").open("wb")
                starts = [piece.start or 0 for piece in shard.index]
                place = f"{prefix}_{number:05d}.bin", offset, starts, shard.data.shape
                index.append([name, leaf.dtype.name, leaf.shape, *place])
                file.write(part.tobytes())
                offset += part.nbytes
    finally:
        file.close()
    (path / INDEX.format(processes.index())).write_text(json.dumps(index))


def _read_arrays(path: epath.Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    contents: dict[str, bytes] = {}
    indices = [json.loads(file.read_text()) for file in sorted(path.glob("arrays_*.json"))]
    for name, kind, shape, file, offset, starts, part in itertools.chain(*indices):
        if file not in contents:
            contents = {file: (path / file).read_bytes()}  # files are in the order of shards
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        shard = np.frombuffer(contents[file], dtype, math.prod(part), offset).reshape(part)
        if part == shape:
            arrays[name] = shard
            continue
        if name not in arrays:
            arrays[name] = np.empty(shape, dtype)
        arrays[name][tuple(map(slice, starts, np.add(starts, part)))] = shard
    return arrays
