"""Adapter folders as the library PEFT reads and writes them: one safetensors file, one config.

A published matrix is [out, in], so PEFT's A is [rank, in] and its B [out, rank]; ours are
[in, rank] and [rank, out] with heads apart, stacked over layers.
"""

import hashlib
import json
import math
import pathlib
import reprlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dapo_jax.model import save_huggingface, weight_names
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.model.published_tensors import DTYPES
from dapo_jax.model.trainable import is_trained, without_adapters
from dapo_jax.runtime import sharding
from dapo_jax.runtime.settings import ConfigError, check_regular, read_json, require

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WRITTEN = (".tmp*", CONFIG, WEIGHTS)  # .tmp* are those of the safetensors library
PUBLISHED: dict[str, str] = dict(zip(ADAPTER_NAMES, ("lora_A", "lora_B"), strict=True))
FIELD = "lora.folder"
SHOWN_PROBLEMS = 20
# Fields of a config that are read, or that change no number of a model that is loaded.
KNOWN = set(
    "peft_type r lora_alpha bias init_lora_weights target_modules exclude_modules task_type "
    "base_model_name_or_path revision auto_mapping inference_mode lora_dropout peft_version "
    "megatron_core qalora_group_size runtime_config".split()
)
ONLY = {  # the values that leave the base as it is
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


def adapter_names(path: str, config: DecoderConfig) -> list[str]:
    """Names of an adapter's tensors in the file, first layer first."""
    matrix, _, part = path.rpartition("/")
    names = weight_names.matrix_names(f"{matrix}/kernel", config)
    ending = f"{PUBLISHED[part]}.weight"
    return [f"base_model.model.{name.removesuffix('weight')}{ending}" for name in names]


def _inner(path: str, shape: tuple[int, ...]) -> int:
    """Size of the merged dimensions that an adapter's matrix is multiplied from."""
    return shape[0] if path.endswith(ADAPTER_NAMES[1]) else math.prod(shape[:-1])


def save_adapters(
    folder: pathlib.Path | None,
    trained: Collection[str],
    read: Callable[[str], Any],
    config: DecoderConfig,
    base: str,
) -> None:
    """Writes adapters in float32 and their config.

    Args:
        folder: None on processes that write nothing, but help to gather the tensors.
        trained: paths of the parameters that `read` returns whole.
        base: name of the model that they adapt.
    """
    adapters, tensors = config.adapters, {}
    assert adapters, "the caller writes adapters"
    for path in trained:
        layer_of = save_huggingface.layers_of(path, np.asarray(read(path), np.float32))
        for number, name in enumerate(adapter_names(path, config)):
            layer = layer_of(number)
            merged = layer.reshape(_inner(path, layer.shape), -1)
            tensors[name] = np.ascontiguousarray(merged.T)
    if folder is None:
        return
    save_huggingface.save_tensors(tensors, folder / WEIGHTS)
    alpha = adapters.scale * adapters.rank
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
        "use_rslora": False,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2))


def _check_options(values: dict[str, Any]) -> list[str]:
    """Problems of a config: fields that would change the numbers, by name."""

    def must(name: str, allowed: str) -> str:
        return f"{CONFIG}: {name} = {reprlib.repr(values.get(name))}: must be {allowed}"

    wrong = [
        must(name, " or ".join(map(repr, allowed)))
        for name, allowed in ONLY.items()
        if values.get(name, allowed[0]) not in allowed
    ]
    # Also those of a later version of PEFT.
    wrong += [must(name, "left out") for name in sorted(values.keys() - KNOWN) if values[name]]
    for name, kinds in {"r": (int,), "lora_alpha": (int, float)}.items():
        value = values.get(name, 0)
        if type(value) not in kinds or not 0 < value < 1e6:
            wrong.append(must(name, "a number above 0"))
    return wrong


