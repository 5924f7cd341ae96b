"""Blockwise attention over packed rows for every platform; no [T, T] array exists.

The softmax is computed online (FlashAttention-2, arXiv 2307.08691): a block of queries reads the
blocks of keys up to its own one by one, with a running maximum and sum in float32. The backward
pass recomputes each block of probabilities from the saved sums.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

BLOCK = 512  # tokens
LOWEST = float(jnp.finfo(jnp.float32).min)
ATTENTION_RESIDUALS = "attention"  # name of the arrays that the remat policy 'attention' saves

Reach = Int[Array, ""] | None  # tokens that a token sees, itself included; None: all before it
First = Int[Array, ""] | None  # position of the first query in the row; None: 0
Sinks = Float[Array, "H"] | None  # logits that heads add to each softmax's sum (2309.17453)


class Span(NamedTuple):
    """Keys that queries see, and the queries' place in the row."""

    reach: Reach = None  # blocks out of reach are not computed
    first: First = None


class RowIds(NamedTuple):
    """Numbers that decide which tokens of a packed row see each other; [B, T] each."""

    segments: Int[Array, "B T"]
    prompts: Int[Array, "B T"] | None = None  # segment of the shared prompt that is seen too
    positions: Int[Array, "B T"] | None = None  # for windows; only with `prompts`


def visible(
    queries: RowIds, keys: RowIds, distance: Int[Array, "q k"], reach: Reach
) -> Bool[Array, "B q k"]:
    """Return True at the keys that queries see; `distance` is from a key's place to a query's."""
    seen = queries.segments[:, :, None] == keys.segments[:, None, :]
    if queries.prompts is not None:
        seen |= queries.prompts[:, :, None] == keys.segments[:, None, :]
    seen &= (distance >= 0)[None]
    if reach is None:
        return seen
    if queries.positions is None or keys.positions is None:
        return seen & (distance < reach)[None]
    return seen & (queries.positions[:, :, None] - keys.positions[:, None, :] < reach)


class Blocks(NamedTuple):
    """Attention inputs cut into blocks of b tokens; g = H / K query heads share a key head."""

    queries: Float[Array, "m B K g b E"]  # scaled
    keys: Float[Array, "n B K b E"]
    values: Float[Array, "n B K b E"]
    query_ids: RowIds  # [m, B, b]
    key_ids: RowIds  # [n, B, b]
    first: First
    sinks: Float[Array, "K g"] | None

    def start(self) -> Array | int:
        """Return the position of the first query in the row."""
        return 0 if self.first is None else self.first

    def skips(self, reach: Reach) -> bool:
        """Return True if blocks further away than `reach` hold no visible key."""
        return reach is not None and self.key_ids.prompts is None

    def before(self) -> Array | int:
        """Return the number of key blocks that begin before the first query."""
        return -(-self.start() // self.keys.shape[3])


def cut(array: Array, size: int, mode: str = "constant") -> Array:
    """Cut [B, T, ...] into [n, B, size, ...]; the last block is padded, with zeros by default."""
    pad = [(0, 0), (0, -array.shape[1] % size), *[(0, 0)] * (array.ndim - 2)]
    array = jnp.pad(array, pad, mode)
    return array.reshape(array.shape[0], -1, size, *array.shape[2:]).swapaxes(0, 1)


def _join(blocks: Array, length: int) -> Array:
    """Join the blocks of `cut` to [B, T, ...] again, without padding."""
    array = blocks.swapaxes(0, 1)
    return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :length]


def _cut_queries(queries: Float[Array, "B T H E"], kv_heads: int, size: int):
    blocks = cut(queries, size)
    grouped = blocks.reshape(*blocks.shape[:3], kv_heads, -1, blocks.shape[-1])
    return grouped.transpose(0, 1, 3, 4, 2, 5)


