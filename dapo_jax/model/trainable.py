"""Trained and frozen parameters: all, only the last layers, or only low-rank adapters (LoRA).

Frozen parameters have no gradient and no moments and are not part of a checkpoint. The sampler
keeps one copy of them.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from dapo_jax.model.decoder import DecoderConfig, abstract_params, init_params
from dapo_jax.model.layers import ADAPTER_NAMES, Adapters
from dapo_jax.runtime import sharding
from dapo_jax.types.errors import require

MATRICES = ("query", "key", "value", "out", "gate", "up", "down")  # of a layer
_INPUTS = {False: ("qkv", "z", "b", "a"), True: ("qkvz", "ba")}  # of a delta-net layer, if fused


def is_trained(path: str, config: DecoderConfig) -> bool:
    """Return True if the parameter at a path such as `layers/query/kernel` has a gradient."""
    if config.adapters:
        return path.endswith(ADAPTER_NAMES)
    return not path.startswith("frozen_layers/")


def join(*trees: Any) -> Any:
    """Return the union of parameter trees; later trees win."""
    flat = {}
    for tree in trees:
        flat |= flatten_dict(tree)
    return unflatten_dict(flat)


def without(tree: Any, other: Any) -> Any:
    """Return a parameter tree without the paths of another."""
    left_out = flatten_dict(other)
    flat = {path: leaf for path, leaf in flatten_dict(tree).items() if path not in left_out}
    return unflatten_dict(flat)


def frozen_layers(fraction: float, layers: int) -> int:
    """Return the number of frozen first layers. Raises `ConfigError` if a fraction freezes none."""
    frozen = math.floor(fraction * layers + 1e-9)
    require(
        frozen < layers and (frozen > 0 or fraction == 0),
        "model.freeze_layers",
        fraction,
        f"0, or from 1/{layers} to below 1 for a policy of {layers} layers",
    )
    return frozen


def _matrices(config: DecoderConfig) -> tuple[str, ...]:
    """Return the names of matrices that can have adapters."""
    delta = (*_INPUTS[config.delta_fused], "out") if config.recurrent else ()
    return (*MATRICES, *(f"delta_{name}" for name in delta))


def choose_trained(config: DecoderConfig, freeze_layers: float, lora: Any) -> DecoderConfig:
    """Return the decoder with frozen layers and adapters (`config.lora`). Raises `ConfigError`."""
    fits = not freeze_layers or not config.mixes_layers
    require(fits, "model.freeze_layers", freeze_layers, f"0 for policies of {config.family!r}")
    config = dataclasses.replace(config, frozen_layers=frozen_layers(freeze_layers, config.layers))
    targets = tuple(name.strip() for name in lora.targets.split(","))
    names = _matrices(config)
    allowed = f"some of {','.join(names)}, comma-separated, each once"
    known = set(targets) <= set(names) and len(set(targets)) == len(targets)
    require(known, "lora.targets", lora.targets, allowed)
    if not lora.rank:
        return config
    scale = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
    adapters = Adapters(lora.rank, scale, targets, lora.rslora)
    return dataclasses.replace(config, adapters=adapters)


def without_adapters(config: DecoderConfig) -> DecoderConfig:
    """Return the decoder without adapters, as in a model folder."""
    return dataclasses.replace(config, adapters=None)


def parameter_count(config: DecoderConfig) -> int:
    """Return the number of parameters of a decoder without its adapters."""
    shapes = abstract_params(without_adapters(config))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def fresh_adapters(config: DecoderConfig, mesh: jax.sharding.Mesh, seed: int) -> Any:
    """Return new adapters without effect yet: A is random, B is zero."""

    def adapters_of(params: Any) -> Any:
        flat = flatten_dict(params, sep="/")
        return unflatten_dict({k: v for k, v in flat.items() if is_trained(k, config)}, sep="/")

    shardings = adapters_of(sharding.tree_shardings(mesh, abstract_params(config)))

    def make() -> Any:  # XLA drops the computation of all other parameters
        return adapters_of(sharding.unbox(init_params(config, jax.random.key(seed))))

    return jax.jit(make, out_shardings=shardings)()


def merge(
    adapters: Adapters, kernel: Callable, down: Callable, up: Callable, number: int
) -> np.ndarray:
    """Return the merged matrix W + scale A B of a layer or an expert, for export."""
    change = np.tensordot(down(number), up(number), 1)
    return kernel(number) + np.float32(adapters.scale) * change
