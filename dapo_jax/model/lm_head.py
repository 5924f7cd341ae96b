"""Output head of a language model, sharded by vocabulary: log-probs and entropies.

Logits are computed in chunks of tokens, so [R, T, V] never exists, and only of the tokens that a
caller needs: prompts, observations of tools and padding have none. If all of them fit into one
chunk, they are kept for the gradient instead of computed again. Each device has the logits of its
own tokens over its own part of the vocabulary. The head is gathered over the other axes once per
call, and its gradient is summed in float32 over all chunks and then reduced once. Autodiff would do
both in every chunk, in the compute dtype.
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
MAX_PIECES = 4  # of the tokens that fit into one chunk
OUTSIDE = -1e4  # logit of a token that is no part of the distribution; its exp is 0
MIN_PIECE_TOKENS = 1024  # fewer would read the head for longer than they multiply it


class Softmax(NamedTuple):
    """Statistics of each token's distribution over the vocabulary or a part; float32."""

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
        rows = axes("batch") + axes("sequence")
        self.copies = tuple(axis for axis in rows if axis not in self.embed)
        outside = mesh.manual_axes if mesh is not None else ()  # those of `per_replica`
        self.all_rows = tuple(dict.fromkeys((*rows, *outside)))

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

    def local(self, targets: Int[Array, "n ..."], size: int) -> Int[Array, "n ..."]:
        """Return indices of targets in this device's part of the vocabulary; `size` if outside."""
        if not self.vocab:
            return targets
        targets = targets - jax.lax.axis_index(self.vocab) * size
        return jnp.where((targets >= 0) & (targets < size), targets, size)


