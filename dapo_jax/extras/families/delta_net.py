"""Gated delta-net layers: linear attention with a state of constant size (arXiv 2412.06464).

A head's state S [key, value] follows S <- exp(g) S + k (beta (v - exp(g) k^T S))^T, and a query
reads q^T S. Rows are computed in chunks: inside a chunk all tokens at once, by one triangular
system (arXiv 2406.06484, section 3); from chunk to chunk only the state is carried. A short causal
convolution precedes queries, keys and values. State and convolution start again at each segment.

Dimension letters: H key heads, G value heads per key head, K key and V value dimension, C tokens of
a chunk, W tokens of the convolution.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.blockwise_attention import cut
from dapo_jax.model.caches import StateCache
from dapo_jax.model.decode_attention import PromptContext, SlotContext
from dapo_jax.model.layers import named, projection
from dapo_jax.runtime.sharding import constrain

CHUNK_TOKENS = 64
NORM_EPSILON = 1e-6  # of queries and keys


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule for each token, in float32."""

    queries: Float[Array, "B T H K"]
    keys: Float[Array, "B T H K"]
    values: Float[Array, "B T H G V"]
    decay: Float[Array, "B T H G"]  # g, at most 0
    beta: Float[Array, "B T H G"]


# --- the rule --------------------------------------------------------------------------------


