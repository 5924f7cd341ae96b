"""Versions of the policy for samplers: safetensors files that are named by their digests.

The arrays are those that `weight_transfer.Loader` makes: cast or quantised, layer by layer, and
only trained ones, so that a run of adapters writes adapters. Each process of a trainer writes a
file with shards of its devices. The names of the files identify a version: one that is cut or
changed has another digest. A resumed trainer writes the same files, so that answers to its killed
predecessor count.
"""

import collections
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import deserialize
from safetensors.numpy import save

from dapo_jax.model.load_huggingface import DTYPES
from dapo_jax.rollout.weight_transfer import DecodingArrays
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage import files

FOLDER = "weights"
KEPT = 2  # versions: a sampler may still read the last but one


class WeightVersions:
    """The versions in a run's folder; one trainer writes, any number of processes read."""

    def __init__(self, run_dir: str):
        folder = files.folder_at(run_dir, FOLDER)
        self._folder = epath.Path(folder if files.is_remote(run_dir) else folder.absolute())
        self._kept: collections.deque[str] = collections.deque(maxlen=KEPT)

    def write(self, arrays: dict[str, jax.Array]) -> str:
        """Write a version, remove old ones, and return its name.

        Every process calls it, and an OSError of one is raised on all.
        """
        content, error = save(_own_shards(arrays)), ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _name(content)).write_bytes(content)
        except Exception as problem:
            if processes.count() == 1 or not files.is_storage_error(problem):
                raise
            error = files.reason(problem)
        answers = processes.all_gather_json([_name(content), error], "a version of the weights")
        for _, error in answers:
            if error:
                raise OSError(error)
        self._kept.append(" ".join(sorted({name for name, _ in answers})))
        if processes.is_first():
            with files.suppress_storage_errors():  # else after the next version
                for path in self._folder.iterdir():
                    if path.name not in " ".join(self._kept):
                        path.unlink()
        return self._kept[-1]

    def read(self, version: str) -> DecodingArrays:
        """Return the arrays of a version by its name. Raises OSError if a file is not whole."""
        arrays = DecodingArrays()
        for name in version.split():
            content = (self._folder / name).read_bytes()
            if _name(content) != name:
                raise OSError(f"{self._folder / name} is damaged")
            for key, view in deserialize(content):
                path, shape, starts = json.loads(key)
                dtype = jnp.dtype((DTYPES | {"I8": "int8"})[view["dtype"]])
                shard = np.frombuffer(view["data"], dtype).reshape(view["shape"])
                if shard.shape == tuple(shape):
                    arrays[path] = shard
                    continue
                if path not in arrays:
                    arrays[path] = np.empty(shape, dtype)
                arrays[path][tuple(map(slice, starts, np.add(starts, shard.shape)))] = shard
        return arrays


def _name(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:16]}.safetensors"


def _own_shards(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the shards that this process writes, by path, whole shape and place."""
    shards = {}
    for i, (path, leaf) in enumerate(arrays.items()):
        indices = map(str, leaf.sharding.devices_indices_map(leaf.shape).values())
        replicas = max(collections.Counter(indices).values())
        for shard in leaf.addressable_shards:
            if shard.replica_id == i % replicas:  # equal shards: processes take turns
                key = json.dumps([path, leaf.shape, [piece.start or 0 for piece in shard.index]])
                shards[key] = np.ascontiguousarray(shard.data).reshape(shard.data.shape)
    return shards
