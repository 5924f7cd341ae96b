"""Devices that only sample, apart from those that learn, and how new weights reach them.

Weights go from a device to another of the same process; nothing is sent between processes. A
decoding replica may lie on several processes, if the learning devices of each have its pieces.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding

from dapo_jax.runtime.settings import require
from dapo_jax.runtime.sharding import AXES, by_slice, fills_a_box, make_mesh

PIECES = ("expert", "decode_tensor", "tensor")  # axes that cut weights while decoding


def split_devices(devices: Sequence, share: float, block: int) -> tuple[Sequence, Sequence]:
    """Devices that learn, and devices that sample: the last ones of each process.

    Args:
        share: of the devices that sample; 0: all do both.
        block: devices that hold the decoding weights once.

    Raises `ConfigError` where the devices can't be shared out so.
    """
    if share == 0:
        return devices, devices
    owned: dict[int, list] = {}
    for device in devices:
        owned.setdefault(device.process_index, []).append(device)
    learning, sampling = [], []
    for mine in owned.values():
        count = round(share * len(mine))
        require(
            abs(count - share * len(mine)) < 1e-6 and 0 < count < len(mine),
            "mesh.sampler_share",
            share,
            f"0, or a share of a process's {len(mine)} devices that leaves some to learn",
        )
        learning += mine[:-count]
        sampling += mine[-count:]
    whole = len(learning) % block == len(sampling) % block == 0
    require(whole, "mesh.sampler_share", share, _allowed(block))
    flat = devices[0].platform == "tpu" and "lite" in devices[0].device_kind  # a torus of two axes
    require(
        not flat or all(map(fills_a_box, by_slice(learning) + by_slice(sampling))),
        "mesh.sampler_share",
        share,
        f"0 on several hosts of {devices[0].device_kind}, whose compiler joins no chips with gaps "
        "between them",
    )
    return learning, sampling


def open_sampling_mesh(mesh: Mesh, learning: Sequence, sampling: Sequence, share: float) -> Mesh:
    """Mesh of the devices that sample: as many pieces of the weights, the rest replicas.

    Where as many sample as learn, each has the place of one of its process that learns.

    Args:
        mesh: of the devices that learn.
        learning, sampling: as `split_devices` gives them.
        share: named in errors.

    Raises `ConfigError` where a process would sample with a piece that it does not learn.
    """
    sizes, block = mesh.shape, math.prod(mesh.shape[axis] for axis in PIECES)
    if len(learning) == len(sampling):
        beside = dict(zip(learning, sampling, strict=True))
        grid = np.vectorize(beside.__getitem__, otypes=[object])(mesh.devices)
        # Devices of `context` are replicas while decoding, as those of fsdp.
        grid = np.moveaxis(grid, AXES.index("context"), AXES.index("fsdp"))
        shape = sizes["data"], -1, sizes["expert"], 1, sizes["decode_tensor"], sizes["tensor"]
        apart = Mesh(grid.reshape(shape), AXES, axis_types=mesh.axis_types)
    else:
        cut = {axis: sizes[axis] for axis in ("expert", "decode_tensor")}
        apart = make_mesh(len(by_slice(sampling)), -1, sizes["tensor"], sampling, **cut)
    near = _pieces(apart) <= _pieces(mesh)
    require(near, "mesh.sampler_share", share, _allowed(block))
    return apart


def _allowed(block: int) -> str:
    each = f"multiples of expert x decode_tensor x tensor = {block}"
    return f"0, 0.5, or a share that gives learner and sampler {each} of each process's devices"


def _pieces(mesh: Mesh) -> set[tuple[int, ...]]:
    """Pieces of decoding weights by process: its number, and the place along each of PIECES."""
    axes = [AXES.index(axis) for axis in PIECES]
    return {
        (device.process_index, *(place[axis] for axis in axes))
        for place, device in np.ndenumerate(mesh.devices)
    }


def move(tree: Any, places: Any) -> Any:
    """Copies arrays to other devices that are cut alike; each process copies what it has.

    Args:
        places: for each array a sharding, with or without a layout in memory, whose every piece a
            device of this process has already, in that layout.
    """

    def move_one(leaf: jax.Array, place: NamedSharding | Format) -> jax.Array:
        here = {str(shard.index): shard.data for shard in leaf.addressable_shards}
        where = place.sharding if isinstance(place, Format) else place
        assert isinstance(where, Sharding)  # a format's may also be left to the compiler
        pieces = [
            jax.device_put(here[str(at)], device)  # which keeps the layout
            for device, at in where.addressable_devices_indices_map(leaf.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, where, pieces)

    return jax.tree.map(move_one, tree, places)
