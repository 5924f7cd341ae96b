"""Gated delta-net layers: linear attention with a state of constant size (arXiv 2412.06464).

A head's state S [key, value] follows S <- exp(g) S + k (beta (v - exp(g) k^T S))^T, and a query
reads q^T S. Rows are computed in chunks: inside a chunk all tokens at once, by one triangular
system (arXiv 2406.06484, section 3); from chunk to chunk only the state is carried. A short causal
convolution precedes queries, keys and values. State and convolution start again at each segment, or
continue from the end of a shared prompt.

Dimension letters: H key heads, G value heads per key head, K key and V value dimension, C tokens of
a chunk, W tokens of the convolution.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.caches import StateCache
from dapo_jax.model.decode_attention import PromptContext, SlotContext
from dapo_jax.model.layers import named, projection
from dapo_jax.runtime.sharding import constrain

CHUNK_TOKENS = 64
NORM_EPSILON = 1e-6  # of queries and keys


class DeltaInputs(NamedTuple):
    """What each token adds to the state and reads from it; float32."""

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


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    turned = inverse.swapaxes(-1, -2)
    return (-jnp.tril(_product(_product(turned, gradient), turned), -1),)


unit_inverse.defvjp(_inverse_forward, _inverse_backward)


class Links(NamedTuple):
    """Which tokens of a chunk, and which of n states, precede a token on its path.

    A path is a segment, or a shared prompt and the segment of a response to it. State 0 is that
    after the chunk before, state 1 that after the latest prompt of the row.
    """

    seen: Bool[Array, "B C C"]  # tokens of the chunk on the path, the token itself included
    enter: Bool[Array, "n B C"]  # whether a token's path comes from a state
    last: Float[Array, "n B C"]  # 1 at the token after which the state is kept
    kept: Bool[Array, "n n B"]  # whether, if there is none, a state becomes the state before


def _links(segments: Int[Array, "N B C"], prompts: Int[Array, "N B C"] | None) -> Links:
    """Return the links of N chunks, each with its axis first."""
    size, shared = segments.shape[-1], prompts is not None
    prompts = segments if prompts is None else prompts
    before = jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])[..., None]
    inside = prompts[..., None] == segments[..., None, :]
    seen = inside | (segments[..., None] == segments[..., None, :])
    near = prompts == before
    enter, places = [(segments == before) | near], [jnp.full(before.shape[:2], size - 1)]
    kept = jnp.zeros((len(segments), 1 + shared, 1 + shared, segments.shape[1]), bool)
    if shared:
        far = (prompts != segments) & ~near & (segments != before) & ~inside.any(axis=-1)
        enter.append(far)
        of_prompt = segments == prompts[..., -1:]  # that of the last token
        none = ~of_prompt.any(axis=-1)
        place = size - 1 - jnp.argmax(of_prompt[..., ::-1], axis=-1)
        places.append(jnp.where(none, -1, place))
        kept = kept.at[:, 1, 0].set(none & near[..., -1]).at[:, 1, 1].set(none & ~near[..., -1])
    last = jax.nn.one_hot(jnp.stack(places, axis=1), size)
    return Links(seen & jnp.tril(jnp.ones((size, size), bool)), jnp.stack(enter, 1), last, kept)


def _chunk(
    states: Float[Array, "n B H G K V"], chunk: tuple[DeltaInputs, Links]
) -> tuple[Array, Float[Array, "B H G C V"]]:
    """Return the states after a chunk, with arrays [B H (G) C ...], and what its queries read."""
    (queries, keys, values, decay, beta), (seen, enter, last, kept) = chunk
    exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    total = exact("bij,bhgj->bhgi", seen.astype(jnp.float32), decay)
    between = total[..., :, None] - total[..., None, :]
    weights = jnp.exp(jnp.where(seen[:, None, None], between, -jnp.inf))
    entered = jnp.exp(total) * enter[:, :, None, None]

    def read_states(x: Float[Array, "B H C K"]) -> Float[Array, "B H G C V"]:
        return jnp.sum(jnp.einsum("bhck,nbhgkv->nbhgcv", x, states) * entered[..., None], axis=0)

    overlap = jnp.einsum("bhik,bhjk->bhij", keys, keys)[:, :, None]
    lower = jnp.tril(beta[..., None] * overlap * weights, -1)
    added = unit_inverse(lower) @ (beta[..., None] * (values - read_states(keys)))
    scores = jnp.einsum("bhik,bhjk->bhij", queries, keys)[:, :, None] * weights
    read = read_states(queries) + scores @ added
    old = exact("nbi,mbhgi->nmbhg", last, entered) + kept[..., None, None]
    left = exact("nbi,bhgij->nbhgj", last, weights)[..., None] * added
    states = jnp.sum(old[..., None, None] * states, axis=1)
    return states + jnp.einsum("bhck,nbhgcv->nbhgkv", keys, left), read


def delta_rule(
    inputs: DeltaInputs,
    state: Float[Array, "B H G K V"],
    segments: Int[Array, "B T"],  # each but the first starts from an empty state
    prompts: Int[Array, "B T"] | None = None,  # or from the state after this segment
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Float[Array, "B T H G V"], Float[Array, "B H G K V"]]:
    """Return what queries read, and the last state.

    The backward pass computes a chunk again from the states before it.
    """
    length = segments.shape[1]
    size = min(chunk_tokens, 1 << (length - 1).bit_length())
    chunks = functools.partial(_cut, size=size)
    heads = {"queries": 1, "keys": 1, "values": 2, "decay": 2, "beta": 2}
    cut = {name: jnp.moveaxis(chunks(getattr(inputs, name)), 2, 2 + n) for name, n in heads.items()}
    ids = functools.partial(chunks, mode="edge")
    links = _links(ids(segments), None if prompts is None else ids(prompts))
    states = jnp.stack([state] + [jnp.zeros_like(state)] * (prompts is not None))
    body = jax.checkpoint(_chunk, prevent_cse=False)
    states, read = jax.lax.scan(body, states, (DeltaInputs(**cut), links))
    read = jnp.moveaxis(read, 4, 2).swapaxes(0, 1)
    return read.reshape(len(segments), -1, *read.shape[3:])[:, :length], states[0]


def _cut(array: Array, size: int, mode: str = "constant") -> Array:
    """Return rows [B, T, ...] as chunks [N, B, size, ...], padded on the right."""
    pad = -array.shape[1] % size
    array = jnp.pad(array, [(0, 0), (0, pad), *[(0, 0)] * (array.ndim - 2)], mode)
    return array.reshape(len(array), -1, size, *array.shape[2:]).swapaxes(0, 1)


def delta_step(
    inputs: DeltaInputs, state: Float[Array, "B H G K V"]
) -> tuple[Float[Array, "B 1 H G V"], Float[Array, "B H G K V"]]:
    """Return what the queries of one token read, and the state after it."""
    queries, keys, values, decay, beta = (array[:, 0] for array in inputs)
    kept = jnp.exp(decay)[..., None]
    both = jnp.stack([keys, queries])  # so that the state is read once
    known, read = jnp.einsum("nbhk,bhgkv->nbhgv", both, state) * kept
    added = beta[..., None] * (values - known)
    read += jnp.sum(queries * keys, axis=-1)[:, :, None, None] * added
    state = state * kept[..., None] + keys[:, :, None, :, None] * added[:, :, :, None]
    return read[:, None], state


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
    prompts: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H X"]:
    """Return the causal convolution of each channel along a token's path; float32."""
    length, reach = x.shape[1], kernel.shape[-1] - 1
    padded = jnp.concatenate([window.astype(x.dtype), x], axis=1).astype(jnp.float32)
    before = jnp.pad(segments, ((0, 0), (reach, 0)), mode="edge")
    kernel = kernel.astype(x.dtype).astype(jnp.float32)
    out = padded[:, reach:] * kernel[..., -1]
    for distance in range(1, reach + 1):
        part = slice(reach - distance, reach - distance + length)
        same = before[:, part] == segments
        out += jnp.where(same[..., None, None], padded[:, part] * kernel[..., -1 - distance], 0)
    return out if prompts is None else out + _convolve_prompts(x, kernel, segments, prompts)


