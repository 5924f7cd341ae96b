"""Name table between parameter paths and published tensors, with shapes and layouts.

A path such as `layers/query/kernel` is a stack [L, ...] of L published tensors, and one with
experts a stack [L, X, ...] of L * X, layer after layer; any other is one tensor. Published matrices
are [out, in] with heads merged; ours are [in, out] with heads apart. Experts with biases are fused:
a published tensor [X, in, out] has all of a layer, and gate and up take turns in its last axis.
"""

import math
from typing import NamedTuple

import numpy as np

from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.param_paths import has_experts, summed_axes
from dapo_jax.runtime.sharding import flatten, unbox

# our path below a stack of layers: published name below `model.layers.N`
LAYER_NAMES = {
    "attention_norm/scale": "input_layernorm.weight",
    "query/kernel": "self_attn.q_proj.weight",
    "query/bias": "self_attn.q_proj.bias",
    "query_norm/scale": "self_attn.q_norm.weight",
    "key/kernel": "self_attn.k_proj.weight",
    "key/bias": "self_attn.k_proj.bias",
    "key_norm/scale": "self_attn.k_norm.weight",
    "value/kernel": "self_attn.v_proj.weight",
    "value/bias": "self_attn.v_proj.bias",
    "out/kernel": "self_attn.o_proj.weight",
    "out/bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "moe/router/kernel": "mlp.gate.weight",
    "moe/expert_gate/kernel": "mlp.experts.{}.gate_proj.weight",
    "moe/expert_up/kernel": "mlp.experts.{}.up_proj.weight",
    "moe/expert_down/kernel": "mlp.experts.{}.down_proj.weight",
    "gate/kernel": "mlp.gate_proj.weight",
    "gate/bias": "mlp.gate_proj.bias",
    "up/kernel": "mlp.up_proj.weight",
    "up/bias": "mlp.up_proj.bias",
    "down/kernel": "mlp.down_proj.weight",
    "down/bias": "mlp.down_proj.bias",
}
# ... of layers that are normed after attention and MLP, too
OUT_NORM_NAMES = {
    "attention_out_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
}
# ... of experts with biases
FUSED_NAMES = {
    "moe/router/kernel": "mlp.router.weight",
    "moe/router/bias": "mlp.router.bias",
    "moe/expert_gate/kernel": "mlp.experts.gate_up_proj",
    "moe/expert_gate/bias": "mlp.experts.gate_up_proj_bias",
    "moe/expert_up/kernel": "mlp.experts.gate_up_proj",
    "moe/expert_up/bias": "mlp.experts.gate_up_proj_bias",
    "moe/expert_down/kernel": "mlp.experts.down_proj",
    "moe/expert_down/bias": "mlp.experts.down_proj_bias",
}
IN_TURN = ("expert_gate", "expert_up")  # in the last axis of a fused tensor
TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
}


class Part(NamedTuple):
    """Part of a published tensor that is one of our matrices or vectors."""

    name: str
    expert: int = -1  # place in the first axis of a fused tensor; -1: it is not fused
    first: int = 0  # place in its last axis ...
    step: int = 1  # ... and every so many from there on


def param_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by path."""
    abstract = flatten(unbox(abstract_params(config)))
    return {path: leaf.shape for path, leaf in abstract.items()}


def below_stack(path: str) -> str | None:
    """Path below a stack of layers; None of a parameter outside layers."""
    stack, _, below = path.partition("/")
    return below if stack in ("layers", "frozen_layers") else None


def published_names(path: str, config: DecoderConfig) -> list[str]:
    """Names of the published tensors of a parameter, first layer first; fused ones repeat."""
    names = LAYER_NAMES | (OUT_NORM_NAMES if config.out_norms else {})
    return _names_by(names | (FUSED_NAMES if config.expert_bias else {}), path, config)


def matrix_names(path: str, config: DecoderConfig) -> list[str]:
    """Names of a parameter's matrices where none is fused, as adapters of them are called."""
    return _names_by(LAYER_NAMES, path, config)


def _names_by(names: dict[str, str], path: str, config: DecoderConfig) -> list[str]:
    below = below_stack(path)
    if below is None:
        return [TOP_NAMES[path]]
    frozen = path.startswith("frozen_layers")
    numbers = range(config.frozen_layers) if frozen else range(config.frozen_layers, config.layers)
    experts = range(config.experts if has_experts(path) else 1)
    return [f"model.layers.{i}.{names[below].format(e)}" for i in numbers for e in experts]


def is_fused(path: str, config: DecoderConfig) -> bool:
    """True for a parameter whose experts are in one published tensor a layer."""
    return config.expert_bias and has_experts(path)


def fused_paths(path: str, config: DecoderConfig) -> list[str]:
    """Paths that a published tensor holds in turn, `path` among them."""
    for name in IN_TURN:
        if is_fused(path, config) and f"/{name}/" in path:
            return [path.replace(name, other) for other in IN_TURN]
    return [path]


def published_parts(path: str, config: DecoderConfig) -> list[Part]:
    """Places of a parameter's matrices or vectors in the folder, first layer first."""
    names = published_names(path, config)
    if not is_fused(path, config):
        return [Part(name) for name in names]
    paths = fused_paths(path, config)
    place = paths.index(path), len(paths)
    return [Part(name, number % config.experts, *place) for number, name in enumerate(names)]


def tensor_shape(path: str, shape: tuple[int, ...], config: DecoderConfig) -> tuple[int, ...]:
    """Shape of the published tensor of which a matrix or vector of `shape` is a part."""
    if not is_fused(path, config):
        return published_shape(path, shape)
    return (config.experts, *shape[:-1], shape[-1] * len(fused_paths(path, config)))


def stacked_axes(path: str) -> int:
    """Number of leading axes of a parameter that count published tensors."""
    return 0 if below_stack(path) is None else 1 + has_experts(path)


def published_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Published shape of a parameter that has `shape`, without the layer dimension, here."""
    inputs = summed_axes(path)
    if inputs:
        return (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
    if path.endswith("bias"):
        return (math.prod(shape),)
    return (1, *shape) if path == "score" else shape


def merged_slice(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    """Slice of merged dimensions `shape` that is the part `index` of them.

    Only the first dimension may be cut; the mesh never cuts another.
    """
    inner = math.prod(shape[1:])
    start, stop, _ = index[0].indices(shape[0])
    return slice(start * inner, stop * inner)


def to_published(path: str, array: np.ndarray) -> np.ndarray:
    """Array of one layer, or of a parameter outside layers, in the published layout."""
    rows, *columns = published_shape(path, array.shape)
    if summed_axes(path):
        return np.ascontiguousarray(array.reshape(*columns, rows).T)
    return np.ascontiguousarray(array.reshape(rows, *columns))
