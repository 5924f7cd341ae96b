"""Loading of model folders in the Hugging Face layout, directly into the devices' shards.

Each published tensor is read in blocks of rows, one tensor after another, so the host holds one
tensor at a time (float32, its own devices' part). `save_huggingface.py` writes such folders.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open

from dapo_jax.model import param_paths
from dapo_jax.model.config_json import decoder_from_json, decoder_to_json
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.families import family_of
from dapo_jax.model.param_paths import TensorPart, forward_dtype, summed_axes
from dapo_jax.runtime import nonfinite, sharding
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.text_files import check_regular, read_json
from dapo_jax.types.errors import ConfigError

READ_WHOLE, READ_BYTES, READ_EVERY = 64 << 20, 64 << 10, 4 << 20  # of a fingerprint
BLOCK_BYTES = 32 << 20  # read at once
EXPERT_BYTES = 256 << 20  # of experts on the host at once, as float32
Layers = Callable[[int], Any]  # returns a parameter's layer by number; 0 outside layers
MAX_PROBLEMS = 1000  # of a folder that one error lists
# OWNER/NAME of the hub, but not folders that our configs and commands use.
HUB_NAME = re.compile(r"(?!models/|runs/)\w[\w.-]*/[\w.-]+")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # by their names in the files
OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.msgpack", "*.h5")
INDEX = "model.safetensors.index.json"
OTHER_MODELS = ("consolidated", "adapter_model")  # names of files beside unnamed weights
TEXT_PREFIXES = {  # in multimodal folders, with those of text models
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    **{name: name for name in ("lm_head.", "model.layers.", "model.embed_tokens", "model.norm.")},
}
# Layers that predict several tokens, and buffers that follow from config.json.
UNUSED = re.compile(
    r"mtp\..*|(.*\.)?(rotary_emb\w*\.\w*(inv_freq|_cached)|attn\.(masked_)?bias|position_ids)"
)
SHARED = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\..*")
FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")  # [X, out, in]


# --- MXFP4: the format of gpt-oss, FP4 numbers with one scale per block of 32 -----------------

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of a matrix's two tensors
HOLDS = "BF16"  # narrowest file dtype that represents every number exactly
PAIRS = 16  # bytes of a block, each with two numbers, the lower half first
_HALVES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1).astype(np.uint8)
_NUMBERS = _HALVES.view(jnp.float4_e2m1fn).astype(np.float32)  # by byte


def dequantise(
    blocks: UInt8[np.ndarray, "X O G 16"], scales: UInt8[np.ndarray, "X O G"]
) -> Float[np.ndarray, "X I O"]:
    """Return the matrices of a layer's experts; a scale of 255 means NaN."""
    powers = scales.view(jnp.float8_e8m0fnu).astype(np.float32)
    numbers = _NUMBERS[blocks].reshape(*scales.shape, -1) * powers[..., None]
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


# --- the files ------------------------------------------------------------------------------


