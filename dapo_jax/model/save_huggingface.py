"""Model folders in the Hugging Face layout, written; `huggingface.py` reads them."""

import collections
import functools
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from dapo_jax.model import families, weight_names
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.load_huggingface import INDEX, Layers
from dapo_jax.runtime.nonfinite import NotFinite
from dapo_jax.runtime.sharding import to_host

# What a folder has beside weights and config.json, and an exported one keeps.
KEPT_FILES = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json "
    "added_tokens.json vocab.json merges.txt tokenizer.model chat_template.jinja chat_template.json"
).split()
# Names of all that is written into a folder; .tmp* is of the safetensors library.
WRITTEN = ("*.unfinished", ".tmp*", "model*.safetensors", INDEX, "config.json", *KEPT_FILES)


@jax.jit
def _layer(stack: jax.Array, number: int) -> jax.Array:
    return stack[number]


def _published(
    leaves: Iterable[tuple[str, Layers]], config: DecoderConfig, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Every published tensor by name, made as it is asked for."""
    for path, layer in leaves:
        for number, name in enumerate(weight_names.published_names(path, config)):
            with np.errstate(over="ignore"):  # which the next line says better
                array = weight_names.to_published(path, to_host(layer(number))).astype(
                    jnp.dtype(dtype)
                )
            if not np.isfinite(array).all():
                raise NotFinite(f"{name} holds numbers that are not finite as {dtype}: not written")
            yield name, array


def save_weights(
    folder: pathlib.Path | None,
    leaves: Iterable[tuple[str, Layers]],
    config: DecoderConfig,
    dtype: str = "float32",
    max_shard_gb: float = 5.0,
) -> None:
    """Writes safetensors files and, where there are several, their index.

    The host holds one file's tensors at a time.

    Args:
        folder: None where another process writes: only together can they gather the tensors.
        leaves: paths of all parameters and what gives their layers; consumed one by one.
        max_shard_gb: a file ends before it would grow beyond this (10^9 bytes).
    """
    tensors = _published(leaves, config, dtype)
    if folder is None:
        collections.deque(tensors, maxlen=0)
        return
    files: list[list[str]] = []
    part: dict[str, np.ndarray] = {}
    total = size = 0

    def write() -> None:
        path = folder / f"{len(files)}.unfinished"
        path.touch()
        mode = path.stat().st_mode  # the library's own is 0600, whatever the umask allows
        save_file(part, path, metadata={"format": "pt"})
        path.chmod(mode)
        files.append(list(part))
        part.clear()

    for name, tensor in tensors:
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


def layers_of(path: str, array: Any) -> Layers:
    """What gives the layers of a parameter that is there whole."""
    return functools.partial(_layer, array) if weight_names.below_stack(path) else lambda _: array


def flatten(params: Any) -> Iterator[tuple[str, Layers]]:
    """Paths of a parameter tree and what gives their layers."""
    for path, array in traverse_util.flatten_dict(params, sep="/").items():
        yield path, layers_of(path, array)


def save_folder(
    folder: str | pathlib.Path | None, params: Any, config: DecoderConfig, end_ids: tuple[int, ...]
) -> None:
    """Writes a new model: weights (float32), config.json and generation_config.json.

    Without a folder this process only takes part in gathering them.
    """
    if folder is None:
        save_weights(None, flatten(params), config)
        return
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
            shutil.copyfile(source / name, folder / name)