class Chunks(NamedTuple):
    """The tokens [r, t] of a device in chunks of equal size; those that are needed come first."""

    needed: Bool[Array, "r t"]
    order: Int[Array, "r*t"]  # of the tokens in the chunks
    count: Int[Array, ""]  # number of chunks that any device needs, at most `total`
    total: int
    size: int  # tokens of a chunk

    def cut(self, *arrays: Array | None) -> tuple[Any, ...]:
        """Return [r, t, ...] as [total, size, ...]; the last chunk is padded."""

        def cut(array: Array | None) -> Array | None:
            if array is None:
                return None
            flat = jnp.asarray(array).reshape(-1, *array.shape[2:])[self.order]
            pad = [(0, self.total * self.size - len(flat))] + [(0, 0)] * (flat.ndim - 1)
            return jnp.pad(flat, pad).reshape(self.total, self.size, *flat.shape[1:])

        return tuple(map(cut, arrays))

    def uncut(self, chunks: Array) -> Array:
        """Return [total, size, ...] as [r, t, ...], 0 on tokens that are not needed."""
        flat = chunks.reshape(-1, *chunks.shape[2:])[: len(self.order)]
        back = jnp.zeros_like(flat).at[self.order].set(flat, unique_indices=True)
        back = back.reshape(*self.needed.shape, *back.shape[1:])
        return jnp.where(self.needed.reshape(self.needed.shape + (1,) * (back.ndim - 2)), back, 0)

    def map(self, function: Callable, *chunks: Any) -> Any:
        """Return the results of a function on each chunk that is needed, and zeros for the rest."""

        def body(i: Any, results: Any) -> Any:
            return put(results, function(*take(chunks, i)), i)

        shapes = jax.eval_shape(lambda: function(*take(chunks, 0)))
        zeros = jax.tree.map(lambda x: jnp.zeros((self.total, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, self.count, body, zeros)


def take(tree: Any, index: Any) -> Any:
    """Return the entries of arrays at an index of their first axis."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(tree: Any, entries: Any, index: Any) -> Any:
    """Return arrays with other entries at an index of their first axis."""
    place = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
    return jax.tree.map(place, tree, entries)


def chunks_of(shard: HeadShard, chunk_tokens: int, needed: Bool[Array, "r t"]) -> Chunks:
    """Return the chunks of a device's tokens, of at most `chunk_tokens`."""
    pieces = min(MAX_PIECES, math.ceil(needed.size / MIN_PIECE_TOKENS))
    total = max(math.ceil(needed.size / chunk_tokens), pieces)
    size = math.ceil(needed.size / total)
    count = (jnp.sum(needed) + size - 1) // size
    if shard.all_rows:  # all devices take as many turns, since they exchange in each
        count = jax.lax.pmax(count, shard.all_rows)
    order = jnp.argsort(jnp.logical_not(needed).reshape(-1), stable=True)
    return Chunks(needed, order, count, total, size)


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


def _within(logits: Float[Array, "n v"], edges: Array | None, at: Int[Array, "n"]) -> Array:
    """Return the logits, `OUTSIDE` for tokens below their row's edge, except the target.

    Logits are relative to the largest. Rounding may move a sampled token below its edge.
    """
    if edges is None:
        return logits
    is_target = jnp.arange(logits.shape[1]) == at[:, None]
    return jnp.where((logits >= edges[:, None]) | is_target, logits, OUTSIDE)


def _forward(
    shard: HeadShard,
    scale: Scale,
    chunk_tokens: int,
    keeps: bool,
    *arrays,  # hidden, head, targets, needed, edges
):
    """Return the `Softmax` of each token, and with `keeps` the logits less the largest."""
    hidden, head, targets, needed, edges = arrays
    whole = shard.whole(head, hidden.dtype)
    chunks = chunks_of(shard, chunk_tokens, needed)

    def chunk_softmax(states, targets, edges):
        logits = logits_of(states, whole, scale)
        # The largest is subtracted first, as in the sampler: large numbers differ by few digits.
        largest = shard.largest(jnp.max(logits, axis=-1))
        at = shard.local(targets, logits.shape[1])
        logits = _within(logits - largest[:, None], edges, at)
        powers = jnp.exp(logits)
        target_logits = jnp.take_along_axis(
            logits, at[:, None], axis=-1, mode="fill", fill_value=0.0
        )[:, 0]
        sums = target_logits, jnp.sum(powers, axis=-1), jnp.sum(powers * logits, axis=-1)
        target_logits, total, weighted = shard.add(jnp.stack(sums))
        log_total = jnp.log(total)
        softmax = Softmax(
            target_logits - log_total, log_total - weighted / total, largest, log_total
        )
        return softmax, logits if keeps else None

    softmax, kept = chunks.map(chunk_softmax, *chunks.cut(hidden, targets, edges))
    return *map(chunks.uncut, softmax), *([kept] if keeps else [])


def _backward(shard: HeadShard, scale: Scale, chunk_tokens: int, *arrays):
    """Return gradients of hidden states and head.

    d log p(target) / d logit = 1[target] - p;  d entropy / d logit = -p (log p + entropy).
    """
    hidden, head, targets, needed, edges, *rows = arrays
    whole = shard.whole(head, hidden.dtype)
    chunks = chunks_of(shard, chunk_tokens, needed)

    def slope_of_chunk(states, targets, edges, *rest):
        softmax, (d_logprob, d_entropy, *kept) = Softmax(*rest[:4]), rest[4:]
        at = shard.local(targets, whole.shape[1])
        if kept:
            logits = kept[0]
        else:
            logits = logits_of(states, whole, scale) - softmax.largest[:, None]
            logits = _within(logits, edges, at)
        logprobs = logits - softmax.log_total[:, None]
        slope = d_logprob[:, None] + d_entropy[:, None] * (logprobs + softmax.entropy[:, None])
        change = -jnp.exp(logprobs) * slope
        hit = jnp.arange(logprobs.shape[1])[None] == at[:, None]
        logits += softmax.largest[:, None]
        return scale.gradient(change + jnp.where(hit, d_logprob[:, None], 0.0), logits)

    cut = *chunks.cut(hidden, targets, edges, *rows[:6]), *rows[6:]  # the logits are cut already
    return add_up(shard, slope_of_chunk, chunks, hidden, head, whole, cut)


def add_up(
    shard: HeadShard, slope_of_chunk: Callable, chunks: Chunks, hidden, head, whole, cut: tuple
):
    """Return gradients of hidden states and head; `slope_of_chunk` gives those of logits [n, v]."""

    def add_chunk(i, carry):
        gradient, back = carry
        (states, *rest), counts = take((cut, needed), i)
        change = jnp.where(counts[:, None], slope_of_chunk(states, *rest), 0.0)
        change = change.astype(hidden.dtype)
        gradient += jnp.dot(states.T, change, preferred_element_type=jnp.float32)
        state_gradients = shard.add(jnp.dot(change, whole.T, preferred_element_type=jnp.float32))
        return gradient, put(back, state_gradients.astype(hidden.dtype), i)

    (needed,) = chunks.cut(chunks.needed)  # the last chunk has others too
    zeros = jnp.zeros(whole.shape, jnp.float32), jnp.zeros_like(cut[0])
    gradient, back = jax.lax.fori_loop(0, chunks.count, add_chunk, zeros)
    return chunks.uncut(back), shard.reduced(gradient).astype(head.dtype)


def _row_axes() -> tuple[str, ...]:
    """Return the mesh axes that cut the tokens of rows."""
    return sharding.active_axes("batch") + sharding.active_axes("sequence")


def sharded(function: Callable, takes: str, gives: str, *options: Any):
    """Return `function(shard, *options, *arrays)` mapped over devices.

    `takes` and `gives` have a letter per array: h(idden states), w(eights of a head), r(ows), and
    l(ogits) [chunks, tokens, V].
    """
    mesh = sharding.active_mesh()
    local = functools.partial(function, HeadShard(mesh), *options)
    if mesh is None:
        return local
    rows, weights = sharding.active_spec(*ROWS), sharding.active_spec(*WEIGHTS)
    specs = {"h": PartitionSpec(*rows, None), "w": weights, "r": rows}
    specs["l"] = PartitionSpec(_row_axes() or None, None, weights[-1])
    out_specs = [specs[kind] for kind in gives]
    return jax.shard_map(
        local,
        in_specs=tuple(specs[kind] for kind in takes),
        out_specs=tuple(out_specs) if len(out_specs) > 1 else out_specs[0],
        check_vma=False,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def head_logprobs(
    hidden: Float[Array, "R T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "R T"],
    needed: Bool[Array, "R T"],
    scale: Scale,
    chunk_tokens: int,  # tokens per device with logits in memory at the same time
    edges: Float[Array, "R T"] | None = None,  # least logit less the largest that is in the support
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Return the log-prob of each target and the entropy of its distribution; float32.

    With edges the distribution has the target and the tokens at or above the edge alone; the
    gradient takes this set as fixed. Both are 0, and have no gradient, where they are not needed.
    """
    return _run((hidden, head, targets, needed, edges), scale, chunk_tokens, keeps=False)[0]


def _run(arrays, scale, chunk_tokens, keeps):
    with jax.named_scope("head"):
        gives = "rrrr" + "l" * keeps
        run = sharded(_forward, "hwrrr", gives, scale, chunk_tokens, keeps)
        logprobs, entropy, *rest = run(*arrays)
    return (logprobs, entropy), (*arrays, logprobs, entropy, *rest)


def _keep(hidden, head, targets, needed, scale, chunk_tokens, edges):
    sizes = getattr(sharding.active_mesh(), "shape", {})  # no mesh: one device
    fits = needed.size <= chunk_tokens * math.prod(sizes.get(axis, 1) for axis in _row_axes())
    return _run((hidden, head, targets, needed, edges), scale, chunk_tokens, keeps=fits)


def _gradients(scale, chunk_tokens, residuals, upstream):
    arrays, rows, logits = residuals[:5], (*residuals[5:9], *upstream), residuals[9:]
    with jax.named_scope("head"):
        takes = "hwrrr" + "r" * len(rows) + "l" * len(logits)
        run = sharded(_backward, takes, "hw", scale, chunk_tokens)
        back, gradient = run(*arrays, *rows, *logits)
    return back, gradient, None, None, None


head_logprobs.defvjp(_keep, _gradients)
