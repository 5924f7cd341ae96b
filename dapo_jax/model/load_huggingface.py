"""Loading of model folders in the Hugging Face layout, straight into the shards of devices.

Each published tensor is read in blocks of rows, one tensor after another. So the host holds one
tensor (float32, the part of its own devices) beside the shards. `save_huggingface.py` writes
such folders.
"""

import functools
import hashlib
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from dapo_jax.data.policies import model_path
from dapo_jax.model import families, weight_names
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.param_paths import forward_dtype, summed_axes
from dapo_jax.model.published_tensors import DTYPES, Tensors, weight_files
from dapo_jax.runtime import nonfinite, sharding
from dapo_jax.runtime.settings import ConfigError, read_json

READ_WHOLE, READ_BYTES, READ_EVERY = 64 << 20, 64 << 10, 4 << 20  # for a fingerprint
BLOCK_BYTES = 32 << 20  # read at once
EXPERT_BYTES = 256 << 20  # of experts on the host at once, as float32
Layers = Callable[[int], Any]  # layer of a parameter by number; 0 for one outside layers
SHOWN_PROBLEMS = 1000  # of a folder, in one error
# OWNER/NAME of the hub, but not folders that our configs and commands name.
HUB_NAME = re.compile(r"(?!models/|runs/)\w[\w.-]*/[\w.-]+")


def read_config(
    folder: str | pathlib.Path, *, field: str = "model.folder", **numerics: Any
) -> DecoderConfig:
    """Decoder that config.json describes; `numerics` are all other fields (dtype, remat).

    Raises:
        ConfigError: config.json is missing or wrong; names the setting `field` and the folder.
    """
    path = model_path(folder, field) / "config.json"
    if not path.exists():
        name, advice = folder, ""
        if pathlib.Path(folder).exists() or not HUB_NAME.fullmatch(str(folder)):
            name, advice = "OWNER/NAME", "; the embedded task's policy is dapo_jax:arithmetic_base"
        raise ConfigError(
            f"config.{field} = {str(folder)!r}: has no config.json, and nothing is downloaded "
            f"unasked: hf download {name} --local-dir {folder}{advice}"
        )
    return families.decoder_config(read_json(path, field), str(folder), field, **numerics)


def _check_names(
    tensors: Tensors, shapes: dict[str, tuple[int, ...]], config: DecoderConfig, field: str
) -> None:
    """Raises one `ConfigError` that names every missing, unknown or wrongly shaped tensor."""
    problems = list(tensors.problems)
    # A head may be there and stay unread: beside a tied embedding, or in a critic's folder.
    head, head_shape = weight_names.TOP_NAMES["head"], (config.vocab, config.embed)
    known = {head}
    if tensors.shapes.get(head, head_shape) != head_shape:
        problems.append(f"{head}: shape {tensors.shapes[head]}, expected {head_shape}")
    for path, shape in shapes.items():
        layer_shape = shape[weight_names.stacked_axes(path) :]
        expected = weight_names.tensor_shape(path, layer_shape, config)
        for name in dict.fromkeys(weight_names.published_names(path, config)):
            known.add(name)
            if name not in tensors.shapes:
                problems.append(f"{name}: missing")
                continue
            actual, dtype = tensors.shapes[name], tensors.dtypes[name]
            if actual != expected:
                problems.append(f"{name}: shape {actual}, expected {expected}")
            if dtype not in DTYPES:
                problems.append(f"{name}: dtype {dtype}, expected {', '.join(DTYPES)}")
    problems += [f"{name}: unknown" for name in sorted(tensors.shapes.keys() - known)]
    if problems:
        problems = list(dict.fromkeys(problems))
        rest = [f"and {len(problems) - SHOWN_PROBLEMS:,} more"] * (len(problems) > SHOWN_PROBLEMS)
        listed = "\n  ".join(problems[:SHOWN_PROBLEMS] + rest)
        raise ConfigError(f"config.{field} = '{tensors.named}': can't be read:\n  {listed}")


