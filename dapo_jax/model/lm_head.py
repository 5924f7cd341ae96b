"""Output head of a language model, sharded by vocabulary: log-probs and entropies.

Logits are computed in chunks of tokens, so [R, T, V] never exists. Each device has the logits of
its own tokens over its own part of the vocabulary. The head is gathered over the other axes once
per call, and its gradient is summed in float32 over all chunks and then reduced once. Autodiff
would do both in every chunk, in the compute dtype.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.runtime import sharding

ROWS, WEIGHTS = ("batch", "sequence"), ("embed", "vocab")  # logical names


class Softmax(NamedTuple):
    """Statistics of each token's distribution over the whole vocabulary; float32."""

    logprobs: Float[Array, "R T"]  # of the target
    entropy: Float[Array, "R T"]
    largest: Float[Array, "R T"]  # logit, after the temperature
    log_total: Float[Array, "R T"]  # of exp(logit - largest)


class HeadShard:
    """Collectives over the mesh axes that cut the head, called by each device with its shard."""

    def __init__(self, mesh: Any):
        def axes(name: str) -> tuple[str, ...]:
            return sharding.active_axes(name) if mesh is not None else ()

        self.vocab = axes("vocab")
        self.embed = axes("embed")
        row_axes = axes("batch") + axes("sequence")
        self.copies = tuple(axis for axis in row_axes if axis not in self.embed)

    def whole(self, head: Float[Array, "d v"], dtype: Any) -> Float[Array, "D v"]:
        head = head.astype(dtype)
        return jax.lax.all_gather(head, self.embed, tiled=True) if self.embed else head

    def reduced(self, gradient: Float[Array, "D v"]) -> Float[Array, "d v"]:
        if self.embed:
            gradient = jax.lax.psum_scatter(gradient, self.embed, tiled=True)
        return jax.lax.psum(gradient, self.copies) if self.copies else gradient

    def add(self, values: Array) -> Array:
        return jax.lax.psum(values, self.vocab) if self.vocab else values

    def largest(self, values: Array) -> Array:
        return jax.lax.pmax(values, self.vocab) if self.vocab else values

    def likeliest(self, values: Float[Array, "n v"], k: int) -> Bool[Array, "n v"]:
        """Return True at the k largest of each token's values over the whole vocabulary.

        They are found by index: a compiler may round a value differently if it computes it twice.
        """
        size = values.shape[1]
        best, at = jax.lax.top_k(values, min(k, size))
        if self.vocab:
            at += jax.lax.axis_index(self.vocab) * size
            best, at = (jax.lax.all_gather(x, self.vocab, axis=1, tiled=True) for x in (best, at))
            chosen = jax.lax.top_k(best, min(k, best.shape[1]))[1]
            at = self.local(jnp.take_along_axis(at, chosen, axis=1), size)
        rows = jnp.arange(len(values))[:, None]
        return jnp.zeros(values.shape, bool).at[rows, at].set(True, mode="drop")

    def local(self, targets: Int[Array, "n ..."], size: int) -> Int[Array, "n ..."]:
        """Return indices of targets in this device's part of the vocabulary; `size` if outside."""
        if not self.vocab:
            return targets
        targets = targets - jax.lax.axis_index(self.vocab) * size
        return jnp.where((targets >= 0) & (targets < size), targets, size)


def cut_chunks(chunk_tokens: int, *arrays: Array) -> tuple[Array, ...]:
    """Cut [r, t, ...] into [chunks, tokens, ...] of equal size; the last chunk is padded."""
    tokens = math.prod(arrays[0].shape[:2])
    count = math.ceil(tokens / chunk_tokens)
    size = math.ceil(tokens / count)

    def cut(array: Array) -> Array:
        flat = array.reshape(tokens, *array.shape[2:])
        pad = [(0, count * size - tokens)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, pad).reshape(count, size, *flat.shape[1:])

    return tuple(map(cut, arrays))


def uncut(chunks: Array, rows: int, length: int) -> Array:
    flat = chunks.reshape(-1, *chunks.shape[2:])
    return flat[: rows * length].reshape(rows, length, *flat.shape[1:])


class Scale(NamedTuple):
    """How logits follow from the products of hidden states and head."""

    temperature: float = 1.0
    cap: float | None = None  # products x become cap tanh(x / cap) before the temperature

    def logits(self, products: Float[Array, "n v"]) -> Float[Array, "n v"]:
        if self.cap is not None:
            products = self.cap * jnp.tanh(products / self.cap)
        return products / self.temperature

    def gradient(self, slope: Float[Array, "n v"], logits: Float[Array, "n v"]) -> Array:
        """Return the gradient of the products from that of the logits."""
        if self.cap is not None:
            slope *= 1 - jnp.square(logits * (self.temperature / self.cap))
        return slope / self.temperature


def logits_of(hidden: Float[Array, "n D"], head: Float[Array, "D v"], scale: Scale):
    return scale.logits(jnp.dot(hidden, head, preferred_element_type=jnp.float32))


