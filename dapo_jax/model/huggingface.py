"""Model folders in the Hugging Face layout: read into device shards, and written back.

What a device shard needs is read in blocks of rows, one published tensor after another, so the
host holds one of them (float32, its own devices' part) beside the shards themselves.
"""

import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dapo_jax import sharding
from dapo_jax.model import families, names
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.settings import ConfigError

FINGERPRINT_BYTES = 1 << 20  # of either end of a file
BLOCK_BYTES = 32 << 20  # read at once
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as the files call them
INDEX = "model.safetensors.index.json"

# What a folder has beside weights and config.json, and an exported one keeps.
KEPT_FILES = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json merges.txt tokenizer.model chat_template.jinja chat_template.json"
).split()


def read_config(
    folder: str | pathlib.Path, *, field: str = "model.folder", **numerics: Any
) -> DecoderConfig:
    """The decoder that config.json describes; `numerics` are fields it does not (dtype, remat).

    Raises `ConfigError` naming the setting `field`, the folder and what it lacks.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.exists():
        raise ConfigError(
            f"config.{field} = {str(folder)!r}: has no config.json. A folder for the embedded "
            "task is made by: python -m dapo_jax.sft --config=configs/arithmetic_base.py"
        )
    return families.decoder_config(json.loads(path.read_text()), str(folder), field, **numerics)


# --- reading ------------------------------------------------------------------------------------


class _Tensors:
    """Every tensor of a folder's safetensors files, by name.

    Files are opened anew for each read: the pages of an open one stay mapped, and so count as
    memory of this process.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self.problems = folder, []
        self._files: dict[str, pathlib.Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        paths = sorted(folder.glob("*.safetensors"))
        for path in paths:
            self._open(path)
        if not paths:
            self.problems.append("no *.safetensors file")
        self._check_index()

    def _open(self, path: pathlib.Path) -> None:
        try:
            file = safe_open(path, framework="numpy")
        except SafetensorError as error:
            self.problems.append(f"{path.name}: {error}")
            return
        for name in file.keys():
            if name in self._files:
                self.problems.append(f"{name}: in {self._files[name].name} and in {path.name}")
            part = file.get_slice(name)
            self._files[name], self.shapes[name] = path, tuple(part.get_shape())
            self.dtypes[name] = part.get_dtype()

    def _check_index(self) -> None:
        """What the index promises must be where it says."""
        path = self.folder / INDEX
        places = json.loads(path.read_text())["weight_map"] if path.exists() else {}
        for name, file in places.items():
            if name not in self._files:
                self.problems.append(f"{name}: not in {file}, where {INDEX} has it")

    def read(self, name: str, *index: slice) -> np.ndarray:
        """That part of a tensor, in the file's dtype."""
        return safe_open(self._files[name], framework="numpy").get_slice(name)[index or (...,)]


def _check_names(
    tensors: _Tensors, shapes: dict[str, tuple[int, ...]], config: DecoderConfig, field: str
) -> None:
    """Raises one error that names every missing, unknown or wrongly made tensor."""
    problems = list(tensors.problems)
    # May be there unread: a tied embedding repeated, a critic's policy.
    known = {names.TOP_NAMES["head"]}
    for path, shape in shapes.items():
        wanted = names.published_shape(path, shape[1:] if names.below_stack(path) else shape)
        for name in names.published_names(path, config):
            known.add(name)
            if name not in tensors.shapes:
                problems.append(f"{name}: missing")
                continue
            found, dtype = tensors.shapes[name], tensors.dtypes[name]
            if found != wanted:
                problems.append(f"{name}: shape {found}, expected {wanted}")
            if dtype not in DTYPES:
                problems.append(f"{name}: dtype {dtype}, expected {', '.join(DTYPES)}")
    problems += [f"{name}: unknown" for name in sorted(tensors.shapes.keys() - known)]
    if problems:
        listed = "\n  ".join(dict.fromkeys(problems))
        raise ConfigError(f"config.{field} = '{tensors.folder}': can't be read:\n  {listed}")


def _read_part(
    tensors: _Tensors, name: str, path: str, shape: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    """The part `index` of the parameter of `shape` that is published as `name`; float32."""
    if len(tensors.shapes[name]) == 1 or path == "score":
        return tensors.read(name).reshape(shape)[index].astype(np.float32)
    inputs = names.contracted(path)
    cut = inputs or 1  # where our dimensions fall into those two of the published matrix
    first = names.merged_slice(index[:cut], shape[:cut])
    second = names.merged_slice(index[cut:], shape[cut:])
    out = np.empty((first.stop - first.start, second.stop - second.start), np.float32)
    rows, columns, published = (second, first, out.T) if inputs else (first, second, out)
    step = max(1, BLOCK_BYTES // (4 * published.shape[1]))
    for start in range(rows.start, rows.stop, step):
        block = slice(start, min(start + step, rows.stop))
        place = slice(block.start - rows.start, block.stop - rows.start)
        published[place] = tensors.read(name, block, columns)
    wanted = [len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True)]
    return out.reshape(wanted)


def _to_devices(
    shape: tuple[int, ...], place: jax.sharding.Sharding, read: Callable[[tuple], np.ndarray]
) -> jax.Array:
    """A sharded array; what several devices hold is read once."""
    parts: dict[tuple, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((one.start, one.stop) for one in index)
        if key not in parts:
            parts[key] = read(index)
        return parts[key]

    # Waiting keeps the next tensor from being read while this one is still on the host.
    return jax.make_array_from_callback(shape, place, part).block_until_ready()


def _set_layer(stack: jax.Array, layer: jax.Array, number: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, number, 0)


def _load_stack(
    tensors: _Tensors,
    path: str,
    shape: tuple[int, ...],
    place: jax.sharding.NamedSharding,
    config: DecoderConfig,
) -> jax.Array:
    """A stack of layers, filled in place on the devices, one layer after another."""
    of_layer = jax.sharding.NamedSharding(place.mesh, jax.P(*place.spec[1:]))
    set_layer = jax.jit(_set_layer, donate_argnums=0, out_shardings=place)
    stack = jnp.zeros(shape, jnp.float32, device=place)
    for number, name in enumerate(names.published_names(path, config)):
        layer = _to_devices(
            shape[1:],
            of_layer,
            lambda index, name=name: _read_part(tensors, name, path, shape[1:], index),
        )
        stack = set_layer(stack, layer, number).block_until_ready()
    return stack


def load_params(
    folder: str | pathlib.Path,
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    *,
    field: str = "model.folder",
    fresh_score: bool = False,
) -> Any:
    """Parameters of a model folder, float32, each shard read straight onto its device.

    Args:
        field: the setting that names the folder, for the error message.
        fresh_score: a folder without a scalar head (a policy's) gets one of zeros.
    """
    tensors = _Tensors(pathlib.Path(folder))
    boxed, shapes = abstract_params(config), names.param_shapes(config)
    places = traverse_util.flatten_dict(sharding.tree_shardings(mesh, boxed), sep="/")
    arrays = {}
    if fresh_score and names.TOP_NAMES["score"] not in tensors.shapes:
        arrays["score"] = jax.device_put(np.zeros(shapes.pop("score"), np.float32), places["score"])
    _check_names(tensors, shapes, config, field)
    for path, shape in shapes.items():
        if names.below_stack(path):
            arrays[path] = _load_stack(tensors, path, shape, places[path], config)
            continue
        (name,) = names.published_names(path, config)
        arrays[path] = _to_devices(
            shape,
            places[path],
            lambda index, p=path, n=name, s=shape: _read_part(tensors, n, p, s, index),
        )
    return traverse_util.unflatten_dict(arrays, sep="/")


def stored_dtype(folder: str | pathlib.Path) -> str:
    """The dtype of a folder's embedding, and so of its weights."""
    dtypes = _Tensors(pathlib.Path(folder)).dtypes
    return DTYPES.get(dtypes.get(names.TOP_NAMES["embedding"], ""), "float32")


def fingerprint(folder: str | pathlib.Path) -> str:
    """Tells one set of weights from another without reading gigabytes.

    From the names, sizes, first and last bytes of the *.safetensors files.
    """
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size}".encode() + file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:16]


# --- writing ------------------------------------------------------------------------------------


@jax.jit
def _layer(stack: jax.Array, number: int) -> jax.Array:
    return stack[number]


def _published(
    leaves: Iterable[tuple[str, Any]], config: DecoderConfig, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Every published tensor by name, made as it is asked for."""
    for path, leaf in leaves:
        for number, name in enumerate(names.published_names(path, config)):
            array = _layer(leaf, number) if names.below_stack(path) else leaf
            yield name, names.to_published(path, np.asarray(array)).astype(jnp.dtype(dtype))


def save_weights(
    folder: pathlib.Path,
    leaves: Iterable[tuple[str, Any]],
    config: DecoderConfig,
    dtype: str = "float32",
    max_shard_gb: float = 5.0,
) -> None:
    """Writes safetensors files and, where there are several, their index.

    The host holds one file's tensors at a time.

    Args:
        leaves: paths and arrays of all parameters; consumed one by one.
        max_shard_gb: a file ends before it would grow beyond this (10^9 bytes).
    """
    files: list[list[str]] = []
    part: dict[str, np.ndarray] = {}
    total = size = 0

    def write() -> None:
        path = folder / f"{len(files)}.unfinished"
        save_file(part, path, metadata={"format": "pt"})
        files.append(list(part))
        part.clear()

    for name, tensor in _published(leaves, config, dtype):
        if part and size + tensor.nbytes > max_shard_gb * 1e9:
            write()
            size = 0
        part[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    places = {}
    for i, written in enumerate(files):
        count = f"-{i + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = f"model{count}.safetensors"
        (folder / f"{i}.unfinished").rename(folder / file)
        places |= dict.fromkeys(written, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def flatten(params: Any) -> Iterable[tuple[str, Any]]:
    """Paths and arrays of a parameter tree."""
    return traverse_util.flatten_dict(params, sep="/").items()


def save_folder(
    folder: str | pathlib.Path, params: Any, config: DecoderConfig, end_ids: tuple[int, ...]
) -> None:
    """Writes a new model: weights (float32), config.json and generation_config.json."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, flatten(params), config)
    ids = {"eos_token_id": list(end_ids), "pad_token_id": 0}
    values = families.config_json(config) | {"torch_dtype": "float32"} | ids
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))


def save_settings_of(source: str | pathlib.Path, folder: pathlib.Path, dtype: str) -> None:
    """Beside weights in `dtype`: the config.json, tokenizer and generation settings of `source`."""
    source = pathlib.Path(source)
    values = json.loads((source / "config.json").read_text())
    values["dtype" if "dtype" in values else "torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    for name in KEPT_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder)
