"""Parts of a transformer: linear layers with low-rank adapters, norms, activations, embeddings."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.quantisation import int8_product
from dapo_jax.runtime import sharding

ADAPTER_NAMES = ("lora_a", "lora_b")  # parameters next to the kernel that they adapt
SCALE = "_scale"  # suffix of the parameter that holds an int8 matrix's scales
BIAS = "_bias"  # suffix of an expert's bias in a dictionary of matrices
GATE_LIMIT, GATE_SHARPNESS = 7.0, 1.702  # of gpt-oss


def _clipped_swish(gate: Array, up: Array) -> Array:
    gate = jnp.minimum(gate, GATE_LIMIT)
    up = jnp.clip(up, -GATE_LIMIT, GATE_LIMIT)
    return gate * nn.sigmoid(GATE_SHARPNESS * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {  # functions of gate and up
    "silu": lambda gate, up: nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: nn.gelu(gate, approximate=True) * up,
    "clipped_swish": _clipped_swish,
}


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Settings of low-rank adapters: y = x W + scale (x A) B (LoRA, arXiv 2106.09685)."""

    rank: int
    scale: float  # alpha / rank, or alpha / sqrt(rank) with `rslora` (arXiv 2312.03732)
    targets: tuple[str, ...]  # names of projections
    rslora: bool = False

    @property
    def alpha(self) -> float:
        """The factor before it is divided."""
        return self.scale * (math.sqrt(self.rank) if self.rslora else self.rank)


def named(init: Callable, axes: tuple[str | None, ...]) -> Callable[..., Any]:
    """Return the initialiser with logical axis names for its parameter, unboxed by `self.param`."""
    return nn.with_logical_partitioning(init, axes)


class OffsetNorm(nn.Module):
    """RMS norm that multiplies by 1 + scale, as in Gemma."""

    epsilon: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.param("scale", named(nn.initializers.zeros, ("norm",)), x.shape[-1:])
        x = x.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (1 + scale)).astype(self.dtype)


class Projection(nn.Module):
    """Linear layer over the last `contracted` axes of x, as one product of two matrices.

    The axes are merged because XLA:CPU transposes and recomputes the gradient of a product over
    several axes, which cost a third of the backward pass.
    """

    features: tuple[int, ...]
    axes: tuple[str, ...]  # logical names of the kernel's dimensions
    dtype: Any
    contracted: int = 1
    use_bias: bool = False
    adapters: Adapters | None = None
    int8_products: bool = False  # if the kernel is int8

    @nn.compact
    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        inputs = x.shape[-self.contracted :]
        inner = math.prod(inputs)
        init = named(nn.initializers.normal(inner**-0.5), self.axes)
        kernel = self.param("kernel", init, (*inputs, *self.features)).reshape(inner, -1)
        flat, scaled = x.reshape(-1, inner), self.has_variable("params", "kernel" + SCALE)
        scale: Any = None
        if scaled:
            scale = self.get_variable("params", "kernel" + SCALE).reshape(-1)
        if scaled and self.int8_products:
            pieces = sharding.active_pieces(inputs[0], self.axes[0])
            product = int8_product(flat, kernel, scale, self.dtype, pieces)
        else:
            product = flat @ kernel.astype(self.dtype)
            product = (product * scale).astype(self.dtype) if scaled else product
        if self.adapters:
            product += self._low_rank(self.adapters, flat, inputs)
        product = product.reshape(*x.shape[: -self.contracted], *self.features)
        if self.use_bias:
            axes = self.axes[self.contracted :]
            init = named(nn.initializers.zeros, axes)
            product += self.param("bias", init, self.features).astype(self.dtype)
        return product

    def _low_rank(
        self, adapters: Adapters, flat: Float[Array, "N I"], inputs: tuple[int, ...]
    ) -> Array:
        """Return scale (x A) B; B starts at zero, so training starts at the base model."""
        rank = adapters.rank
        inner = flat.shape[1]
        axes = (*self.axes[: self.contracted], "rank")
        init = named(nn.initializers.normal(inner**-0.5), axes)
        down = self.param(ADAPTER_NAMES[0], init, (*inputs, rank)).astype(self.dtype)
        axes = ("rank", *self.axes[self.contracted :])
        init = named(nn.initializers.zeros, axes)
        up = self.param(ADAPTER_NAMES[1], init, (rank, *self.features)).astype(self.dtype)
        return adapters.scale * (flat @ down.reshape(inner, rank)) @ up.reshape(rank, -1)


def projection(
    config: Any, name: str, features: tuple[int, ...], axes: tuple[str, ...], **options: Any
) -> Projection:
    """Return a linear layer with the numerics of a DecoderConfig, and adapters if it has them.

    `target` among the options is the name in `lora.targets`, `name` by default.
    """
    target = options.pop("target", name)
    adapters = config.adapters
    if adapters and target not in adapters.targets:
        adapters = None
    options |= {"adapters": adapters, "int8_products": config.int8_products}
    return Projection(features, axes, config.dtype, name=name, **options)


def look_up(
    table: Float[Array, "V D"], tokens: Int[Array, "R T"], dtype: Any, *, is_wide: bool = False
) -> Array:
    """Return the embeddings [R T D] of packed rows in `dtype`.

    Each device looks up its own tokens in its part of the vocabulary. Otherwise the compiler
    gathers rows of other devices for the table's gradient. The table is gathered over width, unless
    it `is_wide`, wider than the residual stream: then each device looks up the tokens of all
    devices in its columns, and they exchange the results.
    """
    if sharding.active_mesh() is None:
        return table.astype(dtype)[tokens]
    vocab, embed = sharding.active_axes("vocab"), sharding.active_axes("embed")

    def look_up_locally(table: Float[Array, "v d"], tokens: Int[Array, "r t"]) -> Array:
        table = table.astype(dtype)
        if embed and is_wide:
            tokens = jax.lax.all_gather(tokens, embed, axis=0, tiled=True)
        elif embed:
            table = jax.lax.all_gather(table, embed, axis=1, tiled=True)
        if vocab:
            indices = tokens - jax.lax.axis_index(vocab) * len(table)
            local = (indices >= 0) & (indices < len(table))
            embedded = jnp.where(local[..., None], table[jnp.where(local, indices, 0)], 0)
        else:
            embedded = table[tokens]
        if embed and is_wide:
            options = {"split_axis": 0, "concat_axis": 2, "tiled": True}
            embedded = jax.lax.all_to_all(embedded, embed, **options)
        return jax.lax.psum(embedded, vocab) if vocab else embedded

    rows = sharding.active_spec("batch", "sequence")
    return jax.shard_map(
        look_up_locally,
        in_specs=(sharding.active_spec("vocab", "embed"), rows),
        out_specs=sharding.active_spec("batch", "sequence", None),
    )(table, tokens)
