"""Separate devices for the sampler, and the copy of weights to them.

Weights are copied between devices of one process, never between processes. A decoding replica may
span several processes if the learner's devices of each process hold its shards.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding

from dapo_jax.runtime.sharding import AXES, by_slice, is_contiguous, make_mesh
from dapo_jax.types.errors import require

WEIGHT_AXES = ("expert", "decode_tensor", "tensor")  # axes that shard weights in decoding


def split_devices(devices: Sequence, share: float, block: int) -> tuple[Sequence, Sequence]:
    """Return the devices of the learner, and those of the sampler: the last of each process."""
    if share == 0:
        return devices, devices
    owned: dict[int, list] = {}
    for device in devices:
        owned.setdefault(device.process_index, []).append(device)
    learning, sampling = [], []
    for local in owned.values():
        count = round(share * len(local))
        fits = abs(count - share * len(local)) < 1e-6 and 0 < count < len(local)
        part = f"a fraction of a process's {len(local)} devices"
        require(fits, "mesh.sampler_share", share, f"0, or {part} that leaves some to the learner")
        learning += local[:-count]
        sampling += local[-count:]
    is_whole = len(learning) % block == len(sampling) % block == 0
    require(is_whole, "mesh.sampler_share", share, _allowed(block))
    kind = devices[0].device_kind
    if devices[0].platform == "tpu" and "lite" in kind:  # a two-dimensional torus
        fits = all(map(is_contiguous, by_slice(learning) + by_slice(sampling)))
        allowed = (
            f"0 on several hosts of {kind}: its compiler needs chips without gaps between them"
        )
        require(fits, "mesh.sampler_share", share, allowed)
    return learning, sampling


def open_sampling_mesh(mesh: Mesh, learning: Sequence, sampling: Sequence, share: float) -> Mesh:
    """Return the mesh of the devices that only sample; `share` is `mesh.sampler_share`.

    Weights have the learner's shards, so a process copies only its own; other axes are replicas.
    """
    sizes = mesh.shape
    block = math.prod(sizes[axis] for axis in WEIGHT_AXES)
    if len(learning) == len(sampling):
        partner = dict(zip(learning, sampling, strict=True))
        grid = np.vectorize(partner.__getitem__, otypes=[object])(mesh.devices)
        # In decoding, `context` and fsdp both hold replicas.
        grid = np.moveaxis(grid, AXES.index("context"), AXES.index("fsdp"))
        shape = sizes["data"], -1, sizes["expert"], 1, sizes["decode_tensor"], sizes["tensor"]
        sampling_mesh = Mesh(grid.reshape(shape), AXES, axis_types=mesh.axis_types)
    else:
        cut = {axis: sizes[axis] for axis in ("expert", "decode_tensor")}
        sampling_mesh = make_mesh(len(by_slice(sampling)), -1, sizes["tensor"], sampling, **cut)
    is_local = _shards_by_process(sampling_mesh) <= _shards_by_process(mesh)
    require(is_local, "mesh.sampler_share", share, _allowed(block))
    return sampling_mesh


def _allowed(block: int) -> str:
    multiples = f"multiples of expert x decode_tensor x tensor = {block}"
    return f"0, 0.5, or a fraction that gives learner and sampler {multiples} devices per process"


def _shards_by_process(mesh: Mesh) -> set[tuple[int, ...]]:
    """Return (process, position along each of WEIGHT_AXES) of all shards of decoding weights."""
    axes = [AXES.index(axis) for axis in WEIGHT_AXES]
    return {
        (device.process_index, *(position[axis] for axis in axes))
        for position, device in np.ndenumerate(mesh.devices)
    }


def move(tree: Any, places: Any) -> Any:
    """Copy arrays to other devices with the same shards; each process copies its own."""

    def move_one(leaf: jax.Array, place: NamedSharding | Format) -> jax.Array:
        local = {str(shard.index): shard.data for shard in leaf.addressable_shards}
        target = place.sharding if isinstance(place, Format) else place
        assert isinstance(target, Sharding)  # a format could leave it to the compiler
        shards = [
            jax.device_put(local[str(index)], device)  # it keeps the layout
            for device, index in target.addressable_devices_indices_map(leaf.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, target, shards)

    return jax.tree.map(move_one, tree, places)
