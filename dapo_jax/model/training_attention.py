"""Training attention over packed rows: plain, blockwise, by a kernel of TPUs or GPUs.

`Block` calls `attend(queries, keys, values, context, cache, options)` with arrays [batch, time,
heads, head_dim]; it returns the attention output in that shape and the cache, None in
training. Layers share one segment number per token; only `attend_plain` builds a dense mask.
`decode_attention.py` has the attention of the sampler.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model import cudnn_attention
from dapo_jax.model.blockwise_attention import RowIds, Sinks, Span, blocked_attention, visible
from dapo_jax.model.caches import KVCache, PromptCache
from dapo_jax.model.splash_attention import LANES, splash_attention
from dapo_jax.runtime import sharding

# Longest row for which 'auto' chooses plain attention, faster than blocks there (measured on CPU).
SHORT_ROW_TOKENS = 1024
PIECES = 2  # of a row on each device of the mesh axis `context`


@struct.dataclass
class Context:
    """Positions and segments of packed tokens, shared by all layers."""

    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    prompt_ids: Int[Array, "B T"] | None = None  # of a shared prompt: see `learner.batches`

    @property
    def ids(self) -> RowIds:
        """Numbers that decide which tokens see each other."""
        if self.prompt_ids is None:
            return RowIds(self.segment_ids)
        return RowIds(self.segment_ids, self.prompt_ids, self.positions)

    def copies(self) -> Float[Array, "B T"]:
        """Return the number of responses that each token belongs to; 0 on padding."""
        real = (self.segment_ids > 0).astype(jnp.float32)
        if self.prompt_ids is None:
            return real

        def of_row(segments, prompts):
            first = jnp.diff(segments, prepend=0) > 0  # tokens that begin a segment
            users = jnp.where(first & (prompts != segments), 1.0, 0.0)
            return jax.ops.segment_sum(users, prompts, len(segments) + 1)[segments]

        return real * jnp.maximum(jax.vmap(of_row)(self.segment_ids, self.prompt_ids), 1.0)


@struct.dataclass
class Window:
    """Sliding window of a layer: the number of tokens that each token sees, itself included."""

    tokens: int = struct.field(pytree_node=False)
    slides: Bool[Array, ""] | None = None  # False: the layer sees everything; None: it slides

    def reach(self, length: int) -> Int[Array, ""]:
        """Return the number of tokens that a token sees in a row of `length`."""
        tokens = jnp.int32(min(self.tokens, length))
        return tokens if self.slides is None else jnp.where(self.slides, tokens, length)


class AttentionOptions(NamedTuple):
    """Differences of a layer's attention from causal attention over all tokens."""

    window: Window | None = None
    sinks: Sinks = None  # float32


CAUSAL = AttentionOptions()


def packed_mask(ids: RowIds, window: Window | None = None) -> Bool[Array, "R T T"]:
    """Return the causal mask inside segments; padding (segment 0) sees padding: no empty rows."""
    length = ids.segments.shape[-1]
    place = jnp.arange(length)
    reach = None if window is None else window.reach(length)
    return visible(ids, ids, place[:, None] - place[None, :], reach)


def shares_prompts(attention: str, windows: bool) -> bool:
    """Return True if that training attention supports prompts shared by several responses.

    A sliding window of the TPU kernel counts places in the row.
    """
    return attention != "cudnn" and not (attention == "splash" and windows)


def choose(requested: str, device: Any, row_tokens: int, dtype: Any, context: int = 1) -> str:
    """Return the key of TRAINING_ATTENTION; 'auto' depends on the device and the rows.

    'auto' never chooses plain attention for long rows: its scores are [T, T] for every head.
    """
    if requested != "auto":
        return requested
    platform = device.platform
    if platform == "tpu" and (row_tokens % LANES == 0 or row_tokens > SHORT_ROW_TOKENS):
        return "splash"
    if platform == "gpu" and not cudnn_attention.missing(device, row_tokens, dtype, context):
        return "cudnn"
    return "plain" if row_tokens <= SHORT_ROW_TOKENS else "blocked"


def grouped_attention(
    queries: Float[Array, "B Q H E"],
    cache: KVCache | PromptCache,
    mask: Bool[Array, "B Q T"],
    sinks: Sinks = None,
) -> Float[Array, "B Q H E"]:
    """Return grouped-query attention; adjacent query heads share a key head.

    The softmax is float32. The scales of int8 keys and values multiply their products.
    """
    batch, count, heads, width = queries.shape
    key_axes, value_axes = cache.axes
    groups, dtype = cache.keys.shape[key_axes.index("k")], queries.dtype
    split = queries.reshape(batch, count, groups, heads // groups, width) * width**-0.5
    scores = jnp.einsum(
        f"bkgqe,{key_axes}->bkgqt",
        split.transpose(0, 2, 3, 1, 4),
        cache.keys.astype(dtype),
        preferred_element_type=jnp.float32,
    )
    if cache.key_scale is not None:
        scores *= cache.key_scale[:, :, None, None]
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if cache.value_scale is not None:
        weights *= cache.value_scale[:, :, None, None]
    values = cache.values.astype(dtype)
    mixed = jnp.einsum(f"bkgqt,{value_axes}->bkgqe", weights.astype(dtype), values)
    if sinks is not None:
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        kept = jax.nn.sigmoid(total - sinks.reshape(groups, -1, 1, 1))  # fraction beside sinks
        mixed *= kept.astype(dtype)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads, width)


