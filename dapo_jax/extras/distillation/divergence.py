"""Divergence of a policy's next-token distributions from a teacher's, sharded by vocabulary.

Both output heads are applied in chunks of tokens, so no [R, T, V] ever exists.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.model.decoder import head_kernel
from dapo_jax.model.lm_head import HeadShard, Scale, add_up, chunks_of, logits_of, sharded

MIN_REST = 1e-30  # probability of all tokens but the likeliest


class Divergence(NamedTuple):
    """Generalised Jensen-Shannon divergence of teacher P and student Q (GKD, arXiv 2306.13649).

    beta KL(P || M) + (1 - beta) KL(Q || M), with M = beta P + (1 - beta) Q. At the ends, which
    would be 0, it is its limit over beta and over 1 - beta: KL(P || Q) for 0, KL(Q || P) for 1.
    With `top_k`, the teacher's likeliest tokens are compared one by one, and all others as one.
    """

    beta: float = 0.5
    top_k: int = 0
    temperature: float = 1.0  # of both softmaxes

    def terms(self, p: Array, q: Array) -> Array:
        """Return each outcome's contribution from its log-probs."""
        mixture = self._mixture(p, q)
        p_weight, q_weight = self._weights()
        return p_weight * jnp.exp(p) * (p - mixture) + q_weight * jnp.exp(q) * (q - mixture)

    def slopes(self, p: Array, q: Array) -> Array:
        """Return derivatives with respect to q; normalisation cancels multiples of exp(q)."""
        if self.beta == 0:
            return -jnp.exp(p)
        return self._weights()[1] * jnp.exp(q) * (q - self._mixture(p, q))

    def _weights(self) -> tuple[float, float]:
        """Return the weights of both KL terms."""
        return (1 - self.beta, self.beta) if self.beta in (0, 1) else (self.beta, 1 - self.beta)

    def _mixture(self, p: Array, q: Array) -> Array:
        if self.beta in (0, 1):
            return p if self.beta else q
        return jnp.logaddexp(math.log(self.beta) + p, math.log1p(-self.beta) + q)


def divergence_of(algorithm: Algorithm) -> Divergence:
    """Return the divergence that an algorithm's settings choose."""
    a = algorithm
    return Divergence(a.distillation_beta, a.distillation_top_k, a.distillation_temperature)


def _log_softmax(shard: HeadShard, logits: Float[Array, "n v"]) -> Float[Array, "n v"]:
    logits -= shard.largest(jnp.max(logits, axis=-1))[:, None]
    return logits - jnp.log(shard.add(jnp.sum(jnp.exp(logits), axis=-1)))[:, None]


def _distributions(shard: HeadShard, divergence: Divergence, states: Sequence, heads: Sequence):
    """Return log-probs of teacher and student, the compared tokens, and log-probs of the rest.

    The log-probs are [n, v] and those of the rest [n, 1]; compared tokens are bool [n, v].
    """
    student, teacher = (
        _log_softmax(shard, logits_of(hidden, head, Scale(divergence.temperature)))
        for hidden, head in zip(states, heads, strict=True)
    )
    compared = jnp.ones(teacher.shape, bool)
    if divergence.top_k:
        compared = shard.likeliest(teacher, divergence.top_k)
    left = [jnp.sum(jnp.where(compared, 0.0, jnp.exp(x)), axis=-1) for x in (teacher, student)]
    rest = jnp.log(jnp.maximum(shard.add(jnp.stack(left)), MIN_REST))[..., None]
    return (teacher, student), compared, tuple(rest)


def _divergences(shard: HeadShard, divergence: Divergence, chunk_tokens: int, *arrays):
    hidden, head, teacher, teacher_head, needed = arrays
    heads = shard.whole(head, hidden.dtype), shard.whole(teacher_head, teacher.dtype)

    chunks = chunks_of(shard, chunk_tokens, needed)

    def of_chunk(*states):
        both, compared, rest = _distributions(shard, divergence, states, heads)
        terms = jnp.sum(jnp.where(compared, divergence.terms(*both), 0.0), axis=-1)
        return shard.add(terms) + divergence.terms(*rest)[:, 0]

    return chunks.uncut(chunks.map(of_chunk, *chunks.cut(hidden, teacher)))


def _divergence_gradients(shard: HeadShard, divergence: Divergence, chunk_tokens: int, *arrays):
    """Return gradients of the student's hidden states and head; the last array is upstream.

    d D / d logit = s - q sum(s), with the slopes s = d D / d log q.
    """
    hidden, head, teacher, teacher_head, needed, upstream = arrays
    heads = shard.whole(head, hidden.dtype), shard.whole(teacher_head, teacher.dtype)

    def slope_of_chunk(*chunk):
        *states, upstream = chunk
        both, compared, rest = _distributions(shard, divergence, states, heads)
        # A token of the rest has a slope in proportion to its probability.
        inside = jnp.exp(both[1] - rest[1]) * divergence.slopes(*rest)
        slopes = jnp.where(compared, divergence.slopes(*both), inside)
        total = shard.add(jnp.sum(slopes, axis=-1))[:, None]
        return (slopes - jnp.exp(both[1]) * total) * upstream[:, None] / divergence.temperature

    chunks = chunks_of(shard, chunk_tokens, needed)
    cut = chunks.cut(hidden, teacher, upstream)
    return add_up(shard, slope_of_chunk, chunks, hidden, head, heads[0], cut)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def head_divergence(
    hidden: Float[Array, "R T D"],  # final hidden states of both; the teacher's have no gradient
    head: Float[Array, "D V"],
    teacher: Float[Array, "R T E"],  # final hidden states of both; the teacher's have no gradient
    teacher_head: Float[Array, "E V"],
    needed: Bool[Array, "R T"],  # elsewhere it is 0
    divergence: Divergence,
    chunk_tokens: int,  # tokens per device with logits of both in memory at the same time
) -> Float[Array, "R T"]:
    """Return the student's divergence from the teacher's next-token distributions, in nats."""
    arrays = hidden, head, teacher, teacher_head, needed
    with jax.named_scope("divergence"):
        return sharded(_divergences, "hwhwr", "r", divergence, chunk_tokens)(*arrays)


def _gradients_of_divergence(divergence, chunk_tokens, kept, upstream):
    with jax.named_scope("divergence"):
        run = sharded(_divergence_gradients, "hwhwrr", "hw", divergence, chunk_tokens)
        return *run(*kept, upstream), None, None, None


head_divergence.defvjp(lambda *args: (head_divergence(*args), args[:5]), _gradients_of_divergence)


def divergences_of(
    params: Any,
    hidden: Float[Array, "R T D"],
    teacher_params: Any,
    teacher_hidden: Float[Array, "R T E"],
    needed: Bool[Array, "R T"],
    divergence: Divergence,
    chunk_tokens: int,
) -> Float[Array, "R T"]:
    """Return, at t, the divergence of the distributions of tokens[t]; float32, in nats."""
    head, teacher_head = head_kernel(params), head_kernel(teacher_params)
    wanted = jnp.roll(needed, -1, axis=1)
    divergences = head_divergence(
        hidden, head, teacher_hidden, teacher_head, wanted, divergence, chunk_tokens
    )
    return jnp.roll(cast(Array, divergences), 1, axis=1)