def _forward(shard: HeadShard, scale: Scale, chunk_tokens: int, hidden, head, targets):
    whole = shard.whole(head, hidden.dtype)

    def chunk_softmax(chunk):
        logits = logits_of(chunk[0], whole, scale)
        # The largest is subtracted first, as in the sampler: large numbers differ by few digits.
        largest = shard.largest(jnp.max(logits, axis=-1))
        logits -= largest[:, None]
        powers = jnp.exp(logits)
        at = shard.local(chunk[1], logits.shape[1])[:, None]
        drawn = jnp.take_along_axis(logits, at, axis=-1, mode="fill", fill_value=0.0)[:, 0]
        sums = drawn, jnp.sum(powers, axis=-1), jnp.sum(powers * logits, axis=-1)
        drawn, total, weighted = shard.add(jnp.stack(sums))
        log_total = jnp.log(total)
        return Softmax(drawn - log_total, log_total - weighted / total, largest, log_total)

    softmax = jax.lax.map(chunk_softmax, cut_chunks(chunk_tokens, hidden, targets))
    return jax.tree.map(lambda chunks: uncut(chunks, *targets.shape), softmax)


def _backward(shard: HeadShard, scale: Scale, chunk_tokens: int, hidden, head, targets, *kept):
    """Return gradients of hidden states and head.

    d log p(target) / d logit = 1[target] - p;  d entropy / d logit = -p (log p + entropy).
    """
    whole = shard.whole(head, hidden.dtype)

    def slope_of_chunk(chunk):
        states, targets, softmax, d_logprob, d_entropy = chunk
        logits = logits_of(states, whole, scale)
        logprobs = logits - softmax.largest[:, None] - softmax.log_total[:, None]
        slope = d_logprob[:, None] + d_entropy[:, None] * (logprobs + softmax.entropy[:, None])
        change = -jnp.exp(logprobs) * slope
        at = shard.local(targets, logits.shape[1])
        hit = jnp.arange(logits.shape[1])[None] == at[:, None]
        return scale.gradient(change + jnp.where(hit, d_logprob[:, None], 0.0), logits)

    cut = cut_chunks(chunk_tokens, hidden, targets, *jax.tree.leaves(kept))
    chunks = (*cut[:2], Softmax(*cut[2:6]), *cut[6:])
    return add_up(shard, slope_of_chunk, hidden, head, whole, chunks)


def add_up(shard: HeadShard, slope_of_chunk: Callable, hidden, head, whole, chunks: tuple):
    """Return gradients of hidden states and head from that of each chunk's logits [n, v]."""

    def add_chunk(gradient, chunk):
        states, *_ = chunk
        change = slope_of_chunk(chunk).astype(hidden.dtype)
        gradient += jnp.dot(states.T, change, preferred_element_type=jnp.float32)
        back = shard.add(jnp.dot(change, whole.T, preferred_element_type=jnp.float32))
        return gradient, back.astype(hidden.dtype)

    gradient, back = jax.lax.scan(add_chunk, jnp.zeros(whole.shape, jnp.float32), chunks)
    return uncut(back, *hidden.shape[:2]), shard.reduced(gradient).astype(head.dtype)


def sharded(function: Callable, takes: str, gives: str, *options: Any):
    """Return `function(shard, *options, *arrays)` mapped over devices.

    `takes` and `gives` have a letter per array: h(idden states), w(eights of a head), r(ows).
    """
    mesh = sharding.active_mesh()
    local = functools.partial(function, HeadShard(mesh), *options)
    if mesh is None:
        return local
    rows, weights = sharding.active_spec(*ROWS), sharding.active_spec(*WEIGHTS)
    specs = {"h": PartitionSpec(*rows, None), "w": weights, "r": rows}
    out_specs = [specs[kind] for kind in gives]
    return jax.shard_map(
        local,
        in_specs=tuple(specs[kind] for kind in takes),
        out_specs=tuple(out_specs) if len(out_specs) > 1 else out_specs[0],
        check_vma=False,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def head_logprobs(
    hidden: Float[Array, "R T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "R T"],
    scale: Scale,
    chunk_tokens: int,  # tokens per device with logits in memory at the same time
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Return the log-prob of each target and the entropy of its distribution; float32."""
    return _keep(hidden, head, targets, scale, chunk_tokens)[0]


def _keep(hidden, head, targets, scale, chunk_tokens):
    with jax.named_scope("head"):
        run = sharded(_forward, "hwr", "r", scale, chunk_tokens)
        softmax = run(hidden, head, targets)
    return (softmax.logprobs, softmax.entropy), (hidden, head, targets, softmax)


def _gradients(scale, chunk_tokens, kept, upstream):
    hidden, head, targets, softmax = kept
    rows = (*softmax, *upstream)
    with jax.named_scope("head"):
        takes = "hwr" + "r" * len(rows)
        run = sharded(_backward, takes, "hw", scale, chunk_tokens)
        back, gradient = run(hidden, head, targets, *rows)
    return back, gradient, None


head_logprobs.defvjp(_keep, _gradients)
