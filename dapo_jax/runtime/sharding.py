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
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
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
    if devices[0].platform == "tpu" and all(map(fills_a_box, slices)):
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


def fills_a_box(devices: Sequence) -> bool:
    """True if chips of a slice lie without gaps in their torus, so that neighbours are known."""
    coordinates = np.array([device.coords for device in devices])
    extents = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
    return len(np.unique(coordinates, axis=0)) == int(np.prod(extents))


def rules(column: int = TRAINING) -> list[tuple[str, Any]]:
    """Table in the form that `flax.linen.logical_axis_rules` takes."""
    return [(name, axes[column]) for name, axes in RULES.items()]


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a table or of a PartitionSpec, outermost first."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def mesh_axes(logical_name: str, column: int = TRAINING) -> tuple[str, ...]:
    """Mesh axes that cut a dimension of that name, outermost first."""
    return axes_of(RULES[logical_name][column])


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

    Of code that each replica runs by itself (`per_replica`), the replica's devices count.
    """
    mesh = jax.sharding.get_abstract_mesh()
    alone = all(size == 1 or axis in mesh.manual_axes for axis, size in mesh.shape.items())
    return None if mesh.empty or alone else mesh


def per_replica(function: Callable, mesh: Mesh, cut: Any, gives: Any) -> Callable:
    """Runs `function` on every replica of `data`, without the others.

    Args:
        cut, gives: for each argument and each result, the dimension that `data` cuts; None: it is
            the same on all.
    """

    def places(dimensions: Any) -> Any:
        cuts = (None if i is None else (*(None,) * i, "data") for i in dimensions)
        return tuple(PartitionSpec(*(one or ())) for one in cuts)

    def of_replica(*arguments: Any) -> Any:
        rest = [
            (name, tuple(axis for axis in mesh_axes(name) if axis != "data") or None)
            for name in RULES
        ]
        with nn.logical_axis_rules(rest):
            return function(*arguments)

    specs = {"in_specs": places(cut), "out_specs": places(gives)}
    return jax.shard_map(of_replica, mesh=mesh, axis_names={"data"}, check_vma=False, **specs)


def _dividing(shape: Sequence[int], names: Sequence[str | None]) -> list[str | None]:
    """Names whose axes divide their dimension, by the active mesh and table; None for others."""
    mesh = active_mesh()

    def divides(size: int, name: str | None) -> bool:
        return size % math.prod(mesh.shape[axis] for axis in active_axes(name or "")) == 0

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
    mesh = active_mesh()
    if mesh is None or _dividing((size,), (name,)) == [None]:
        return 1
    return math.prod(mesh.shape[axis] for axis in active_axes(name))


def active_axes(name: str) -> tuple[str, ...]:
    """Mesh axes that cut a dimension of that name by the active table, outermost first."""
    return axes_of(dict(nn.get_logical_axis_rules()).get(name))


def active_spec(*names: str | None) -> PartitionSpec:
    """Partition by the active table of an array whose dimensions have these logical names."""
    table = dict(nn.get_logical_axis_rules())
    return PartitionSpec(*(name and table.get(name) for name in names))


def dividing_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec:
    """Partition by the active mesh and table; an axis that does not divide is left out."""
    return active_spec(*_dividing(shape, names))


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