def weight_files(folder: pathlib.Path, field: str) -> list[pathlib.Path]:
    """Return the files of a folder's weights, sorted by name. Raises `ConfigError`.

    It is what the index names, else `model.safetensors`, else all *.safetensors.
    """
    paths = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    named = f"config.{field} = {str(folder)!r}"
    if not paths:
        others = [path.name for ending in OTHER_WEIGHTS for path in sorted(folder.glob(ending))]
        beside = f" and can't read {others[0]}: save it as safetensors" if others else ""
        raise ConfigError(f"{named}: has no *.safetensors file{beside}", field)
    index = read_json(folder / INDEX, field) if (folder / INDEX).exists() else {}
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{named}: {INDEX}: weight_map must be an object", field)
    read = {*map(str, weight_map.values())} or {"model.safetensors"} & paths.keys()
    read = read or {name for name in paths if not name.startswith(OTHER_MODELS)}
    if missing := sorted(read - paths.keys()):
        many = f" and {len(missing) - 1:,} more" * (len(missing) > 1)
        raise ConfigError(f"{named}: lacks {missing[0]}{many}, which {INDEX} names", field)
    for name in sorted(read):
        try:
            check_regular(paths[name])
        except OSError as error:
            problem = f"{paths[name]} can't be read: {error}"
            raise ConfigError(f"config.{field}: {problem}", field) from None
    if others := sorted(paths.keys() - read):
        _report(f"{folder}: not read: {', '.join(others)}")
    return [paths[name] for name in sorted(read)]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a folder: where it is in the files, and what it is there."""

    file: pathlib.Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str
    scales: "Stored | None" = None  # of a tensor in MXFP4, whose `name` is that of its blocks
    expert: int = -1  # index in the first axis of a fused tensor; -1: it is not fused
    row: int = 0  # first row there

    def read(self, *index: slice) -> np.ndarray:
        """Return a part in the file's dtype; all of it without an index."""
        if self.expert < 0:
            return self._slice(self.name)[index or (...,)]
        rows, *columns = index or (slice(self.shape[0]),)
        rows = slice(self.row + (rows.start or 0), self.row + rows.stop)
        return self._slice(self.name)[(slice(self.expert, self.expert + 1), rows, *columns)][0]

    def read_expert(self, part: TensorPart, *index: slice) -> np.ndarray:
        """Return a part of an expert's matrix or vector in a fused tensor; MXFP4 as float32."""
        *rows, last = index
        expert = slice(part.expert, part.expert + 1)
        alternate = slice(part.first, None, part.step)
        columns = slice(part.step * last.start, part.step * last.stop)  # of all alternating ones
        if self.scales is None:
            return self.read(expert, *rows, columns)[0][..., alternate]
        blocks, scales = (
            stored._slice(stored.name)[expert, columns][:, alternate]
            for stored in (self, self.scales)
        )
        return dequantise(blocks, scales)[0][tuple(rows)]

    def _slice(self, name: str) -> Any:
        """Open the file again: the pages of an open file stay mapped and count as memory."""
        return safe_open(self.file, framework="numpy").get_slice(name)


