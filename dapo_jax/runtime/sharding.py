"""The device mesh, and the only table from logical axis names to mesh axes.

Modules name logical axes; only this module knows mesh axes. The table has a column for training and
one for decoding: training shards weights along `embed` over fsdp and gathers them layer by layer,
decoding does not shard `embed`, because a gather per token would dominate. `decode_tensor` acts as
fsdp in training and as tensor in decoding. `expert` shards experts; other layers treat it like
fsdp. `context` shards rows by length and weights along `embed`; in decoding it holds replicas.
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
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dapo_jax.types.errors import require

AXES = ("data", "fsdp", "expert", "context", "decode_tensor", "tensor")
unbox = nn.unbox  # removes the logical axis names from a tree
# Returns the leaves of nested dictionaries by path, as in `layers/query/kernel`.
flatten: Callable[[Any], dict[str, Any]] = functools.partial(traverse_util.flatten_dict, sep="/")

# logical name: (mesh axes in training, mesh axes in decoding)
RULES = {
    # rows, decode slots
    "batch": (("data", "fsdp", "expert", "decode_tensor"), ("data", "fsdp", "expert", "context")),
    "sequence": ("context", None),  # tokens of a row
    "length": (("context", "tensor"), None),  # tokens of the residual stream
    "embed": (("fsdp", "expert", "context", "decode_tensor"), None),
    "experts": ("expert", "expert"),
    "expert_embed": (("fsdp", "context", "decode_tensor"), None),  # `embed` beside `experts`
    "heads": ("tensor", ("tensor", "decode_tensor")),
    "kv_heads": ("tensor", ("tensor", "decode_tensor")),
    "mlp": ("tensor", ("tensor", "decode_tensor")),
    "vocab": ("tensor", ("tensor", "decode_tensor")),
    "layers": (None, None),
    "norm": (None, None),
    "head_dim": (None, None),
    "rank": (None, None),
    # layers while Muon computes with whole matrices
    "matrices": (("tensor", "fsdp", "expert", "context", "decode_tensor"), None),
    "expert_matrices": (("tensor", "fsdp", "context", "decode_tensor"), None),
}
TRAINING, DECODING = 0, 1


def mesh_shape(data: int, fsdp: int, tensor: int, devices: int, **cut: int) -> tuple[int, ...]:
    """Return the sizes of AXES; `data` or `fsdp` = -1 takes the remaining devices.

    `cut` has the sizes of `decode_tensor`, `expert` and `context`. Raises `ConfigError` if the
    product is not the number of devices.
    """
    sizes = dict.fromkeys(AXES, 1) | cut | {"data": data, "fsdp": fsdp, "tensor": tensor}
    for axis in ("data", "fsdp"):
        if sizes[axis] == -1:
            others = math.prod(sizes[other] for other in AXES if other != axis)
            sizes[axis] = max(1, devices // others)
    allowed = f"a factorisation of the {devices} devices"
    require(math.prod(sizes.values()) == devices, "mesh", sizes, allowed)
    return tuple(sizes[axis] for axis in AXES)


def make_mesh(
    data: int, fsdp: int, tensor: int, devices: Sequence | None = None, **cut: int
) -> Mesh:
    """Return a device mesh with the sizes of `mesh_shape`.

    On TPU, neighbours in the mesh are neighbours in the torus, and only `data` spans slices, so
    only gradient sums cross them. Axes are Auto: the compiler places collectives (jax.make_mesh
    would make them Explicit).
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(data, fsdp, tensor, len(devices), **cut)
    slices = by_slice(devices)
    allowed = f"a multiple of the {len(slices)} slices, across which gradients are summed"
    require(shape[0] % len(slices) == 0, "mesh.data", shape[0], allowed)
    each = (shape[0] // len(slices), *shape[1:])
    if devices[0].platform == "tpu" and all(map(is_contiguous, slices)):
        arrange = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
        grids = [arrange(each, chips) for chips in slices]
    else:
        grids = [np.asarray(chips).reshape(each) for chips in slices]
    return Mesh(np.concatenate(grids), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def by_slice(devices: Sequence) -> list[list]:
    """Group devices by TPU slice; all other devices are one group."""
    slices: dict[int, list] = {}
    for device in devices:
        # On GPUs the attribute is the host.
        number = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        slices.setdefault(number, []).append(device)
    return [slices[number] for number in sorted(slices)]


def is_contiguous(devices: Sequence) -> bool:
    """Return True if the chips of a slice fill a box of their torus."""
    coordinates = np.array([device.coords for device in devices])
    extents = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
    return len(np.unique(coordinates, axis=0)) == int(np.prod(extents))


def rules(column: int = TRAINING) -> list[tuple[str, Any]]:
    """Return a column of the table for `flax.linen.logical_axis_rules`."""
    return [(name, axes[column]) for name, axes in RULES.items()]


def entry_axes(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a `PartitionSpec` or of the table, outermost first."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def mesh_axes(logical_name: str, column: int = TRAINING) -> tuple[str, ...]:
    """Return the mesh axes that shard a logical axis, outermost first."""
    return entry_axes(RULES[logical_name][column])


def spec(*names: str | None, column: int = TRAINING) -> PartitionSpec:
    """Return the partition of an array with these logical axes."""
    return PartitionSpec(*(None if name is None else RULES[name][column] for name in names))


def sharding(mesh: Mesh, *names: str | None, column: int = TRAINING) -> NamedSharding:
    """Return the sharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(*names, column=column))


def tree_shardings(mesh: Mesh, boxed: Any, column: int = TRAINING) -> Any:
    """Return the shardings of a tree of flax `LogicallyPartitioned` leaves."""
    return spmd.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules(column))


def shards(mesh: Mesh, logical_name: str, column: int = TRAINING) -> int:
    """Return the number of shards of a logical axis."""
    return int(np.prod([mesh.shape[axis] for axis in mesh_axes(logical_name, column)]))


def active_mesh() -> Any:
    """Return the mesh of the code being traced; None if it has one device.

    Inside `per_replica` only the devices of a replica count.
    """
    mesh = jax.sharding.get_abstract_mesh()
    alone = all(size == 1 or axis in mesh.manual_axes for axis, size in mesh.shape.items())
    return None if mesh.empty or alone else mesh


def per_replica(
    function: Callable, mesh: Mesh, in_axes: Sequence[int | None], out_axes: Sequence[int | None]
) -> Callable:
    """Return a function that runs on every replica of `data` separately."""

    def specs(axes: Sequence[int | None]) -> tuple[PartitionSpec, ...]:
        return tuple(
            PartitionSpec() if i is None else PartitionSpec(*[None] * i, "data") for i in axes
        )

    def run_replica(*arguments: Any) -> Any:
        rules_of_replica = [
            (name, tuple(axis for axis in mesh_axes(name) if axis != "data") or None)
            for name in RULES
        ]
        with nn.logical_axis_rules(rules_of_replica):
            return function(*arguments)

    return jax.shard_map(
        run_replica,
        mesh=mesh,
        axis_names={"data"},
        check_vma=False,
        in_specs=specs(in_axes),
        out_specs=specs(out_axes),
    )


def _dividing(shape: Sequence[int], names: Sequence[str | None]) -> list[str | None]:
    """Return logical names with mesh axes that divide their dimension, None for the others."""
    mesh = active_mesh()

    def divides(size: int, name: str | None) -> bool:
        return size % math.prod(mesh.shape[axis] for axis in active_axes(name or "")) == 0

    sized = zip(shape, names, strict=True)
    return [name if divides(size, name) else None for size, name in sized]


def constrain(array: Array, *names: str | None) -> Array:
    """Constrain the sharding of an array inside jit; a no-op without a mesh of several devices.

    Names with mesh axes that do not divide the dimension are ignored.
    """
    if active_mesh() is None or not nn.get_logical_axis_rules():
        return array
    return spmd.with_logical_constraint(array, tuple(_dividing(array.shape, names)))


def active_pieces(size: int, name: str) -> int:
    """Return the number of shards of a dimension on the active mesh; 1 if it does not divide."""
    mesh = active_mesh()
    if mesh is None or _dividing((size,), (name,)) == [None]:
        return 1
    return math.prod(mesh.shape[axis] for axis in active_axes(name))


def active_axes(name: str) -> tuple[str, ...]:
    """Return the mesh axes of a logical axis by the active rules, outermost first."""
    return entry_axes(dict(nn.get_logical_axis_rules()).get(name))


def active_spec(*names: str | None) -> PartitionSpec:
    """Return the partition of an array with these logical axes by the active rules."""
    table = dict(nn.get_logical_axis_rules())
    return PartitionSpec(*(name and table.get(name) for name in names))


def dividing_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec:
    """Return the partition by the active rules, without axes that do not divide."""
    return active_spec(*_dividing(shape, names))


def put(mesh: Mesh, tree: Any, *names: str | None) -> Any:
    """Copy host arrays to the mesh; all leaves have the same logical axes."""
    place = sharding(mesh, *names)
    if place.is_fully_addressable:
        return jax.device_put(tree, place)

    def put_one(leaf: Any) -> jax.Array:  # device_put would compare the host arrays of processes
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, place)
        return jax.make_array_from_callback(np.shape(leaf), place, lambda part: leaf[part])

    return jax.tree.map(put_one, tree)


def to_host(tree: Any) -> Any:
    """Copy whole arrays to the host of every process; a collective call."""

    def copy(leaf: Any) -> np.ndarray:
        is_device = isinstance(leaf, jax.Array)
        if is_device and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(copy, tree)


@contextlib.contextmanager
def activate(mesh: Mesh, column: int = TRAINING, *, is_traced: bool = False) -> Iterator[None]:
    """Set the mesh and the rules for logical constraints, inside code `is_traced` too."""
    abstract = mesh.abstract_mesh
    context = jax.sharding.use_abstract_mesh(abstract) if is_traced else jax.set_mesh(mesh)
    with context, nn.logical_axis_rules(rules(column)):
        yield
