"""Device mesh, and the ONE table from logical axis names to mesh axes.

Modules name their axes; nothing else in the project knows what a mesh axis is called. Training and
decoding use two columns of the table: training shards weights along `embed` over fsdp and gathers
them layer by layer, decoding keeps them whole there (a gather per token would dominate). The axis
`decode_tensor` is the same devices used differently: it joins fsdp in training, tensor in decoding.
The axis `expert` cuts experts, and joins fsdp elsewhere. The axis `context` cuts rows by length and
weights along `embed`; in decoding its devices are replicas.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import traverse_util
from flax.linen import spmd
from jax.experimental import mesh_utils
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from dapo_jax.runtime.settings import require

AXES = ("data", "fsdp", "expert", "context", "decode_tensor", "tensor")

# logical name: (while training, while decoding)
RULES = {
    "batch": (  # rows, decode slots
        ("data", "fsdp", "expert", "decode_tensor"),
        ("data", "fsdp", "expert", "context"),
    ),
    "sequence": ("context", None),  # tokens of a row
    "length": (("context", "tensor"), None),  # of the residual stream, which would else be repeated
    "embed": (("fsdp", "expert", "context", "decode_tensor"), None),
    "experts": ("expert", "expert"),
    "expert_embed": (("fsdp", "context", "decode_tensor"), None),  # where experts are cut, too
    "heads": ("tensor", ("tensor", "decode_tensor")),
    "kv_heads": ("tensor", ("tensor", "decode_tensor")),
    "mlp": ("tensor", ("tensor", "decode_tensor")),
    "vocab": ("tensor", ("tensor", "decode_tensor")),
    "layers": (None, None),
    "norm": (None, None),
    "head_dim": (None, None),
    "rank": (None, None),
}
TRAINING, DECODING = 0, 1


def mesh_shape(
    data: int,
    fsdp: int,
    tensor: int,
    devices: int,
    *,
    decode_tensor: int = 1,
    expert: int = 1,
    context: int = 1,
) -> tuple[int, int, int, int, int, int]:
    """Sizes of AXES; `data` or `fsdp` = -1 takes the devices that the others leave.

    Raises `ConfigError` where the product is not the number of devices.
    """
    cut = expert * context * decode_tensor * tensor
    if data == -1:
        data = max(1, devices // (fsdp * cut))
    if fsdp == -1:
        fsdp = max(1, devices // (data * cut))
    shape = (data, fsdp, expert, context, decode_tensor, tensor)
    allowed = f"a factorisation of the {devices} devices"
    require(data * fsdp * cut == devices, "mesh", dict(zip(AXES, shape, strict=True)), allowed)
    return shape


def make_mesh(
    data: int,
    fsdp: int,
    tensor: int,
    devices: Sequence | None = None,
    *,
    decode_tensor: int = 1,
    expert: int = 1,
    context: int = 1,
) -> Mesh:
    """Device mesh of the sizes that `mesh_shape` gives.

    On TPU, neighbours in the mesh are neighbours in the torus, and `data` goes across slices, so
    that only sums of gradients do. Axes are Auto: the compiler places the collectives
    (jax.make_mesh would make them Explicit).

    Raises `ConfigError` as `mesh_shape` does, and where slices don't divide `data`.
    """
    devices = jax.devices() if devices is None else devices
    cut = {"decode_tensor": decode_tensor, "expert": expert, "context": context}
    shape = mesh_shape(data, fsdp, tensor, len(devices), **cut)
    slices = by_slice(devices)
    allowed = f"a multiple of the {len(slices)} slices, across which gradients are summed"
    require(shape[0] % len(slices) == 0, "mesh.data", shape[0], allowed)
    each = (shape[0] // len(slices), *shape[1:])
    if devices[0].platform == "tpu" and all(map(_fills_a_box, slices)):
        arrange = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
        grids = [arrange(each, chips) for chips in slices]
    else:
        grids = [np.asarray(chips).reshape(each) for chips in slices]
    return Mesh(np.concatenate(grids), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def by_slice(devices: Sequence) -> list[list]:
    """Devices of each TPU slice, in order; elsewhere all are one."""
    slices: dict[int, list] = {}
    for device in devices:
        # GPUs have the attribute too: there it is the host.
        number = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        slices.setdefault(number, []).append(device)
    return [slices[number] for number in sorted(slices)]


def _fills_a_box(devices: Sequence) -> bool:
    """True if chips of a slice lie without gaps in their torus, so that neighbours are known."""
    coordinates = np.array([device.coords for device in devices])
    extents = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
    return len(np.unique(coordinates, axis=0)) == int(np.prod(extents))


def split_devices(devices: Sequence, share: float, block: int) -> tuple[Sequence, Sequence]:
    """Devices that learn, and devices that sample: the last ones of each process.

    Args:
        share: of the devices that sample; 0: all do both.
        block: devices that hold the decoding weights once. Each process must have whole blocks on
            both sides, so that new weights go from one to the other inside it.

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
            abs(count - share * len(mine)) < 1e-6
            and 0 < count < len(mine)
            and count % block == (len(mine) - count) % block == 0,
            "mesh.sampler_share",
            share,
            "0, or a share that gives learner and sampler multiples of expert x decode_tensor x "
            f"tensor = {block} of a process's {len(mine)} devices",
        )
        learning += mine[:-count]
        sampling += mine[-count:]
    flat = devices[0].platform == "tpu" and "lite" in devices[0].device_kind  # a torus of two axes
    require(
        not flat or all(map(_fills_a_box, by_slice(learning) + by_slice(sampling))),
        "mesh.sampler_share",
        share,
        f"0 on several hosts of {devices[0].device_kind}, whose compiler joins no chips with gaps "
        "between them",
    )
    return learning, sampling


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


