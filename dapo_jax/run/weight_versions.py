"""Versions of the policy for samplers: decoding weights in a folder, each complete or absent.

The arrays are those that `weight_transfer.Loader` makes: cast or quantised, layer by layer, and
only trained ones, so that a run of adapters writes adapters. A list of checksums, which is written
last, completes a version; its digest is the version's identity.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from dapo_jax.rollout.weight_transfer import DecodingArrays
from dapo_jax.run.checkpointing.checkpoints import CHECKSUMS, damage, seal
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.storage.paths import folder_at, is_remote
from dapo_jax.runtime.storage.retries import suppress_storage_errors

FOLDER = "weights"
INDEX = "arrays.json"
SHARD_BYTES = 1 << 30  # a file is finished once it is as large
KEPT = 2  # versions: a sampler may still read the last but one


class NoVersion(OSError):
    """A version that is absent, incomplete or damaged."""


class WeightVersions:
    """The versions in a run's folder; one process writes, any number read."""

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

        A damaged version is there unless `repair` is true, since the check reads all files.
        """
        path = self._path(version)
        if not (path / CHECKSUMS).exists() or (repair and damage(path)):
            if path.exists():  # a kill left it incomplete
                path.rmtree()
            path.mkdir(parents=True)
            _write_arrays(path, load())
            seal(path)
        for other in sorted(set(self._folder.glob("version_*")) - {path})[: 1 - KEPT]:
            with suppress_storage_errors():  # else after the next version
                (other / CHECKSUMS).unlink(missing_ok=True)  # absent from here on
                other.rmtree()
        return _digest(path)

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


def _write_arrays(path: epath.Path, arrays: dict[str, Any]) -> None:
    """Write arrays one after another into files of about `SHARD_BYTES`, and an index."""
    index: dict[str, list[Any]] = {}
    number = offset = 0
    file = (path / f"{number:05d}.bin").open("wb")
    try:
        for name, leaf in arrays.items():
            array = np.ascontiguousarray(to_host(leaf))
            if offset >= SHARD_BYTES:
                file.close()
                number, offset = number + 1, 0
                file = (path / f"{number:05d}.bin").open("wb")
            index[name] = [array.dtype.name, array.shape, f"{number:05d}.bin", offset]
            file.write(array.tobytes())
            offset += array.nbytes
    finally:
        file.close()
    (path / INDEX).write_text(json.dumps(index))


def _read_arrays(path: epath.Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    contents: dict[str, bytes] = {}
    for name, (kind, shape, file, offset) in json.loads((path / INDEX).read_text()).items():
        if file not in contents:
            contents = {file: (path / file).read_bytes()}  # files are in the order of arrays
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(contents[file], dtype, count, offset).reshape(shape)
    return arrays
