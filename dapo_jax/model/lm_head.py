"""Output head of a language model, sharded by vocabulary: log-probabilities and entropies.

Logits are computed in chunks of tokens, so [R, T, V] never exists. Each device has the logits of
its own tokens over its own part of the vocabulary. The head is gathered over the other axes once
per call, and its gradient is summed in float32 over all chunks before it is reduced once. Autodiff
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


class Share:
    """Collectives of a device's share of the head, over the mesh axes that split it."""

    def __init__(self, mesh: Any):
        def axes(name: str) -> tuple[str, ...]:
            return sharding.active_axes(name) if mesh is not None else ()

        self.vocab, self.embed = axes("vocab"), axes("embed")
        of_rows = axes("batch") + axes("sequence")
        self.copies = tuple(axis for axis in of_rows if axis not in self.embed)

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
        """True at the k largest of each token's values over the whole vocabulary.

        By their places: a compiler may round a value that it computes twice in two ways.
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
        """Indices of targets in this device's part of the vocabulary; `size` where outside it."""
        if not self.vocab:
            return targets
        targets = targets - jax.lax.axis_index(self.vocab) * size
        return jnp.where((targets >= 0) & (targets < size), targets, size)


def cut_chunks(chunk_tokens: int, *arrays: Array) -> tuple[Array, ...]:
    """Cuts [r, t, ...] into [chunks, tokens, ...] of even size; the last chunk is padded."""
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


def logits_of(hidden: Float[Array, "n D"], head: Float[Array, "D v"], temperature: float):
    logits = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
    return logits / temperature


def _forward(share: Share, temperature: float, chunk_tokens: int, hidden, head, targets):
    whole = share.whole(head, hidden.dtype)

    def chunk_softmax(chunk):
        logits = logits_of(chunk[0], whole, temperature)
        # The largest is subtracted first, as in the sampler: large numbers differ by few digits.
        largest = share.largest(jnp.max(logits, axis=-1))
        logits -= largest[:, None]
        powers = jnp.exp(logits)
        at = share.local(chunk[1], logits.shape[1])[:, None]
        drawn = jnp.take_along_axis(logits, at, axis=-1, mode="fill", fill_value=0.0)[:, 0]
        sums = drawn, jnp.sum(powers, axis=-1), jnp.sum(powers * logits, axis=-1)
        drawn, total, weighted = share.add(jnp.stack(sums))
        log_total = jnp.log(total)
        return Softmax(drawn - log_total, log_total - weighted / total, largest, log_total)

    softmax = jax.lax.map(chunk_softmax, cut_chunks(chunk_tokens, hidden, targets))
    return jax.tree.map(lambda chunks: uncut(chunks, *targets.shape), softmax)


def _backward(share: Share, temperature: float, chunk_tokens: int, hidden, head, targets, *kept):
    """Gradients of hidden states and head.

    d log p(target) / d logit = 1[target] - p;  d entropy / d logit = -p (log p + entropy).

    Args:
        kept: the Softmax, and the gradients of logprobs and entropy, each [r, t].
    """
    whole = share.whole(head, hidden.dtype)

    def slope_of_chunk(chunk):
        states, targets, softmax, d_logprob, d_entropy = chunk
        logits = logits_of(states, whole, temperature)
        logprobs = logits - softmax.largest[:, None] - softmax.log_total[:, None]
        slope = d_logprob[:, None] + d_entropy[:, None] * (logprobs + softmax.entropy[:, None])
        change = -jnp.exp(logprobs) * slope
        at = share.local(targets, logits.shape[1])
        hit = jnp.arange(logits.shape[1])[None] == at[:, None]
        return (change + jnp.where(hit, d_logprob[:, None], 0.0)) / temperature

    cut = cut_chunks(chunk_tokens, hidden, targets, *jax.tree.leaves(kept))
    chunks = (*cut[:2], Softmax(*cut[2:6]), *cut[6:])
    return add_up(share, slope_of_chunk, hidden, head, whole, chunks)


def add_up(share: Share, slope_of_chunk: Callable, hidden, head, whole, chunks: tuple):
    """Gradients of hidden states and head, from that of each chunk's logits [n, v].

    Args:
        chunks: what `slope_of_chunk` takes; the first are hidden states.
    """

    def add_chunk(gradient, chunk):
        states, *_ = chunk
        change = slope_of_chunk(chunk).astype(hidden.dtype)
        gradient += jnp.dot(states.T, change, preferred_element_type=jnp.float32)
        back = share.add(jnp.dot(change, whole.T, preferred_element_type=jnp.float32))
        return gradient, back.astype(hidden.dtype)

    gradient, back = jax.lax.scan(add_chunk, jnp.zeros(whole.shape, jnp.float32), chunks)
    return uncut(back, *hidden.shape[:2]), share.reduced(gradient).astype(head.dtype)


def sharded(function: Callable, takes: str, gives: str):
    """Runs `function(share, *arrays)` on every device's own part.

    Args:
        takes, gives: a letter for each array: h(idden states), w(eights of a head), r(ows).
    """
    mesh = sharding.active_mesh()
    local = functools.partial(function, Share(mesh))
    if mesh is None:
        return local
    rows, weights = sharding.active_spec(*ROWS), sharding.active_spec(*WEIGHTS)
    specs = {"h": PartitionSpec(*rows, None), "w": weights, "r": rows}
    given = [specs[kind] for kind in gives]
    return jax.shard_map(
        local,
        in_specs=tuple(specs[kind] for kind in takes),
        out_specs=tuple(given) if len(given) > 1 else given[0],
        check_vma=False,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def head_logprobs(
    hidden: Float[Array, "R T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "R T"],
    temperature: float,
    chunk_tokens: int,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Log-probability of each target, and entropy of the distribution that it is from; float32.

    Args:
        chunk_tokens: number of tokens per device whose logits exist at the same time.
    """
    return _keep(hidden, head, targets, temperature, chunk_tokens)[0]


def _keep(hidden, head, targets, temperature, chunk_tokens):
    def local(share, *arrays):
        return _forward(share, temperature, chunk_tokens, *arrays)

    with jax.named_scope("head"):
        softmax = sharded(local, "hwr", "r")(hidden, head, targets)
    return (softmax.logprobs, softmax.entropy), (hidden, head, targets, softmax)


def _gradients(temperature, chunk_tokens, kept, upstream):
    def local(share, *arrays):
        return _backward(share, temperature, chunk_tokens, *arrays)

    hidden, head, targets, softmax = kept
    rows = (*softmax, *upstream)
    with jax.named_scope("head"):
        run = sharded(local, "hwr" + "r" * len(rows), "hw")
        back, gradient = run(hidden, head, targets, *rows)
    return back, gradient, None


head_logprobs.defvjp(_keep, _gradients)
