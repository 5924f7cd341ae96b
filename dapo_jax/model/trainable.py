"""Which parameters are trained: all, those of the last layers, or low-rank adapters (LoRA).

The others are frozen: they have no gradient, no moments and no place in a checkpoint, and the
sampler keeps one copy of them.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from dapo_jax.config.experiment import Lora
from dapo_jax.model.decoder import (
    ADAPTER_NAMES,
    Adapters,
    DecoderConfig,
    abstract_params,
    init_params,
)
from dapo_jax.runtime import sharding
from dapo_jax.runtime.settings import require

MATRICES = ("query", "key", "value", "out", "gate", "up", "down")  # of a layer


def is_trained(path: str, config: DecoderConfig) -> bool:
    """Whether the parameter at `layers/query/kernel` or the like takes a gradient."""
    if config.adapters:
        return path.endswith(ADAPTER_NAMES)
    return not path.startswith("frozen_layers/")


def join(*trees: Any) -> Any:
    """One parameter tree of several; what is in two is taken from the later."""
    flat = {}
    for tree in trees:
        flat |= flatten_dict(tree)
    return unflatten_dict(flat)


def without(tree: Any, other: Any) -> Any:
    """What of a parameter tree is not in the other."""
    left_out = flatten_dict(other)
    flat = {path: leaf for path, leaf in flatten_dict(tree).items() if path not in left_out}
    return unflatten_dict(flat)


def frozen_layers(share: float, layers: int) -> int:
    """How many of the first layers are frozen. Raises `ConfigError` where a share freezes none."""
    frozen = math.floor(share * layers + 1e-9)
    require(
        frozen < layers and (frozen > 0 or share == 0),
        "model.freeze_layers",
        share,
        f"0, or from 1/{layers} to below 1 for a policy of {layers} layers",
    )
    return frozen


def choose_trained(config: DecoderConfig, freeze_layers: float, lora: Lora) -> DecoderConfig:
    """The decoder with what those settings leave to train. Raises `ConfigError`."""
    config = dataclasses.replace(config, frozen_layers=frozen_layers(freeze_layers, config.layers))
    targets = tuple(name.strip() for name in lora.targets.split(","))
    allowed = f"some of {','.join(MATRICES)}, comma-separated, each once"
    known = set(targets) <= set(MATRICES) and len(set(targets)) == len(targets)
    require(known, "lora.targets", lora.targets, allowed)
    if not lora.rank:
        return config
    adapters = Adapters(lora.rank, lora.alpha / lora.rank, targets)
    return dataclasses.replace(config, adapters=adapters)


def without_adapters(config: DecoderConfig) -> DecoderConfig:
    """The decoder as a model folder holds it."""
    return dataclasses.replace(config, adapters=None)


def fresh_adapters(config: DecoderConfig, mesh: jax.sharding.Mesh, seed: int) -> Any:
    """Adapters that change nothing yet: A is random, B is zero."""

    def adapters_of(params: Any) -> Any:
        flat = flatten_dict(params, sep="/")
        return unflatten_dict({k: v for k, v in flat.items() if is_trained(k, config)}, sep="/")

    places = adapters_of(sharding.tree_shardings(mesh, abstract_params(config)))

    def make() -> Any:  # what is not asked for is never computed
        return adapters_of(sharding.unbox(init_params(config, jax.random.key(seed))))

    return jax.jit(make, out_shardings=places)()


def merge(kernel: np.ndarray, down: np.ndarray, up: np.ndarray, adapters: Adapters) -> np.ndarray:
    """One layer's W + scale A B, for a folder without adapters."""
    return kernel + np.float32(adapters.scale) * np.tensordot(down, up, 1)