def _join_queries(blocks: Float[Array, "n B K g b E"], length: int):
    n, batch, kv_heads, group, size, width = blocks.shape
    blocks = blocks.transpose(0, 1, 4, 2, 3, 5)
    return _join(blocks.reshape(n, batch, size, kv_heads * group, width), length)


def _blocks(queries, keys, values, ids: RowIds, sinks, first) -> Blocks:
    length, kv_heads = queries.shape[1], keys.shape[2]
    size = min(BLOCK, length)
    query_ids = ids
    if first is not None:
        query_ids = jax.tree.map(
            lambda row: jax.lax.dynamic_slice_in_dim(row, first, length, 1), ids
        )
    return Blocks(
        _cut_queries(queries * queries.shape[-1] ** -0.5, kv_heads, size),
        cut(keys, size).swapaxes(2, 3),
        cut(values, size).swapaxes(2, 3),
        jax.tree.map(lambda row: cut(row, size), query_ids),
        jax.tree.map(lambda row: cut(row, size), ids),
        first,
        None if sinks is None else sinks.reshape(kv_heads, -1),
    )


def _scores(blocks: Blocks, reach: Reach, i: Array, j: Array) -> Float[Array, "B K g b c"]:
    """Return the scores of query block i with key block j; float32, LOWEST at masked keys."""
    scores = jnp.einsum(
        "bkgqe,bkce->bkgqc", blocks.queries[i], blocks.keys[j], preferred_element_type=jnp.float32
    )
    size = scores.shape[-1]
    position = jnp.arange(size)
    distance = (i - j) * size + blocks.start() + position[:, None] - position[None, :]
    query_ids = jax.tree.map(lambda row: row[i], blocks.query_ids)
    key_ids = jax.tree.map(lambda row: row[j], blocks.key_ids)
    seen = visible(query_ids, key_ids, distance, reach)
    return jnp.where(seen[:, None, None], scores, LOWEST)


def _forward(blocks: Blocks, reach: Reach):
    """Return attention output [n, B, K, g, b, E] and log-sum-exp per query [n, B, K, g, b]."""
    count, size = blocks.queries.shape[0], blocks.keys.shape[3]

    def attend_block(i):
        def add_keys(j, carry):
            mixed, largest, total = carry
            scores = _scores(blocks, reach, i, j)
            new = jnp.maximum(largest, scores.max(axis=-1))
            powers, shrink = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            more = jnp.einsum(
                "bkgqc,bkce->bkgqe",
                powers.astype(blocks.values.dtype),
                blocks.values[j],
                preferred_element_type=jnp.float32,
            )
            return mixed * shrink[..., None] + more, new, total * shrink + powers.sum(axis=-1)

        shape = blocks.queries.shape[1:]
        # Masked keys before a query's first visible key shrink to 0 when it is added.
        start = (jnp.zeros(shape), jnp.full(shape[:-1], LOWEST), jnp.zeros(shape[:-1]))
        if blocks.sinks is not None:  # a sink acts like a first key with the value 0
            largest = jnp.broadcast_to(blocks.sinks[..., None], shape[:-1])
            start = (jnp.zeros(shape), largest, jnp.ones(shape[:-1]))
        least = 0
        if blocks.skips(reach):
            least = jnp.maximum(i * size + blocks.start() + 1 - reach, 0) // size
        end = i + 1 + blocks.before()
        mixed, largest, total = jax.lax.fori_loop(least, end, add_keys, start)
        mixed = (mixed / total[..., None]).astype(blocks.values.dtype)
        return mixed, largest + jnp.log(total)

    return jax.lax.map(attend_block, jnp.arange(count))