def _read_part(
    tensors: Tensors,
    place: weight_names.Part,
    path: str,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
) -> np.ndarray:
    """Part `index` of the parameter of `shape` that is published at `place`; float32."""
    name = place.name
    if place.expert >= 0:
        bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
        return tensors.read_expert(place, *(slice(*one) for one in bounds)).astype(np.float32)
    if len(tensors.shapes[name]) == 1 or path == "score":
        return tensors.read(name).reshape(shape)[index].astype(np.float32)
    inputs = summed_axes(path)
    cut = inputs or 1  # our dimensions before it are one of the published matrix, the rest another
    first = weight_names.merged_slice(index[:cut], shape[:cut])
    second = weight_names.merged_slice(index[cut:], shape[cut:])
    out = np.empty((first.stop - first.start, second.stop - second.start), np.float32)
    rows, columns, published = (second, first, out.T) if inputs else (first, second, out)
    step = max(1, BLOCK_BYTES // (4 * published.shape[1]))
    for start in range(rows.start, rows.stop, step):
        block = slice(start, min(start + step, rows.stop))
        target = slice(block.start - rows.start, block.stop - rows.start)
        published[target] = tensors.read(name, block, columns)
    sizes = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
    return out.reshape(sizes)


def _to_devices(
    shape: tuple[int, ...],
    layout: jax.sharding.Sharding,
    dtype: Any,
    read: Callable[[tuple], np.ndarray],
) -> jax.Array:
    """Sharded array; a part that several devices hold is read once."""
    parts: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:  # a tuple of slices; jax's type allows None too
        key = tuple((axis.start, axis.stop) for axis in index)
        if key not in parts:
            parts[key] = read(index).astype(dtype, copy=False)
        return parts[key]

    # Waiting keeps the next tensor from being read while this one is still on the host.
    return jax.make_array_from_callback(shape, layout, part).block_until_ready()


def _set_part(stack: jax.Array, part: jax.Array, *where: int) -> jax.Array:
    """Stack with `part` written at the first of its indices `where`."""
    at = (*where, *[0] * (stack.ndim - len(where)))
    part = part.reshape((1,) * (stack.ndim - part.ndim) + part.shape)
    return jax.lax.dynamic_update_slice(stack, part, at)


def _load_stack(
    tensors: Tensors,
    path: str,
    shape: tuple[int, ...],
    layout: jax.sharding.NamedSharding,
    dtype: Any,
    config: DecoderConfig,
) -> jax.Array:
    """Stack of layers, filled in place on the devices, one layer after another.

    Experts are read in blocks of at most EXPERT_BYTES, or one by one.
    """
    axes, parts = weight_names.stacked_axes(path), weight_names.published_parts(path, config)
    own = shape[axes:]  # of a published tensor, in our layout
    count = 1
    if axes > 1:
        count = max(n for n in range(1, shape[1] + 1) if shape[1] % n == 0 and _fits(n, own))
    part_shape = (count, *own) if axes > 1 else own
    spec = [None] * (axes > 1) + list(layout.spec[axes:])
    place = jax.sharding.NamedSharding(layout.mesh, jax.P(*spec))
    set_part = jax.jit(_set_part, donate_argnums=0, out_shardings=layout)
    stack = jnp.zeros(shape, dtype, device=layout)

    def read(index: tuple[slice, ...], first: int) -> np.ndarray:
        if axes == 1:
            return _read_part(tensors, parts[first], path, own, index)
        block = parts[first : first + count]
        return np.stack([_read_part(tensors, part, path, own, index[1:]) for part in block])

    for first in range(0, len(parts), count):
        part = _to_devices(part_shape, place, dtype, functools.partial(read, first=first))
        where = np.unravel_index(first, shape[:axes])
        stack = set_part(stack, part, *map(int, where)).block_until_ready()
    return stack


def _fits(count: int, shape: tuple[int, ...]) -> bool:
    return count == 1 or 4 * count * math.prod(shape) <= EXPERT_BYTES


def load_params(
    folder: str | pathlib.Path,
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    *,
    field: str = "model.folder",
    wanted: Callable[[str], bool] = lambda path: True,
    cast: bool = False,
    fresh_score: bool = False,
) -> Any:
    """Parameters of a model folder, each shard read straight onto its device.

    Args:
        wanted: selects by path the parameters to read; names and shapes of all are checked.
        cast: loads in the dtypes of a forward pass (`forward_dtype`) instead of float32.
        field: the setting that names the folder, for the error message.
        fresh_score: gives a scalar head of zeros to a folder without one (a policy's).

    Raises:
        ConfigError: tensors are missing, unknown, wrongly shaped or not finite.
    """
    tensors = Tensors(folder, field)
    boxed, shapes = abstract_params(config), weight_names.param_shapes(config)
    shardings = sharding.flatten(sharding.tree_shardings(mesh, boxed))
    arrays = {}
    if fresh_score and weight_names.TOP_NAMES["score"] not in tensors.shapes:
        arrays["score"] = jax.device_put(
            np.zeros(shapes.pop("score"), np.float32), shardings["score"]
        )
    _check_names(tensors, shapes, config, field)
    for path, shape in shapes.items():
        if not wanted(path):
            continue
        dtype = forward_dtype(path, config) if cast else jnp.float32
        if weight_names.below_stack(path):
            arrays[path] = _load_stack(tensors, path, shape, shardings[path], dtype, config)
            continue
        (place,) = weight_names.published_parts(path, config)
        arrays[path] = _to_devices(
            shape,
            shardings[path],
            dtype,
            lambda index, p=path, at=place, s=shape: _read_part(tensors, at, p, s, index),
        )
    if nonfinite_names := nonfinite.describe(arrays):
        problem = f"holds numbers that are not finite: {nonfinite_names}"
        raise ConfigError(f"config.{field} = '{tensors.named}': {problem}")
    return traverse_util.unflatten_dict(arrays, sep="/")


def read_layers(
    folder: str | pathlib.Path, paths: Iterable[str], config: DecoderConfig
) -> Iterator[tuple[str, Layers]]:
    """Parameters of a model folder on the host, float32; a layer is read when it is requested."""
    tensors, shapes = Tensors(folder), weight_names.param_shapes(config)

    def layer(path: str, parts: list[weight_names.Part], number: int) -> np.ndarray:
        shape = shapes[path][weight_names.stacked_axes(path) :]
        return _read_part(tensors, parts[number], path, shape, (slice(None),) * len(shape))

    for path in paths:
        yield path, functools.partial(layer, path, weight_names.published_parts(path, config))


def check_weights(folder: str | pathlib.Path, field: str = "model.folder") -> None:
    """Raises `ConfigError` where a folder's weights can't be opened; reads only their headers."""
    read_config(folder, field=field)
    if problems := Tensors(folder, field).problems:
        raise ConfigError(f"config.{field} = {str(folder)!r}: can't be read: {problems[0]}", field)


def stored_dtype(folder: str | pathlib.Path) -> str:
    """Dtype of a folder's weights; float32 where there are several."""
    dtypes = set(Tensors(folder).dtypes.values())
    return DTYPES.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32"


def fingerprint(folder: str | pathlib.Path, field: str = "model.folder") -> str:
    """Hash of a model folder, without reading all its gigabytes.

    It covers the shape that config.json describes, the names and sizes of the *.safetensors files,
    and all their bytes or, of files above 64 MB, the first 64 kB of every 4 MB.
    """
    shape = families.config_json(read_config(folder, field=field))
    digest = hashlib.sha256(repr(shape).encode())
    for path in weight_files(model_path(folder, field, weights=True), field):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, READ_BYTES if size <= READ_WHOLE else READ_EVERY):
                file.seek(start)
                digest.update(file.read(READ_BYTES))
    return digest.hexdigest()[:16]
