"""Attention over packed rows in blocks, so that no [T, T] array exists; every platform runs it.

The softmax is computed online (FlashAttention-2, arXiv 2307.08691): a block of queries meets the
blocks of keys up to its own one after the other, with a running maximum and sum in float32. The
backward pass recomputes each block of probabilities from the kept sums.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

BLOCK = 512  # tokens
LOWEST = float(jnp.finfo(jnp.float32).min)
ATTENTION_RESIDUALS = "attention"  # what the remat policy of that name keeps


class Blocks(NamedTuple):
    """Inputs cut into n blocks of b tokens; g = H / K query heads share a key."""

    queries: Float[Array, "n B K g b E"]  # scaled
    keys: Float[Array, "n B K b E"]
    values: Float[Array, "n B K b E"]
    segment_ids: Int[Array, "n B b"]


def _cut(array: Array, size: int) -> Array:
    """[B, T, ...] to [n, B, b, ...]; the last block is filled up with zeros."""
    pad = [(0, 0)] * array.ndim
    pad[1] = (0, -array.shape[1] % size)
    array = jnp.pad(array, pad)
    return array.reshape(array.shape[0], -1, size, *array.shape[2:]).swapaxes(0, 1)


def _join(blocks: Array, length: int) -> Array:
    """The inverse of `_cut`."""
    array = blocks.swapaxes(0, 1)
    return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :length]


def _cut_queries(queries: Float[Array, "B T H E"], kv_heads: int, size: int):
    blocks = _cut(queries, size)
    grouped = blocks.reshape(*blocks.shape[:3], kv_heads, -1, blocks.shape[-1])
    return grouped.transpose(0, 1, 3, 4, 2, 5)


def _join_queries(blocks: Float[Array, "n B K g b E"], length: int):
    n, batch, kv_heads, group, size, width = blocks.shape
    blocks = blocks.transpose(0, 1, 4, 2, 3, 5)
    return _join(blocks.reshape(n, batch, size, kv_heads * group, width), length)


def _blocks(queries, keys, values, segment_ids) -> Blocks:
    size, kv_heads = min(BLOCK, queries.shape[1]), keys.shape[2]
    return Blocks(
        _cut_queries(queries * queries.shape[-1] ** -0.5, kv_heads, size),
        _cut(keys, size).swapaxes(2, 3),
        _cut(values, size).swapaxes(2, 3),
        _cut(segment_ids, size),
    )


def _scores(blocks: Blocks, i: Array, j: Array) -> Float[Array, "B K g b c"]:
    """Of query block i with key block j; float32, the lowest number where a key is not seen."""
    scores = jnp.einsum(
        "bkgqe,bkce->bkgqc", blocks.queries[i], blocks.keys[j], preferred_element_type=jnp.float32
    )
    size = scores.shape[-1]
    place = jnp.arange(size)
    causal = (i - j) * size + place[:, None] >= place[None, :]
    same = blocks.segment_ids[i][:, :, None] == blocks.segment_ids[j][:, None, :]
    return jnp.where((same & causal[None])[:, None, None], scores, LOWEST)


def _forward(blocks: Blocks):
    """Attended values [n, B, K, g, b, E] and the log of each query's sum [n, B, K, g, b]."""
    count = blocks.queries.shape[0]

    def of_queries(i):
        def meet(j, carry):
            mixed, largest, total = carry
            scores = _scores(blocks, i, j)
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
        # What a query meets before its first visible key shrinks to nothing once that comes.
        start = (jnp.zeros(shape), jnp.full(shape[:-1], LOWEST), jnp.zeros(shape[:-1]))
        mixed, largest, total = jax.lax.fori_loop(0, i + 1, meet, start)
        mixed = (mixed / total[..., None]).astype(blocks.values.dtype)
        return mixed, largest + jnp.log(total)

    return jax.lax.map(of_queries, jnp.arange(count))


def _backward(blocks: Blocks, mixed, log_total, upstream):
    """Gradients of queries (scaled ones), keys and values, in blocks; float32."""
    count = blocks.queries.shape[0]
    # The softmax's own term, sum over keys of probability * its gradient (section 3.1).
    own = jnp.sum(upstream.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dtype = blocks.queries.dtype

    def of_keys(queries_gradient, j):
        def meet(i, carry):
            queries_gradient, keys_gradient, values_gradient = carry
            probability = jnp.exp(_scores(blocks, i, j) - log_total[i][..., None])
            over = dot("bkgqe,bkce->bkgqc", upstream[i], blocks.values[j])
            change = (probability * (over - own[i][..., None])).astype(dtype)
            values_gradient += dot("bkgqc,bkgqe->bkce", probability.astype(dtype), upstream[i])
            keys_gradient += dot("bkgqc,bkgqe->bkce", change, blocks.queries[i])
            more = dot("bkgqc,bkce->bkgqe", change, blocks.keys[j])
            return queries_gradient.at[i].add(more), keys_gradient, values_gradient

        zeros = jnp.zeros(blocks.keys.shape[1:])
        carry = (queries_gradient, zeros, zeros)
        queries_gradient, *found = jax.lax.fori_loop(j, count, meet, carry)
        return queries_gradient, tuple(found)

    zeros = jnp.zeros(blocks.queries.shape)
    queries_gradient, (keys, values) = jax.lax.scan(of_keys, zeros, jnp.arange(count))
    return queries_gradient, keys, values


@jax.custom_vjp
def blocked_attention(
    queries: Float[Array, "B T H E"],
    keys: Float[Array, "B T K E"],
    values: Float[Array, "B T K E"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T H E"]:
    """Causal attention inside segments; query heads of a group are neighbours."""
    mixed, _ = _forward(_blocks(queries, keys, values, segment_ids))
    return _join_queries(mixed, queries.shape[1])


def _keep(queries, keys, values, segment_ids):
    mixed, log_total = _forward(_blocks(queries, keys, values, segment_ids))
    mixed = checkpoint_name(_join_queries(mixed, queries.shape[1]), ATTENTION_RESIDUALS)
    log_total = checkpoint_name(log_total, ATTENTION_RESIDUALS)
    return mixed, (queries, keys, values, segment_ids, mixed, log_total)


def _gradients(kept, upstream):
    queries, keys, values, segment_ids, mixed, log_total = kept
    blocks = _blocks(queries, keys, values, segment_ids)
    kv_heads, size, length = keys.shape[2], blocks.keys.shape[3], queries.shape[1]
    cut = functools.partial(_cut_queries, kv_heads=kv_heads, size=size)
    of_queries, of_keys, of_values = _backward(blocks, cut(mixed), log_total, cut(upstream))
    of_queries = _join_queries(of_queries, length) * queries.shape[-1] ** -0.5
    return (
        of_queries.astype(queries.dtype),
        _join(of_keys.swapaxes(2, 3), length).astype(keys.dtype),
        _join(of_values.swapaxes(2, 3), length).astype(values.dtype),
        None,
    )


blocked_attention.defvjp(_keep, _gradients)