def rules(column: int = TRAINING) -> list[tuple[str, Any]]:
    """Table in the form that `flax.linen.logical_axis_rules` takes."""
    return [(name, axes[column]) for name, axes in RULES.items()]


def mesh_axes(logical_name: str, column: int = TRAINING) -> tuple[str, ...]:
    """Mesh axes that cut a dimension of that name, outermost first."""
    axes = RULES[logical_name][column]
    return (axes,) if isinstance(axes, str) else axes or ()


def spec(*names: str | None, column: int = TRAINING) -> PartitionSpec:
    """Partition of an array whose dimensions have these logical names."""
    return PartitionSpec(*(None if name is None else RULES[name][column] for name in names))


def sharding(mesh: Mesh, *names: str | None, column: int = TRAINING) -> NamedSharding:
    """Sharding of an array whose dimensions have these logical names."""
    return NamedSharding(mesh, spec(*names, column=column))


def tree_shardings(mesh: Mesh, boxed: Any, column: int = TRAINING) -> Any:
    """Shardings of a tree whose leaves carry logical names (flax `LogicallyPartitioned`)."""
    return spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules(column))


def shards(mesh: Mesh, logical_name: str, column: int = TRAINING) -> int:
    """Number of pieces into which the mesh cuts a dimension of that name."""
    return int(np.prod([mesh.shape[axis] for axis in mesh_axes(logical_name, column)]))


def active_mesh() -> Any:
    """Mesh that the code being traced will run on; None where it has one device.

    Code that every device runs by itself (`each_of_data`) has one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or mesh.manual_axes else mesh


def cuts_data_alone(mesh: Mesh) -> bool:
    """True where devices share the rows and nothing else."""
    return mesh.size > 1 and mesh.shape["data"] == mesh.size


def each_of_data(function: Callable, mesh: Mesh, cut: Any, gives: Any) -> Callable:
    """Runs `function` on every device of a mesh that cuts data alone, without the others.

    Args:
        cut, gives: for each argument and each result, the dimension that `data` cuts; None: it is
            the same on all.
    """

    def places(dimensions: Any) -> Any:
        cuts = (None if i is None else (*(None,) * i, "data") for i in dimensions)
        return tuple(PartitionSpec(*(one or ())) for one in cuts)

    specs = {"in_specs": places(cut), "out_specs": places(gives)}
    return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)


def _dividing(shape: Sequence[int], names: Sequence[str | None]) -> list[str | None]:
    """Names whose axes divide their dimension, by the active mesh and table; None for others."""
    mesh, table = active_mesh(), dict(nn.get_logical_axis_rules())

    def divides(size: int, name: str | None) -> bool:
        axes = (table.get(name) if name else None) or ()
        axes = (axes,) if isinstance(axes, str) else axes
        return size % int(np.prod([mesh.shape[axis] for axis in axes])) == 0

    sized = zip(shape, names, strict=True)
    return [name if divides(size, name) else None for size, name in sized]


def constrain(array: Array, *names: str | None) -> Array:
    """Constrains an array's sharding by the table, inside jit.

    A name whose axes do not divide the dimension is left out.

    Does nothing without an active mesh of several devices.
    """
    if active_mesh() is None or not nn.get_logical_axis_rules():
        return array
    return spmd.with_logical_constraint(array, tuple(_dividing(array.shape, names)))


def active_pieces(size: int, name: str) -> int:
    """Pieces into which the active mesh cuts a dimension; 1 where its axes do not divide it."""
    mesh, table = active_mesh(), dict(nn.get_logical_axis_rules())
    if mesh is None or _dividing((size,), (name,)) == [None]:
        return 1
    axes = table.get(name) or ()
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def active_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec:
    """Partition by the active mesh and table; an axis that does not divide is left out."""
    table = dict(nn.get_logical_axis_rules())
    return PartitionSpec(*(name and table.get(name) for name in _dividing(shape, names)))


def put(mesh: Mesh, tree: Any, *names: str | None) -> Any:
    """Copies host arrays to the mesh, every leaf with the same logical names."""
    place = sharding(mesh, *names)
    if place.is_fully_addressable:
        return jax.device_put(tree, place)

    def put_one(leaf: Any) -> jax.Array:  # device_put would compare the processes' host arrays
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, place)
        return jax.make_array_from_callback(np.shape(leaf), place, lambda part: leaf[part])

    return jax.tree.map(put_one, tree)


def to_host(tree: Any) -> Any:
    """Copies arrays of the mesh to the host, whole, on every process; every process calls it."""
    leaves, structure = jax.tree.flatten(tree)
    spread = [i for i, leaf in enumerate(leaves) if not _is_here(leaf)]
    if spread:
        mesh = leaves[spread[0]].sharding.mesh
        for i, leaf in zip(spread, _replicated(mesh)([leaves[i] for i in spread]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, map(np.asarray, leaves))


def _is_here(leaf: Any) -> bool:
    spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return not spread or leaf.is_fully_replicated


@functools.cache
def _replicated(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda arrays: arrays, out_shardings=sharding(mesh))


def unbox(tree: Any) -> Any:
    """Tree without logical axis names."""
    return nn.unbox(tree)


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves of nested dictionaries by path, as in `layers/query/kernel`."""
    return traverse_util.flatten_dict(tree, sep="/")


@contextlib.contextmanager
def activate(mesh: Mesh, column: int = TRAINING) -> Iterator[None]:
    """Sets the mesh and the table for the logical constraints inside modules."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules(column)):
        yield


@contextlib.contextmanager
def activate_traced(mesh: Mesh, column: int) -> Iterator[None]:
    """Sets them as `activate` does, for code that is being traced already."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(rules(column)):
        yield