class Tensors:
    """Tensors of a folder's safetensors files by name, and problems of the files."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        field: str = "model.folder",
        config: DecoderConfig | None = None,  # if set, fused experts are split as its family has it
    ):
        self.folder = folder
        self.problems: list[str] = []
        self.stored: dict[str, Stored] = {}
        self._skipped: list[str] = []
        for path in weight_files(model_path(folder, field, weights=True), field):
            self._open(path)
        self._keep_text()
        if self._skipped:
            parts = f"tensors that a text model does not read, such as {min(self._skipped)}"
            _report(f"{folder}: {len(self._skipped):,} {parts}, are skipped")
        for name in [name for name in self.stored if name.endswith(BLOCKS)]:
            self._join(name.removesuffix(BLOCKS))
        if config and "{}" in family_of(config.family).tensors.get("moe/expert_up/kernel", ""):
            for name in list(self.stored):
                self._split(name)

    def _open(self, path: pathlib.Path) -> None:
        try:
            file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            self.problems.append(f"{path.name}: {error}")
            return
        for name in file.keys():
            if UNUSED.fullmatch(name):
                self._skipped.append(name)
                continue
            if name in self.stored:
                self.problems.append(f"{name}: in {self.stored[name].file.name} and in {path.name}")
            part = file.get_slice(name)
            self.stored[name] = Stored(path, name, tuple(part.get_shape()), part.get_dtype())

    def _keep_text(self) -> None:
        """Name the tensors of a multimodal folder as in a text model's, without other parts."""
        kept = {
            name: ours + name.removeprefix(prefix)
            for name, (prefix, ours) in itertools.product(self.stored, TEXT_PREFIXES.items())
            if name.startswith(prefix)
        }
        if all(name == ours for name, ours in kept.items()):
            return
        self._skipped += self.stored.keys() - kept
        every, self.stored = self.stored, {ours: self.stored[name] for name, ours in kept.items()}
        for name, ours in kept.items():
            if self.stored[ours] is not every[name]:
                self.problems.append(f"{name}: beside {self.stored[ours].name}, which is the same")

    def _split(self, name: str) -> None:
        """Replace the fused matrices [X, out, in] of experts by single ones."""
        match, whole = FUSED_EXPERTS.fullmatch(name), self.stored[name]
        parts = ["gate", "up"] if match and match[2] == "gate_up" else ["down"]
        if match is None or len(whole.shape) != 3 or whole.shape[1] % len(parts):
            return
        del self.stored[name]
        height = whole.shape[1] // len(parts)
        for expert, (i, part) in itertools.product(range(whole.shape[0]), enumerate(parts)):
            self.stored[f"{match[1]}.{expert}.{part}_proj.weight"] = dataclasses.replace(
                whole, shape=(height, whole.shape[2]), expert=expert, row=i * height
            )

    def _join(self, name: str) -> None:
        """Replace blocks and scales of a tensor in MXFP4 by the tensor, if they fit."""
        blocks = self.stored[name + BLOCKS]
        scales = self.stored.get(name + SCALES, blocks)
        fits = len(blocks.shape) == 4 and blocks.shape[3] == PAIRS
        if not fits or scales.shape != blocks.shape[:3] or {blocks.dtype, scales.dtype} != {"U8"}:
            self.problems.append(f"{name}{BLOCKS}: must be U8 [X, O, G, 16], with scales [X, O, G]")
            return
        del self.stored[name + BLOCKS], self.stored[name + SCALES]
        if name in self.stored:
            self.problems.append(f"{name}: plain and in MXFP4")
        experts, columns, groups, _ = blocks.shape
        shape = experts, 2 * PAIRS * groups, columns
        self.stored[name] = dataclasses.replace(blocks, shape=shape, dtype=HOLDS, scales=scales)

    def equal(self, first: str, second: str) -> bool:
        """Return True if two matrices hold the same numbers; reads them in blocks of rows."""
        one, other = self.stored[first], self.stored[second]
        if one.shape != other.shape or not {one.dtype, other.dtype} <= DTYPES.keys():
            return False
        step = max(1, BLOCK_BYTES // (4 * one.shape[1]))
        blocks = [slice(i, min(i + step, one.shape[0])) for i in range(0, one.shape[0], step)]
        return all(np.array_equal(one.read(block), other.read(block)) for block in blocks)


@functools.cache  # once per folder
def _report(line: str) -> None:
    print(line, flush=True)


# --- parameters -----------------------------------------------------------------------------


def is_settings(values: dict[str, Any]) -> bool:
    """Return True if a config.json holds the settings of a run."""
    return "run_dir" in values


def export_command(run: str | pathlib.Path) -> str:
    """Return the command that exports a run, and the setting that names its output."""
    name = shlex.quote(str(run))
    out = shlex.quote(f"models/{pathlib.PurePosixPath(run).name}")
    return f"dapo-jax export {name} --out={out}"


def read_config(
    folder: str | pathlib.Path, *, field: str = "model.folder", **numerics: Any
) -> DecoderConfig:
    """Return the decoder that config.json describes; `numerics` are all other fields.

    Raises `ConfigError` that names the setting `field` and the folder.
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
    values = read_json(path, field)
    if is_settings(values):
        problem = f"is a run, not a model folder: export it first: {export_command(folder)}"
        raise ConfigError(f"config.{field} = {str(folder)!r}: {problem}", field)
    return decoder_from_json(values, str(folder), field, **numerics)


def _check_names(
    tensors: Tensors, shapes: dict[str, tuple[int, ...]], config: DecoderConfig, field: str
) -> None:
    """Raise one `ConfigError` that names every missing, unknown or wrongly shaped tensor."""
    problems, stored = list(tensors.problems), tensors.stored
    embedding, head = (param_paths.TOP_TENSORS[path] for path in ("embedding", "head"))
    known = {head}  # a critic does not read it
    is_tied = config.tie_embeddings and not config.scalar_head and head in stored
    is_tied &= embedding in stored and stored[embedding].shape == (config.vocab, config.embed)
    if is_tied and not tensors.equal(embedding, head):
        problems.append(f"{head}: differs from {embedding}, but tie_word_embeddings is true")
    for path, shape in shapes.items():
        for part in param_paths.published_parts(path, shape, config):
            known.add(part.name)
            if part.name not in stored:
                problems.append(f"{part.name}: missing")
                continue
            actual, dtype = stored[part.name].shape, stored[part.name].dtype
            if actual != part.shape:
                problems.append(f"{part.name}: shape {actual}, expected {part.shape}")
            if dtype not in DTYPES:
                problems.append(f"{part.name}: dtype {dtype}, expected {', '.join(DTYPES)}")
    unknown = sorted(stored.keys() - known)
    sharing = range(config.layers)[config.layers - config.sharing_layers :]
    shared = [n for n in unknown if (match := SHARED.fullmatch(n)) and int(match[1]) in sharing]
    if shared:
        parts = "keys and values of layers that share those of others, are skipped"
        _report(f"{tensors.folder}: {len(shared):,} tensors such as {shared[0]}, {parts}")
    problems += [f"{name}: unknown" for name in unknown if name not in shared]
    if problems:
        problems = list(dict.fromkeys(problems))
        listed = list_problems(problems, MAX_PROBLEMS)
        raise ConfigError(f"config.{field} = '{tensors.folder}': can't be read:\n  {listed}")


def list_problems(problems: list[str], limit: int) -> str:
    """Return the first problems, a line each, and the number of the others."""
    lines = problems[:limit]
    if len(problems) > limit:
        lines.append(f"and {len(problems) - limit:,} more")
    return "\n  ".join(lines)


def _read_part(
    tensors: Tensors,
    part: TensorPart,
    path: str,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    config: DecoderConfig,
) -> np.ndarray:
    """Return the slices `index` of the parameter of `shape` that `part` holds; float32."""
    stored, inputs = tensors.stored[part.name], summed_axes(path)
    if part.expert >= 0:
        bounds = [slice(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        return stored.read_expert(part, *bounds).astype(np.float32)
    reordered = param_paths.row_order(path, config) is not None
    if 1 in (len(shape), len(part.shape)) or reordered:
        whole = param_paths.from_published(path, stored.read(), shape, config)
        return whole[index].astype(np.float32)
    # Dimensions before `cut` are merged to one of the published matrix, the others to the other.
    cut = inputs or 1
    first = param_paths.merged_slice(index[:cut], shape[:cut])
    second = param_paths.merged_slice(index[cut:], shape[cut:])
    out = np.empty((first.stop - first.start, second.stop - second.start), np.float32)
    rows, columns, published = (second, first, out.T) if inputs else (first, second, out)
    step = max(1, BLOCK_BYTES // (4 * published.shape[1]))
    for start in range(rows.start, rows.stop, step):
        block = slice(start, min(start + step, rows.stop))
        target = slice(block.start - rows.start, block.stop - rows.start)
        published[target] = stored.read(block, columns)
    sizes = [len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True)]
    return out.reshape(sizes)


def _to_devices(
    shape: tuple[int, ...], layout: jax.sharding.Sharding, dtype: Any, read: Callable
) -> jax.Array:
    """Return a sharded array; a part that several devices hold is read once."""
    parts: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:  # a tuple of slices; jax's type allows None too
        key = tuple((axis.start, axis.stop) for axis in index)
        if key not in parts:
            parts[key] = read(index).astype(dtype, copy=False)
        return parts[key]

    # Wait, so that the next tensor is not read while this one is still on the host.
    return jax.make_array_from_callback(shape, layout, part).block_until_ready()


def _set_part(stack: jax.Array, part: jax.Array, *index: int) -> jax.Array:
    """Write `part` at the leading indices of a stack."""
    start = (*index, *[0] * (stack.ndim - len(index)))
    part = part.reshape((1,) * (stack.ndim - part.ndim) + part.shape)
    return jax.lax.dynamic_update_slice(stack, part, start)


def _load_param(
    tensors: Tensors,
    path: str,
    shape: tuple[int, ...],
    layout: jax.sharding.NamedSharding,
    dtype: Any,
    config: DecoderConfig,
) -> jax.Array:
    """Return a parameter; a stack of layers is filled in place on the devices, layer by layer.

    Experts are read in blocks of at most EXPERT_BYTES, or one by one.
    """
    axes, parts = param_paths.stacked_axes(path), param_paths.published_parts(path, shape, config)
    part_shape, spec, count = shape[axes:], list(layout.spec[axes:]), 1
    read_one = functools.partial(_read_part, tensors, path=path, shape=part_shape, config=config)
    if not axes:
        return _to_devices(shape, layout, dtype, lambda index: read_one(parts[0], index=index))
    if axes > 1:
        sizes = (n for n in range(1, shape[1] + 1) if shape[1] % n == 0)
        count = max(n for n in sizes if n == 1 or 4 * n * math.prod(part_shape) <= EXPERT_BYTES)
    part_layout = jax.sharding.NamedSharding(layout.mesh, jax.P(None, *spec))
    set_part = jax.jit(_set_part, donate_argnums=0, out_shardings=layout)
    stack = jnp.zeros(shape, dtype, device=layout)

    def read(index: tuple[slice, ...], block: list[TensorPart]) -> np.ndarray:
        arrays = [read_one(part, index=index[1:]) for part in block]
        return np.stack(arrays) if len(arrays) > 1 else arrays[0][None]

    for first in range(0, len(parts), count):
        read_block = functools.partial(read, block=parts[first : first + count])
        part = _to_devices((count, *part_shape), part_layout, dtype, read_block)
        index = np.unravel_index(first, shape[:axes])
        stack = set_part(stack, part, *map(int, index)).block_until_ready()
    return stack


def load_params(
    folder: str | pathlib.Path,
    config: DecoderConfig,
    mesh: jax.sharding.Mesh,
    *,
    field: str = "model.folder",  # the setting that names the folder, for the error message
    wanted: Callable[[str], bool] = lambda path: True,
    cast: bool = False,  # load in the dtypes of a forward pass (`forward_dtype`) instead of float32
    fresh_score: bool = False,  # add a scalar head of zeros if the folder has none (a policy's)
) -> Any:
    """Return the parameters of a model folder, each shard read directly onto its device.

    Raises `ConfigError` if tensors are missing, unknown, wrongly shaped or not finite.
    """
    tensors = Tensors(folder, field, config)
    boxed, shapes = abstract_params(config), param_paths.param_shapes(config)
    shardings = sharding.flatten(sharding.tree_shardings(mesh, boxed))
    arrays = {}
    if fresh_score and param_paths.TOP_TENSORS["score"] not in tensors.stored:
        arrays["score"] = jax.device_put(
            np.zeros(shapes.pop("score"), np.float32), shardings["score"]
        )
    _check_names(tensors, shapes, config, field)
    for path, shape in shapes.items():
        if not wanted(path):
            continue
        dtype = forward_dtype(path, config) if cast else jnp.float32
        arrays[path] = _load_param(tensors, path, shape, shardings[path], dtype, config)
    if nonfinite_names := nonfinite.describe(arrays):
        problem = f"holds numbers that are not finite: {nonfinite_names}"
        raise ConfigError(f"config.{field} = '{tensors.folder}': {problem}")
    return traverse_util.unflatten_dict(arrays, sep="/")


def read_layers(
    folder: str | pathlib.Path, paths: Iterable[str], config: DecoderConfig
) -> Iterator[tuple[str, Layers]]:
    """Yield parameters of a model folder as functions that read a layer to the host; float32."""
    tensors, shapes = Tensors(folder, config=config), param_paths.param_shapes(config)

    def layer(path: str, parts: list[TensorPart], number: int) -> np.ndarray:
        shape = shapes[path][param_paths.stacked_axes(path) :]
        return _read_part(tensors, parts[number], path, shape, (slice(None),) * len(shape), config)

    for path in paths:
        parts = param_paths.published_parts(path, shapes[path], config)
        yield path, functools.partial(layer, path, parts)


def check_weights(folder: str | pathlib.Path, field: str = "model.folder") -> None:
    """Raise `ConfigError` if a folder's weights can't be opened; reads only their headers."""
    read_config(folder, field=field)
    if problems := Tensors(folder, field).problems:
        raise ConfigError(f"config.{field} = {str(folder)!r}: can't be read: {problems[0]}", field)


def stored_dtype(folder: str | pathlib.Path) -> str:
    """Return the dtype of a folder's weights; float32 if there are several."""
    dtypes = {stored.dtype for stored in Tensors(folder).stored.values()}
    return DTYPES.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32"


def fingerprint(folder: str | pathlib.Path, field: str = "model.folder") -> str:
    """Return a hash of a model folder without reading all of it.

    It covers the decoder of config.json, names and sizes of the *.safetensors files, and their
    bytes; of files above 64 MB, only the first 64 kB of every 4 MB.
    """
    shape = decoder_to_json(read_config(folder, field=field))
    digest = hashlib.sha256(repr(shape).encode())
    for path in weight_files(model_path(folder, field, weights=True), field):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in range(0, size, READ_BYTES if size <= READ_WHOLE else READ_EVERY):
                file.seek(start)
                digest.update(file.read(READ_BYTES))
    return digest.hexdigest()[:16]
