"""Saving of model folders in the Hugging Face layout; `load_huggingface.py` reads them."""

import functools
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from dapo_jax.model import param_paths, peft_adapters
from dapo_jax.model.config_json import decoder_to_json, text_part
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.families import family_of
from dapo_jax.model.load_huggingface import INDEX, Layers
from dapo_jax.model.param_paths import TensorPart
from dapo_jax.runtime.nonfinite import NotFinite
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.types.structs import present

# Files that an exported folder keeps in addition to weights and config.json.
KEPT_FILES = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json merges.txt tokenizer.model chat_template.jinja "
    "chat_template.json additional_chat_templates/*.jinja"
).split()
# All files written into a folder; the safetensors library writes .tmp*.
WRITTEN = ("*.unfinished", ".tmp*", "model*.safetensors", INDEX, "config.json", *KEPT_FILES)


@functools.partial(jax.jit, static_argnames="axes")
def _layer(stack: jax.Array, number: int, axes: int) -> jax.Array:
    """Return one published tensor of a stack; the leading `axes` count tensors."""
    return stack[jnp.unravel_index(number, stack.shape[:axes])]


def published_tensors(
    leaves: Iterable[tuple[str, Layers]], config: DecoderConfig, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every published tensor with its name, converted one by one. Raises `NotFinite`."""
    shapes = param_paths.param_shapes(config)
    waiting: dict[str, dict[TensorPart, Callable]] = {}  # parts of fused tensors that are not whole
    for path, layer in leaves:
        for number, part in enumerate(param_paths.published_parts(path, shapes[path], config)):
            parts = waiting.setdefault(part.name, {})
            parts[part] = functools.partial(layer, number)
            if len(parts) < (1 if part.expert < 0 else config.experts * part.step):
                continue
            with np.errstate(over="ignore"):  # NotFinite below is clearer
                array = _join(path, waiting.pop(part.name), config, jnp.dtype(dtype))
            if not np.isfinite(array).all():
                problem = f"holds numbers that are not finite as {dtype}: not written"
                raise NotFinite(f"{part.name} {problem}")
            yield part.name, array


def _join(
    path: str, parts: dict[TensorPart, Callable], config: DecoderConfig, dtype: Any
) -> np.ndarray:
    """Return a published tensor; fused experts [X, ...] alternate along its last axis."""
    first, *_ = parts
    if first.expert < 0:
        return param_paths.to_published(path, to_host(parts[first]()), config).astype(dtype)
    array = np.empty(first.shape, dtype)
    for part, read in parts.items():
        array[part.expert, ..., part.first :: part.step] = to_host(read())
    return array


def save_tensors(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """Write a safetensors file with the mode of any new file."""
    path.touch()
    mode = path.stat().st_mode  # the library sets 0600 regardless of the umask
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def save_weights(
    folder: pathlib.Path,
    leaves: Iterable[tuple[str, Layers]],
    config: DecoderConfig,
    dtype: str = "float32",
    max_shard_gb: float = 5.0,  # largest size of a file, in 10^9 bytes
) -> None:
    """Write the published tensors. Raises `NotFinite` if numbers overflow in `dtype`."""
    write_tensors(folder, published_tensors(leaves, config, dtype), max_shard_gb)


def write_tensors(
    folder: pathlib.Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_gb: float = 5.0
) -> None:
    """Write safetensors files and, if there are several, their index.

    The host holds one file's tensors at a time.
    """
    files: list[list[str]] = []
    part: dict[str, np.ndarray] = {}
    total = size = 0

    def write() -> None:
        save_tensors(part, folder / f"{len(files)}.unfinished")
        files.append(list(part))
        part.clear()

    for name, tensor in tensors:
        if part and size + tensor.nbytes > max_shard_gb * 1e9:
            write()
            size = 0
        part[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    file_names = {}
    for i, written in enumerate(files):
        count = f"-{i + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = f"model{count}.safetensors"
        (folder / f"{i}.unfinished").rename(folder / file)
        file_names |= dict.fromkeys(written, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_names.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def layers_of(path: str, array: Any) -> Layers:
    """Return a function that returns single layers of a parameter in memory."""
    axes = param_paths.stacked_axes(path)
    return functools.partial(_layer, array, axes=axes) if axes else lambda _: array


def flatten(params: Any) -> Iterator[tuple[str, Layers]]:
    """Yield the paths of a parameter tree with functions that return their layers."""
    for path, array in traverse_util.flatten_dict(params, sep="/").items():
        yield path, layers_of(path, array)


def save_folder(
    folder: str | pathlib.Path, params: Any, config: DecoderConfig, end_ids: tuple[int, ...]
) -> None:
    """Write a new model folder: float32 weights, config.json and generation_config.json."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder, flatten(params), config)
    ids = {"eos_token_id": list(end_ids), "pad_token_id": 0}
    values = decoder_to_json(config) | {"torch_dtype": "float32"} | ids
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))


def save_adapters(
    folder: pathlib.Path,
    trained: Collection[str],  # paths of the parameters that `read` returns whole
    read: Callable[[str], Any],
    config: DecoderConfig,
    base: str,  # name of the adapted model
) -> None:
    """Write adapters in float32 and their config, in the format of the PEFT library."""
    tensors = {}
    adapters = present(config.adapters, "adapters")
    for path in trained:
        layer = layers_of(path, np.asarray(read(path), np.float32))
        for number, name in enumerate(peft_adapters.adapter_names(path, config)):
            tensors[name] = param_paths.to_published(path, layer(number), config)
    save_tensors(tensors, folder / peft_adapters.WEIGHTS)
    alpha = adapters.alpha
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": round(alpha) if math.isclose(alpha, round(alpha)) else alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": adapters.rslora,
    }
    (folder / peft_adapters.CONFIG).write_text(json.dumps(values, indent=2))


def save_settings_of(source: str | pathlib.Path, folder: pathlib.Path, dtype: str) -> None:
    """Copy config.json (with `dtype`), tokenizer and generation settings of folder `source`."""
    source = model_path(source)
    values = json.loads((source / "config.json").read_text())
    if "text_config" in values:  # only the text model is written
        values = text_part(values)
        family = family_of(values["model_type"])
        values["architectures"] = [f"{family.class_name}ForCausalLM"]
    values.pop("_name_or_path", None)  # a local path of its author
    values.pop("quantization_config", None)  # the written weights are not quantised
    names = {"dtype", "torch_dtype"}  # the newer and the older name
    values |= dict.fromkeys(names & values.keys() or {"torch_dtype"}, dtype)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    for path in (path for pattern in KEPT_FILES for path in source.glob(pattern)):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