@jax.custom_vjp
def unit_inverse(lower: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Return (1 + lower)^-1 of strictly lower triangular matrices; C is a power of two.

    Inverses of diagonal blocks are merged in pairs. Powers of `lower` would need no such order, but
    they grow beyond float32 if keys are similar.
    """
    size, block = lower.shape[-1], 1
    inverse = jnp.eye(size, dtype=lower.dtype)
    while block < size:
        number = jnp.arange(size) // block
        pair = (number[:, None] == number + 1) & (number % 2 == 0)
        inverse = inverse - _product(_product(inverse, jnp.where(pair, lower, 0)), inverse)
        block *= 2
    return jnp.broadcast_to(inverse, lower.shape)


_product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
_exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    turned = inverse.swapaxes(-1, -2)
    return (-jnp.tril(_product(_product(turned, gradient), turned), -1),)


unit_inverse.defvjp(lambda lower: (unit_inverse(lower),) * 2, _inverse_backward)


def _chunk(
    state: Float[Array, "B H G K V"],
    chunk: tuple[DeltaInputs, Int[Array, "B C"], Int[Array, "B"]],
) -> tuple[Array, Float[Array, "B H G C V"]]:
    """Return the state after a chunk, with arrays [B H (G) C ...], and what its queries read.

    The last array of a chunk is the segment of the token before it.
    """
    (queries, keys, values, decay, beta), segments, before = chunk
    seen = jnp.tril(segments[:, :, None] == segments[:, None])
    total = _exact("bij,bhgj->bhgi", seen.astype(jnp.float32), decay)
    between = total[..., :, None] - total[..., None, :]
    weights = jnp.exp(jnp.where(seen[:, None, None], between, -jnp.inf))
    enter = jnp.where((segments == before[:, None])[:, None, None], jnp.exp(total), 0)

    both = jnp.stack([keys, queries])  # so that the state is read once
    known, read = jnp.einsum("nbhck,bhgkv->nbhgcv", both, state) * enter[..., None]
    overlap = jnp.einsum("bhik,bhjk->bhij", keys, keys)[:, :, None]
    lower = jnp.tril(beta[..., None] * overlap * weights, -1)
    added = unit_inverse(lower) @ (beta[..., None] * (values - known))
    scores = jnp.einsum("bhik,bhjk->bhij", queries, keys)[:, :, None] * weights
    new = jnp.einsum("bhck,bhgc,bhgcv->bhgkv", keys, weights[..., -1, :], added)
    return state * enter[..., -1, None, None] + new, read + scores @ added


def delta_rule(
    inputs: DeltaInputs,
    state: Float[Array, "B H G K V"],  # before the first token
    segments: Int[Array, "B T"],
) -> tuple[Float[Array, "B T H G V"], Float[Array, "B H G K V"]]:
    """Return what queries read, and the last state.

    The backward pass computes a chunk again from the state before it.
    """
    length = segments.shape[1]
    size = min(CHUNK_TOKENS, 1 << (length - 1).bit_length())
    chunks = functools.partial(cut, size=size)
    axes = 3, 3, 4, 4, 4  # of a token, behind the heads
    by_head = (jnp.moveaxis(chunks(x), 2, axis) for x, axis in zip(inputs, axes, strict=True))
    before = chunks(jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1))[:, :, 0]
    arrays = DeltaInputs(*by_head), chunks(segments, mode="edge"), before
    state, read = jax.lax.scan(jax.checkpoint(_chunk, prevent_cse=False), state, arrays)
    read = jnp.moveaxis(read, 4, 2).swapaxes(0, 1)
    return read.reshape(len(segments), -1, *read.shape[3:])[:, :length], state


# --- the layer -------------------------------------------------------------------------------


def _real(context: Any) -> Bool[Array, "B T"] | None:
    """Return the tokens that change state and window of a decoding cache; None: all."""
    if isinstance(context, SlotContext):
        return context.active[:, None]
    if isinstance(context, PromptContext) and context.ends is not None:
        return context.positions < context.ends[:, None]
    return None


def convolve(
    x: Float[Array, "B T H X"],
    kernel: Float[Array, "H X W"],
    window: Float[Array, "B W-1 H X"],  # inputs of the tokens before
    segments: Int[Array, "B T"],
) -> Float[Array, "B T H X"]:
    """Return the causal convolution of each channel within a segment; float32."""
    length, reach = x.shape[1], kernel.shape[-1] - 1
    padded = jnp.concatenate([window.astype(x.dtype), x], axis=1).astype(jnp.float32)
    before = jnp.pad(segments, ((0, 0), (reach, 0)), "edge")
    kernel = kernel.astype(x.dtype).astype(jnp.float32)
    out = padded[:, reach:] * kernel[..., -1]
    for distance in range(1, reach + 1):
        part = slice(reach - distance, reach - distance + length)
        same = (segments == before[:, part])[..., None, None]
        out += jnp.where(same, padded[:, part] * kernel[..., -1 - distance], 0)
    return out


def _last_inputs(
    x: Array, window: Array, real: Bool[Array, "B T"] | None
) -> Float[Array, "B W-1 H X"]:
    """Return the window after the tokens that are real; padding is on the right."""
    padded, width = jnp.concatenate([window, x.astype(window.dtype)], axis=1), window.shape[1]
    if real is None:
        return padded[:, x.shape[1] :]
    if x.shape[1] == 1:
        return jnp.where(real[..., None, None], padded[:, 1:], window)
    last = jax.vmap(lambda row, count: jax.lax.dynamic_slice_in_dim(row, count, width))
    return last(padded, jnp.sum(real, axis=1))


def empty_state(config: Any, batch: int) -> StateCache:
    """Return the cache of a gated delta-net layer before the first token."""
    c = config
    groups = c.delta_value_heads // c.delta_key_heads
    channels = 2 * c.delta_key_dim + groups * c.delta_value_dim
    shape = batch, c.delta_key_heads, groups, c.delta_key_dim, c.delta_value_dim
    window = batch, c.delta_kernel - 1, c.delta_key_heads, channels
    return StateCache(jnp.zeros(shape, jnp.float32), jnp.zeros(window, c.dtype))


class GatedDeltaNet(nn.Module):
    """Projections, convolution, delta rule, gated norm and last projection of a layer."""

    config: Any  # DecoderConfig with `delta_*`

    @nn.compact
    def __call__(
        self, h: Float[Array, "B T D"], context: Any, cache: StateCache | None
    ) -> tuple[Float[Array, "B T D"], StateCache | None]:
        """Return the output and the cache, None in training."""
        c = self.config
        heads, groups = c.delta_key_heads, c.delta_value_heads // c.delta_key_heads
        key, value = c.delta_key_dim, groups * c.delta_value_dim
        names = {"qkv": 2 * key + value, "z": value, "b": groups, "a": groups}
        if c.delta_fused:
            names = {"qkvz": 2 * key + 2 * value, "ba": 2 * groups}

        def project(name: str) -> Array:
            axes = ("embed", "heads", "head_dim")
            return projection(c, name, (heads, names[name]), axes, target="delta_" + name)(h)

        joined = jnp.concatenate([project(name) for name in names], axis=-1)
        joined = constrain(joined, "batch", "sequence", "heads", None)
        mixed, gates, beta, rate = jnp.split(
            joined, [2 * key + value, 2 * key + 2 * value, 2 * key + 2 * value + groups], axis=-1
        )
        init = named(nn.initializers.normal(c.delta_kernel**-0.5), ("heads", "head_dim", None))
        kernel = self.param("conv", init, (heads, mixed.shape[-1], c.delta_kernel))
        before = cache or empty_state(c, len(h))
        is_training, real = hasattr(context, "segment_ids"), _real(context)
        assert not is_training or context.prompt_ids is None  # `row_choice` shares no prompts
        segments = context.segment_ids if is_training else jnp.zeros(h.shape[:2], jnp.int32)
        channels = nn.silu(convolve(mixed, kernel, before.window, segments)).astype(c.dtype)
        inputs = self._inputs(channels, beta, rate, real)
        read, state = delta_rule(inputs, before.state, segments)
        if not is_training:
            cache = StateCache(state, _last_inputs(mixed, before.window, real))
        scale = named(nn.initializers.ones, ("norm",))
        norm = nn.RMSNorm(c.norm_eps, dtype=c.dtype, scale_init=scale, name="norm")
        by_head = gates.reshape(read.shape)
        gated = (norm(read) * nn.silu(by_head.astype(jnp.float32))).astype(c.dtype)
        out = constrain(gated.reshape(gates.shape), "batch", "sequence", "heads", None)
        axes = ("heads", "head_dim", "embed")
        last = projection(c, "out", (c.embed,), axes, target="delta_out", contracted=2)
        return last(out), cache

    def _inputs(self, channels: Array, beta: Array, rate: Array, real: Any) -> DeltaInputs:
        """Return the arrays of the rule; tokens that are not real leave the state as it is."""
        c, (heads, groups) = self.config, beta.shape[2:]
        key = c.delta_key_dim
        ones, zeros = (
            named(init, ("heads", None)) for init in (nn.initializers.ones, nn.initializers.zeros)
        )
        log_decay = self.param("log_decay", zeros, (heads, groups))
        bias = self.param("step_bias", ones, (heads, groups))
        queries, keys, values = jnp.split(channels.astype(jnp.float32), [key, 2 * key], axis=-1)
        values = values.reshape(*values.shape[:3], groups, c.delta_value_dim)
        decay = -jnp.exp(log_decay) * nn.softplus(rate.astype(jnp.float32) + bias)
        beta = nn.sigmoid(beta.astype(jnp.float32))
        if real is not None:
            decay, beta = (jnp.where(real[..., None, None], x, 0) for x in (decay, beta))

        def unit(x: Array) -> Array:
            return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)

        return DeltaInputs(unit(queries) * key**-0.5, unit(keys), values, decay, beta)
