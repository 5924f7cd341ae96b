"""Parts of a transformer layer: linear layers with low-rank adapters, norms, activations."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.model.quantisation import int8_product
from dapo_jax.runtime.sharding import active_pieces

ADAPTER_NAMES = ("lora_a", "lora_b")  # parameters beside the kernel that they add to
SCALE = "_scale"  # suffix of the parameter that holds an int8 matrix's scales
BIAS = "_bias"  # ... that holds biases of matrices in one dictionary
LIMIT, SHARPNESS = 7.0, 1.702  # of gpt-oss


def _clipped_swish(gate: Array, up: Array) -> Array:
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * nn.sigmoid(SHARPNESS * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {  # of gate and up
    "silu": lambda gate, up: nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: nn.gelu(gate, approximate=True) * up,
    "clipped_swish": _clipped_swish,
}


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of matrices: y = x W + scale (x A) B (LoRA, arXiv 2106.09685)."""

    rank: int
    scale: float  # alpha / rank
    targets: tuple[str, ...]  # names of projections


def named(init: Callable, axes: tuple[str, ...]) -> Callable[..., Any]:
    """Initialiser whose parameter carries these logical axis names; `self.param` unboxes it."""
    return nn.with_logical_partitioning(init, axes)


class OffsetNorm(nn.Module):
    """RMS norm times 1 + scale, as Gemma's."""

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
    several axes, which took a third of the backward pass.
    """

    features: tuple[int, ...]
    axes: tuple[str, ...]  # logical names of the kernel's dimensions
    dtype: Any
    contracted: int = 1
    use_bias: bool = False
    adapters: Adapters | None = None
    int8_products: bool = False  # where the kernel is int8

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
            pieces = active_pieces(inputs[0], self.axes[0])
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
        """The adapters' term, scale (x A) B; B starts at zero, so training starts at the base."""
        rank, inner, into = adapters.rank, flat.shape[1], self.axes[: self.contracted]
        init = named(nn.initializers.normal(inner**-0.5), (*into, "rank"))
        down = self.param(ADAPTER_NAMES[0], init, (*inputs, rank)).astype(self.dtype)
        axes = ("rank", *self.axes[self.contracted :])
        init = named(nn.initializers.zeros, axes)
        up = self.param(ADAPTER_NAMES[1], init, (rank, *self.features)).astype(self.dtype)
        return adapters.scale * (flat @ down.reshape(inner, rank)) @ up.reshape(rank, -1)