def attend_plain(
    queries, keys, values, context: Context, cache, options: AttentionOptions = CAUSAL
):
    """Compute all scores at once, for short rows."""
    row = KVCache(keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3))
    mask = packed_mask(context.ids, options.window)
    return grouped_attention(queries, row, mask, options.sinks), cache


def attend_in_context(
    attention: Callable, axes: tuple[str, ...], queries, keys, values, ids: RowIds, *shared: Array
) -> Float[Array, "B t H E"]:
    """Return the attention output of a device's tokens in rows cut by length (context parallelism).

    Keys and values are gathered layer by layer, queries stay cut: device i holds the pieces 2i and
    2i + 1 of a row. Later tokens see more keys, so each device attends from an early piece and from
    the late piece at the same distance from the row's end. `attention` takes the position of a
    piece's first token in the row as `first`.
    """
    devices = jax.lax.axis_size(axes)
    pieces, size = PIECES * devices, queries.shape[1] // PIECES
    keys, values = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (keys, values))
    mixed = []
    for which, part in enumerate(jnp.split(queries, PIECES, axis=1)):
        numbers = range(which, pieces, PIECES)
        targets = [min(number, pieces - 1 - number) for number in numbers]
        piece_of = dict(zip(targets, numbers, strict=True))
        number = jnp.array([piece_of[i] for i in range(devices)])[jax.lax.axis_index(axes)]
        part = jax.lax.ppermute(part, axes, list(enumerate(targets)))
        part = attention(part, keys, values, ids, *shared, first=number * size)
        back = [(target, i) for i, target in enumerate(targets)]
        mixed.append(jax.lax.ppermute(part, axes, back))
    return jnp.concatenate(mixed, axis=1)


def _on_each_device(attention: Callable, queries, keys, values, ids: RowIds, sinks, *shared):
    """Run `attention` on every device over its own rows and heads; `shared` is replicated.

    Devices communicate only if the mesh cuts rows by length.
    """
    mesh = sharding.active_mesh()
    if mesh is None:
        return attention(queries, keys, values, ids, sinks, *shared)
    if sharding.shards(mesh, "sequence") > 1:
        axes = sharding.active_axes("sequence")
        attention = functools.partial(attend_in_context, attention, axes)
    heads, kv_heads = (
        sharding.active_spec("batch", "sequence", name, None) for name in ("heads", "kv_heads")
    )
    rows, sinks_spec = sharding.active_spec("batch", None), sharding.active_spec("heads")
    whole = (sharding.active_spec(),) * len(shared)
    return jax.shard_map(
        attention,
        in_specs=(heads, kv_heads, kv_heads, rows, sinks_spec, *whole),
        out_specs=heads,
        check_vma=False,
    )(queries, keys, values, ids, sinks, *shared)


def attend_blocked(
    queries, keys, values, context: Context, cache, options: AttentionOptions = CAUSAL
):
    """Compute blocks, without a [T, T] array; for every platform."""
    reach = None if options.window is None else options.window.reach(queries.shape[1])

    def attention(*arrays, first=None):
        *arrays, reach = arrays
        return blocked_attention(*arrays, Span(reach, first))

    arrays = queries, keys, values, context.ids, options.sinks
    return _on_each_device(attention, *arrays, reach), cache


def _attend_within(kernel: Callable, arrays: tuple, window: Window | None) -> Array:
    """Run a kernel whose window must be known when it is compiled."""
    if window is None:
        return _on_each_device(kernel, *arrays)
    local = functools.partial(kernel, window=window.tokens)
    if window.slides is None:
        return _on_each_device(local, *arrays)

    def either(*arrays, **first):
        *arrays, slides = arrays
        kinds = (functools.partial(kind, **first) for kind in (local, kernel))
        return jax.lax.cond(slides, *kinds, *arrays)

    return _on_each_device(either, *arrays, window.slides)


def attend_splash(
    queries, keys, values, context: Context, cache, options: AttentionOptions = CAUSAL
):
    """Run the TPU's splash kernel; plain attention if no mesh names the platform."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attend_plain(queries, keys, values, context, cache, options)
    interpret = mesh.abstract_device.platform != "tpu"
    kernel = functools.partial(splash_attention, interpret=interpret)
    arrays = queries, keys, values, context.ids, options.sinks
    return _attend_within(kernel, arrays, options.window), cache


def attend_cudnn(
    queries, keys, values, context: Context, cache, options: AttentionOptions = CAUSAL
):
    """Run cuDNN's kernel, or compute blocks in layers that it can't express."""
    _, length, _, width = queries.shape
    fits = cudnn_attention.supports(width, queries.dtype, options.sinks is not None)
    if not fits or context.prompt_ids is not None or length % cudnn_attention.ROW_UNIT:
        return attend_blocked(queries, keys, values, context, cache, options)
    arrays = queries, keys, values, context.ids, options.sinks
    return _attend_within(cudnn_attention.cudnn_attention, arrays, options.window), cache


TRAINING_ATTENTION = {
    "plain": attend_plain,
    "blocked": attend_blocked,
    "splash": attend_splash,
    "cudnn": attend_cudnn,
}