def _convolve_prompts(
    x: Float[Array, "B T H X"],
    kernel: Float[Array, "H X W"],
    segments: Int[Array, "B T"],
    prompts: Int[Array, "B T"],
) -> Float[Array, "B T H X"]:
    """Return what the ends of shared prompts add to the first tokens of each response.

    Products with matrices of 0 and 1 select the tokens: a gather of all tokens would become a
    scatter of all tokens in the backward pass, one by one on TPUs. A chunk's tokens come from the
    chunk, from just before it, or from the end of the prompt that its first token belongs to.
    """
    length, reach = x.shape[1], kernel.shape[-1] - 1
    place = jnp.broadcast_to(jnp.arange(length), segments.shape)
    previous = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    starts, responds = segments != previous, prompts != segments

    def latest(mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
        return jax.lax.cummax(jnp.where(mask, place, 0), axis=1)

    offset, root = place - latest(starts), latest(starts & ~responds)
    end = latest(starts & responds & (prompts == previous))  # of the prompt, exclusive
    back, chunks = jnp.arange(-reach, 0), functools.partial(_cut, size=CHUNK_TOKENS)
    first = jnp.arange(0, length, CHUNK_TOKENS)[:, None, None] + back  # [N, 1, W-1]
    near = jnp.broadcast_to(first, (len(first), len(x), reach))
    far = chunks(end)[:, :, :1] + back
    far = jnp.where(far < near[..., :1], far, -1)
    outside = jnp.concatenate([near, far], axis=-1)
    take = jax.vmap(lambda row, at: row[at], in_axes=(0, 1), out_axes=1)  # rows stay on devices
    sources = jnp.concatenate([take(x, jnp.maximum(outside, 0)), chunks(x)], axis=2)
    own = jnp.arange(CHUNK_TOKENS) + jnp.zeros_like(outside[..., :1]) + first[..., :1] + reach
    numbers = jnp.concatenate([outside, own], axis=-1)
    out: Any = 0.0
    for distance in range(1, reach + 1):
        wanted = end + offset - distance
        reached = responds & (offset < distance) & (wanted >= root)
        wanted = chunks(jnp.where(reached, wanted, -1 - reach))
        picked = (wanted[..., None] == numbers[:, :, None]).astype(x.dtype)
        past = jnp.einsum("nbis,nbshx->nbihx", picked, sources, precision="highest")
        out += past.astype(jnp.float32) * kernel[..., -1 - distance]
    return out.swapaxes(0, 1).reshape(len(x), -1, *x.shape[2:])[:, :length]


def _last_inputs(
    x: Array, window: Array, real: Bool[Array, "B T"] | None
) -> Float[Array, "B W-1 H X"]:
    """Return the window after the tokens that are real; padding is on the right."""
    padded, width = jnp.concatenate([window, x.astype(window.dtype)], axis=1), window.shape[1]
    if real is None:
        return padded[:, x.shape[1] :]
    if x.shape[1] == 1:
        return jnp.where(real[..., None, None], padded[:, 1:], window)
    cut = jax.vmap(lambda row, count: jax.lax.dynamic_slice_in_dim(row, count, width))
    return cut(padded, jnp.sum(real, axis=1))


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
        real, prompts = _real(context), getattr(context, "prompt_ids", None)
        segments = getattr(context, "segment_ids", jnp.zeros(h.shape[:2], jnp.int32))
        channels = convolve(mixed, kernel, before.window, segments, prompts)
        channels = nn.silu(channels).astype(c.dtype)
        inputs = self._inputs(channels, beta, rate, real)
        if isinstance(context, SlotContext):
            read, state = delta_step(inputs, before.state)
        else:
            read, state = delta_rule(inputs, before.state, segments, prompts)
        if not hasattr(context, "segment_ids"):
            cache = StateCache(state, _last_inputs(mixed, before.window, real))
        out = self._gated_norm(read, gates.reshape(read.shape))
        out = constrain(out.reshape(gates.shape), "batch", "sequence", "heads", None)
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

    def _gated_norm(self, read: Array, gates: Array) -> Array:
        c = self.config
        scale = named(nn.initializers.ones, ("norm",))
        norm = nn.RMSNorm(c.norm_eps, dtype=c.dtype, scale_init=scale, name="norm")
        return (norm(read) * nn.silu(gates.astype(jnp.float32))).astype(c.dtype)
