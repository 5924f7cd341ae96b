"""Parameters by path: shapes, dtypes, and the published tensors that hold them.

A path such as `layers/query/kernel` is a stack [L, ...] of L published tensors, one with experts a
stack [L, X, ...] of L * X, layer after layer; any other is one tensor. Published matrices are
[out, in] with merged heads; ours are [in, out] with separate heads. Fused experts share one
published tensor [X, in, out] a layer, in which gate and up alternate along the last axis.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dapo_jax.model.decoder import DecoderConfig, abstract_params, layer_stacks
from dapo_jax.model.families import family_of
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.runtime.sharding import flatten, unbox

TOP_TENSORS = {  # published names of parameters outside layers
    "embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
    "layer_inputs/embedding": "model.embed_tokens_per_layer.weight",
    "layer_inputs/projection/kernel": "model.per_layer_model_projection.weight",
    "layer_inputs/norm/scale": "model.per_layer_projection_norm.weight",
}


CONVOLUTION = "delta/conv"
DELTA_RATES = ("log_decay", "step_bias")  # parameters of delta-net layers by value head
UNROUNDED = (
    *("router/kernel", "delta/b/kernel", "delta/a/kernel", "delta/ba/kernel"),
    "layer_inputs/projection/kernel",
)


class TensorPart(NamedTuple):
    """The part of a published tensor that is one of our matrices or vectors."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    expert: int = -1  # index in the first axis of a fused tensor; -1: it is not fused
    first: int = 0  # first index in its last axis ...
    step: int = 1  # ... and distance to the next


def param_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by path."""
    abstract = flatten(unbox(abstract_params(config)))
    return {path: leaf.shape for path, leaf in abstract.items()}


def forward_dtype(path: str, config: DecoderConfig) -> Any:
    """Return the dtype in a forward pass: float32 for norms and sinks, else the compute dtype."""
    return jnp.float32 if path.endswith(("scale", "sinks", *DELTA_RATES)) else config.dtype


def summed_axes(path: str) -> int:
    """Return the number of leading axes that a matrix product sums over.

    It is 0 for parameters in no such product (norms, biases, the embedding) and for adapters.
    """
    if path.endswith("/kernel"):
        return 2 if path.endswith("/out/kernel") else 1
    return int(path == "head")


def has_experts(path: str) -> bool:
    """Return True for a parameter with one matrix per expert."""
    return "/expert_" in path


def scaled_axes(path: str) -> tuple[int, ...]:
    """Return the axes of a layer's parameter that share an int8 scale; empty if it stays as it is.

    Routers are not rounded: their nearest logits decide the experts of a token. Nor are rates of
    delta-net layers, which a state accumulates, and the projection of `layer_inputs`, which is
    outside of layers.
    """
    if path.endswith(UNROUNDED) or not summed_axes(path):
        return ()
    return (1,) if has_experts(path) else tuple(range(summed_axes(path)))


def below_stack(path: str) -> str | None:
    """Return the path below a stack of layers; None for a parameter outside layers."""
    stack, _, below = path.partition("/")
    return below if stack.endswith("layers") else None


def stacked_axes(path: str) -> int:
    """Return the number of leading axes that count published tensors."""
    return 0 if below_stack(path) is None else 1 + has_experts(path)


def published_names(path: str, config: DecoderConfig) -> list[str]:
    """Return the names of a parameter's published tensors by layer; fused ones repeat."""
    return _names(family_of(config.family).tensors, path, config)


def matrix_names(path: str, config: DecoderConfig) -> list[str]:
    """Return the names of a parameter's matrices for PEFT, the prefixes of its adapters' names."""
    family = family_of(config.family)
    return _names(family.adapter_tensors or family.tensors, path, config)


def _names(tensors: Mapping[str, str], path: str, config: DecoderConfig) -> list[str]:
    below = below_stack(path)
    if below is None:
        return [TOP_TENSORS[path]]
    numbers = layer_stacks(config)[path.partition("/")[0]]
    experts = range(config.experts if has_experts(path) else 1)
    return [f"model.layers.{i}.{tensors[below].format(e)}" for i in numbers for e in experts]


def published_parts(path: str, shape: tuple[int, ...], config: DecoderConfig) -> list[TensorPart]:
    """Return the parts of published tensors that hold a parameter of `shape`, first layer first."""
    names, shape = published_names(path, config), shape[stacked_axes(path) :]
    tensors, below = family_of(config.family).tensors, below_stack(path) or ""
    if not has_experts(path) or "{}" in tensors[below]:
        return [TensorPart(name, published_shape(path, shape)) for name in names]
    alternating = [other for other, name in tensors.items() if name == tensors[below]]
    first, step = alternating.index(below), len(alternating)
    fused = (config.experts, *shape[:-1], shape[-1] * step)
    return [
        TensorPart(name, fused, i % config.experts, first, step) for i, name in enumerate(names)
    ]


def input_axes(path: str, shape: tuple[int, ...]) -> int:
    """Return the number of leading axes that are the input of a published matrix."""
    if path.endswith(ADAPTER_NAMES):
        return len(shape) - 1 if path.endswith(ADAPTER_NAMES[0]) else 1
    return summed_axes(path)


def published_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the published shape of a parameter that is `shape` without the layer axis."""
    inputs = input_axes(path, shape)
    if inputs:
        return (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
    if path.endswith(("bias", *DELTA_RATES)):
        return (math.prod(shape),)
    if path.endswith(CONVOLUTION):
        return (math.prod(shape[:-1]), 1, shape[-1])
    return (1, *shape) if path == "score" else shape


def row_order(path: str, config: DecoderConfig) -> np.ndarray | None:
    """Return the published rows (output channels) of a parameter in our order; None: the same.

    Published queries, keys and values of delta-net layers follow each other. Ours are together for
    each key head, so that the mesh can cut them.
    """
    joined = path.endswith(CONVOLUTION) or ("delta/qkv/" in path and not path.endswith("lora_a"))
    if not joined:
        return None
    heads = config.delta_key_heads
    sizes = [config.delta_key_dim] * 2
    sizes.append(config.delta_value_heads // heads * config.delta_value_dim)
    starts = np.cumsum([0, *(heads * size for size in sizes)])
    parts = [
        start + np.arange(heads * size).reshape(heads, size)
        for start, size in zip(starts[:-1], sizes, strict=True)
    ]
    return np.concatenate(parts, axis=1).reshape(-1)


def merged_slice(index: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
    """Return the part `index` of dimensions `shape` as a slice of these dimensions merged.

    Only the first dimension may be cut; the mesh never cuts another.
    """
    inner = math.prod(shape[1:])
    start, stop, _ = index[0].indices(shape[0])
    return slice(start * inner, stop * inner)


def to_published(path: str, array: np.ndarray, config: DecoderConfig) -> np.ndarray:
    """Return a layer's array, or a parameter outside layers, in the published layout."""
    rows, *columns = published_shape(path, array.shape)
    if input_axes(path, array.shape):
        array = array.reshape(*columns, rows).T
    array, order = array.reshape(rows, *columns), row_order(path, config)
    return np.ascontiguousarray(array if order is None else array[np.argsort(order)])


def from_published(
    path: str, array: np.ndarray, shape: tuple[int, ...], config: DecoderConfig
) -> np.ndarray:
    """Return a published array as a layer's array, or a parameter outside layers, of `shape`."""
    order = row_order(path, config)
    array = array if order is None else array[order]
    return (array.T if input_axes(path, shape) else array).reshape(shape)