def _check_tensor(name: str, tensors: dict[str, np.ndarray], shape: tuple[int, int]) -> str:
    """Problem of a tensor; empty without one."""
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
    """Matrices of the decoder that have an adapter in the file, and tensors of no such matrix."""
    targets, unknown = [], set(tensors)
    for path in weight_names.param_shapes(without_adapters(config)):
        matrix, _, last = path.rpartition("/")
        if last == "kernel":
            own = {name for a in ADAPTER_NAMES for name in adapter_names(f"{matrix}/{a}", config)}
            name = matrix.rpartition("/")[2].removeprefix("expert_")
            targets += [name] * bool(own & unknown)
            unknown -= own
    return targets, sorted(unknown)


def read_adapters(folder: str, config: DecoderConfig) -> dict[str, np.ndarray]:
    """Adapters of a folder by path, in our layout; float32.

    Raises:
        ConfigError: the folder can't be read, has options that change the numbers, adapts another
            model, or was made with other settings than `config.adapters`.
    """
    place = pathlib.Path(folder)
    values = read_json(place / CONFIG, FIELD)
    try:
        check_regular(place / WEIGHTS)
        tensors = load_file(place / WEIGHTS)
    except (OSError, SafetensorError, AttributeError) as error:  # numpy has no such dtype
        raise ConfigError(f"config.{FIELD}: {place / WEIGHTS} can't be read: {error}") from None
    targets, unknown = _targets(tensors, config)
    _refuse(folder, _check_options(values) + [f"{name}: unknown" for name in unknown])
    rank, alpha, own = values["r"], values["lora_alpha"], config.adapters
    flags = f"rank={rank} alpha={alpha} targets={','.join(targets)}".split()
    same = own and own.rank == rank and math.isclose(own.scale, alpha / rank)
    fits = bool(same and own and set(own.targets) == set(targets))
    asked = " ".join(f"--config.lora.{flag}" for flag in flags)
    require(fits, FIELD, folder, f"one of the run's own settings; this one has {asked}")
    arrays, problems = {}, []
    for path, whole in weight_names.param_shapes(config).items():
        if is_trained(path, config):
            shape = whole[weight_names.stacked_axes(path) :]
            inner, names = _inner(path, shape), adapter_names(path, config)
            published = math.prod(shape) // inner, inner
            problems += filter(None, (_check_tensor(name, tensors, published) for name in names))
            if not problems:
                stack = np.stack([tensors[name].astype(np.float32).T for name in names])
                arrays[path] = stack.reshape(whole)
    _refuse(folder, problems)
    return arrays


def _refuse(folder: str, problems: list[str]) -> None:
    """Raises one `ConfigError` with all problems of a folder; nothing without any."""
    if problems:
        rest = [f"and {len(problems) - SHOWN_PROBLEMS:,} more"] * (len(problems) > SHOWN_PROBLEMS)
        listed = "\n  ".join(problems[:SHOWN_PROBLEMS] + rest)
        raise ConfigError(f"config.{FIELD} = {folder!r}: can't be read:\n  {listed}", FIELD)


def load_adapters(folder: str, config: DecoderConfig, mesh: jax.sharding.Mesh) -> Any:
    """Adapters of a folder on the mesh; float32. Raises `ConfigError` as `read_adapters`."""
    places = sharding.flatten(sharding.tree_shardings(mesh, abstract_params(config)))
    arrays = {
        path: jax.make_array_from_callback(array.shape, places[path], array.__getitem__)
        for path, array in read_adapters(folder, config).items()
    }
    return unflatten_dict(arrays, sep="/")


def fingerprint(folder: str) -> str:
    """Hash of an adapter folder's two files. Raises `ConfigError` where one can't be read."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG, WEIGHTS):
            digest.update((pathlib.Path(folder) / name).read_bytes())
    except OSError as error:
        raise ConfigError(f"config.{FIELD} = {folder!r}: can't be read: {error}", FIELD) from None
    return digest.hexdigest()[:16]