def _backward(blocks: Blocks, reach: Reach, mixed, log_total, upstream):
    """Return gradients of scaled queries, keys and values, in blocks, and of sinks; float32."""
    count, size = blocks.queries.shape[0], blocks.keys.shape[3]
    # The softmax's own term, sum over keys of probability * its gradient (section 3.1).
    delta = jnp.sum(upstream.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dtype = blocks.queries.dtype

    def block_gradients(queries_gradient, j):
        def add_queries(i, carry):
            queries_gradient, keys_gradient, values_gradient = carry
            probability = jnp.exp(_scores(blocks, reach, i, j) - log_total[i][..., None])
            over = dot("bkgqe,bkce->bkgqc", upstream[i], blocks.values[j])
            change = (probability * (over - delta[i][..., None])).astype(dtype)
            values_gradient += dot("bkgqc,bkgqe->bkce", probability.astype(dtype), upstream[i])
            keys_gradient += dot("bkgqc,bkgqe->bkce", change, blocks.queries[i])
            more = dot("bkgqc,bkce->bkgqe", change, blocks.keys[j])
            return queries_gradient.at[i].add(more), keys_gradient, values_gradient

        zeros = jnp.zeros(blocks.keys.shape[1:])
        carry = (queries_gradient, zeros, zeros)
        least, end = j, count
        if blocks.first is not None:
            least = jnp.maximum(j - blocks.before(), 0)
        if blocks.skips(reach):  # past the last query that sees the block's last key
            last = (j + 1) * size + reach - 2 - blocks.start()
            end = jnp.minimum(last // size + 1, count)
        queries_gradient, *gradients = jax.lax.fori_loop(least, end, add_queries, carry)
        return queries_gradient, tuple(gradients)

    zeros = jnp.zeros(blocks.queries.shape)
    places = jnp.arange(len(blocks.keys))
    queries_gradient, (keys, values) = jax.lax.scan(block_gradients, zeros, places)
    sinks = None
    if blocks.sinks is not None:
        probability = jnp.exp(blocks.sinks[..., None] - log_total)
        sinks = -jnp.sum(probability * delta, axis=(0, 1, 4))
    return queries_gradient, keys, values, sinks


@jax.custom_vjp
def blocked_attention(
    queries: Float[Array, "B t H E"],
    keys: Float[Array, "B T K E"],
    values: Float[Array, "B T K E"],
    ids: RowIds,
    sinks: Sinks,  # one per query head; float32
    span: Span,
) -> Float[Array, "B t H E"]:
    """Return causal attention inside segments; adjacent query heads share a key head."""
    mixed, _ = _forward(_blocks(queries, keys, values, ids, sinks, span.first), span.reach)
    return _join_queries(mixed, queries.shape[1])


def _keep(queries, keys, values, ids, sinks, span):
    arrays = queries, keys, values, ids, sinks
    mixed, log_total = _forward(_blocks(*arrays, span.first), span.reach)
    mixed = checkpoint_name(_join_queries(mixed, queries.shape[1]), ATTENTION_RESIDUALS)
    log_total = checkpoint_name(log_total, ATTENTION_RESIDUALS)
    return mixed, (arrays, span, mixed, log_total)


def _gradients(residuals, upstream):
    arrays, span, mixed, log_total = residuals
    queries, keys, values, ids, sinks = arrays
    blocks = _blocks(queries, keys, values, ids, sinks, span.first)
    kv_heads, size, length = keys.shape[2], blocks.keys.shape[3], keys.shape[1]
    cut_queries = functools.partial(_cut_queries, kv_heads=kv_heads, size=size)
    d_queries, d_keys, d_values, d_sinks = _backward(
        blocks, span.reach, cut_queries(mixed), log_total, cut_queries(upstream)
    )
    d_queries = _join_queries(d_queries, queries.shape[1]) * queries.shape[-1] ** -0.5
    return (
        d_queries.astype(queries.dtype),
        _join(d_keys.swapaxes(2, 3), length).astype(keys.dtype),
        _join(d_values.swapaxes(2, 3), length).astype(values.dtype),
        None,
        None if d_sinks is None else d_sinks.reshape(-1),
        None,
    )


blocked_attention.defvjp(_keep, _gradients)
