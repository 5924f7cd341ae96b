"""Adapter folders in the format of the PEFT library: one safetensors file and one config.

PEFT's A is [rank, in] and its B [out, rank], since a published matrix is [out, in]. Ours are
[in, rank] and [rank, out] with separate heads, stacked over layers.
"""

import functools
import hashlib
import math
import pathlib
import reprlib
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dapo_jax.model import param_paths
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.model.load_huggingface import DTYPES, list_problems
from dapo_jax.model.trainable import is_trained, without_adapters
from dapo_jax.runtime import sharding
from dapo_jax.runtime.text_files import check_regular, read_json
from dapo_jax.types.errors import ConfigError, require

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PUBLISHED: dict[str, str] = dict(zip(ADAPTER_NAMES, ("lora_A", "lora_B"), strict=True))
FIELD = "lora.folder"
MAX_PROBLEMS = 20
# Fields of a config that are read, or that do not change what a loaded adapter computes.
KNOWN = set(
    "peft_type r lora_alpha bias init_lora_weights target_modules exclude_modules task_type "
    "base_model_name_or_path revision auto_mapping inference_mode lora_dropout peft_version "
    "megatron_core qalora_group_size runtime_config use_rslora".split()
)
ONLY = {  # supported values, which leave the base as it is
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


def adapter_names(path: str, config: DecoderConfig) -> list[str]:
    """Return the names of an adapter's tensors in the file, first layer first."""
    matrix, _, part = path.rpartition("/")
    names = param_paths.matrix_names(f"{matrix}/kernel", config)
    ending = f"{PUBLISHED[part]}.weight"
    return [f"base_model.model.{name.removesuffix('weight')}{ending}" for name in names]


def _check_options(values: dict[str, Any]) -> list[str]:
    """Return the problems of a config: fields that would change what it computes."""

    def must(name: str, allowed: str) -> str:
        return f"{CONFIG}: {name} = {reprlib.repr(values.get(name))}: must be {allowed}"

    wrong = [
        must(name, " or ".join(map(repr, allowed)))
        for name, allowed in ONLY.items()
        if values.get(name, allowed[0]) not in allowed
    ]
    # Unknown fields may be options of a later version of PEFT.
    unknown = sorted(name for name in values.keys() - KNOWN if values[name])
    wrong += [f"{CONFIG}: {name} = {reprlib.repr(values[name])}: unsupported" for name in unknown]
    if type(values.get("use_rslora", False)) is not bool:
        wrong.append(must("use_rslora", "true or false"))
    for name, kinds in {"r": (int,), "lora_alpha": (int, float)}.items():
        value = values.get(name, 0)
        if type(value) not in kinds or not 0 < value < 1e6:
            wrong.append(must(name, "a number above 0"))
    return wrong


def _check_tensor(name: str, tensors: dict[str, np.ndarray], shape: tuple[int, ...]) -> str:
    """Return the problem of a tensor; empty if there is none."""
    if name not in tensors:
        return f"{name}: missing"
    array = tensors[name]
    if array.shape != shape:
        return f"{name}: shape {array.shape}, expected {shape}"
    if array.dtype.name not in DTYPES.values():
        return f"{name}: dtype {array.dtype.name}, expected {', '.join(DTYPES.values())}"
    finite = np.isfinite(array.astype(np.float32)).all()
    return "" if finite else f"{name}: holds numbers that are not finite"


def _targets(tensors: Collection[str], config: DecoderConfig) -> tuple[list[str], list[str]]:
    """Return the decoder's matrices with an adapter in the file, and the unknown tensors."""
    targets, unknown = [], set(tensors)
    for path in param_paths.param_shapes(without_adapters(config)):
        matrix, _, last = path.rpartition("/")
        if last == "kernel":
            names = {name for a in ADAPTER_NAMES for name in adapter_names(f"{matrix}/{a}", config)}
            if names & unknown:
                name = matrix.partition("/")[2].replace("delta/", "delta_").rpartition("/")[2]
                targets.append(name.removeprefix("expert_").removeprefix("shared_"))
            unknown -= names
    return list(dict.fromkeys(targets)), sorted(unknown)


def _read_folder(
    folder: str, config: DecoderConfig
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors of a folder, and its settings as those of a run's `lora`."""
    path = pathlib.Path(folder)
    values = read_json(path / CONFIG, FIELD)
    try:
        check_regular(path / WEIGHTS)
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError, AttributeError) as error:  # numpy has no such dtype
        raise ConfigError(f"config.{FIELD}: {path / WEIGHTS} can't be read: {error}") from None
    targets, unknown = _targets(tensors, config)
    _raise_problems(folder, _check_options(values) + [f"{name}: unknown" for name in unknown])
    settings = {"rank": values["r"], "alpha": values["lora_alpha"], "targets": ",".join(targets)}
    return tensors, settings | {"rslora": values.get("use_rslora", False)}


def read_settings(folder: str, config: DecoderConfig) -> dict[str, Any]:
    """Return rank, alpha and targets of a folder's adapters. Raises as `read_adapters`."""
    return _read_folder(folder, config)[1]


def read_adapters(folder: str, config: DecoderConfig) -> dict[str, np.ndarray]:
    """Return the adapters of a folder by path, in our layout; float32.

    Raises `ConfigError` if the folder has options that change the numbers, adapts another model, or
    was made with other settings than `config.adapters`.
    """
    tensors, settings = _read_folder(folder, config)
    adapters = config.adapters
    fits = (
        adapters is not None
        and adapters.rank == settings["rank"]
        and math.isclose(adapters.alpha, settings["alpha"])
        and adapters.rslora == settings["rslora"]
        and set(adapters.targets) == set(settings["targets"].split(","))
    )
    flags = " ".join(f"--config.lora.{name}={value}" for name, value in settings.items())
    require(fits, FIELD, folder, f"one of the run's own settings; this one has {flags}")
    arrays, problems = {}, []
    for path, whole in param_paths.param_shapes(config).items():
        if is_trained(path, config):
            shape, names = whole[param_paths.stacked_axes(path) :], adapter_names(path, config)
            published = param_paths.published_shape(path, shape)
            problems += filter(None, (_check_tensor(name, tensors, published) for name in names))
            if not problems:
                from_published = functools.partial(
                    param_paths.from_published, path, shape=shape, config=config
                )
                layers = [from_published(tensors[name].astype(np.float32)) for name in names]
                arrays[path] = np.stack(layers).reshape(whole)
    _raise_problems(folder, problems)
    return arrays


def _raise_problems(folder: str, problems: list[str]) -> None:
    """Raise one `ConfigError` with all problems of a folder, if there are any."""
    if problems:
        listed = list_problems(problems, MAX_PROBLEMS)
        raise ConfigError(f"config.{FIELD} = {folder!r}: can't be read:\n  {listed}", FIELD)


def load_adapters(folder: str, config: DecoderConfig, mesh: jax.sharding.Mesh) -> Any:
    """Return adapters of a folder on the mesh; float32. Raises as `read_adapters`."""
    layouts = sharding.flatten(sharding.tree_shardings(mesh, abstract_params(config)))
    arrays = {
        path: jax.make_array_from_callback(array.shape, layouts[path], array.__getitem__)
        for path, array in read_adapters(folder, config).items()
    }
    return unflatten_dict(arrays, sep="/")


def fingerprint(folder: str) -> str:
    """Return a hash of an adapter folder's files. Raises `ConfigError` if one can't be read."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG, WEIGHTS):
            digest.update((pathlib.Path(folder) / name).read_bytes())
    except OSError as error:
        raise ConfigError(f"config.{FIELD} = {folder!r}: can't be read: {error}", FIELD) from None
    return digest.hexdigest()[:16]
