"""Divergence of a policy's next-token distributions from a teacher's, sharded by vocabulary.

Both output heads are applied in chunks of tokens, so no [R, T, V] ever exists.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.model.decoder import head_kernel
from dapo_jax.model.lm_head import HeadShard, Scale, add_up, chunks_of, logits_of, sharded


class Divergence(NamedTuple):
    """Generalised Jensen-Shannon divergence of teacher P and student Q (GKD, arXiv 2306.13649).

    beta KL(P || M) + (1 - beta) KL(Q || M), with M = beta P + (1 - beta) Q. At the ends, which
    would be 0, it is its limit over beta and over 1 - beta: KL(P || Q) for 0, KL(Q || P) for 1.
    """

    beta: float = 0.5
    temperature: float = 1.0  # of both softmaxes

    def terms_and_slopes(self, p: Array, q: Array) -> tuple[Array, Array]:
        """Return each token's contribution from its log-probs, and its derivative in q.

        Multiples of exp(q) are left out of the derivative: normalisation cancels them.
        """
        beta = self.beta
        if beta == 0:
            return jnp.exp(p) * (p - q), -jnp.exp(p)
        if beta == 1:
            slopes = jnp.exp(q) * (q - p)
            return slopes, slopes
        mixture = jnp.logaddexp(math.log(beta) + p, math.log1p(-beta) + q)
        slopes = (1 - beta) * jnp.exp(q) * (q - mixture)
        return beta * jnp.exp(p) * (p - mixture) + slopes, slopes


def _log_softmax(shard: HeadShard, logits: Float[Array, "n v"]) -> Float[Array, "n v"]:
    logits -= shard.largest(jnp.max(logits, axis=-1))[:, None]
    return logits - jnp.log(shard.add(jnp.sum(jnp.exp(logits), axis=-1)))[:, None]


@jax.named_scope("divergence")
def _run(shard: HeadShard, divergence: Divergence, chunk_tokens: int, *arrays):
    """Return the divergences; with `upstream` gradients of the student's hidden states and head.

    d D / d logit = s - q sum(s), with the slopes s = d D / d log q.
    """
    hidden, teacher, head, teacher_head, needed, *upstream = arrays
    heads = shard.whole(head, hidden.dtype), shard.whole(teacher_head, teacher.dtype)
    chunks = chunks_of(shard, chunk_tokens, needed)
    cut = chunks.cut(hidden, teacher, *upstream)

    def compare(*states: Array) -> tuple[Array, Array, Array]:
        student, teacher = (
            _log_softmax(shard, logits_of(hidden, head, Scale(divergence.temperature)))
            for hidden, head in zip(states, heads, strict=True)
        )
        return student, *divergence.terms_and_slopes(teacher, student)

    def slope_of_chunk(*chunk: Array) -> Array:
        *states, upstream = chunk
        student, _, slopes = compare(*states)
        slopes -= jnp.exp(student) * shard.add(jnp.sum(slopes, axis=-1))[:, None]
        return slopes * upstream[:, None] / divergence.temperature

    if upstream:
        return add_up(shard, slope_of_chunk, chunks, hidden, head, heads[0], cut)
    terms = chunks.map(lambda *states: shard.add(jnp.sum(compare(*states)[1], axis=-1)), *cut)
    return chunks.uncut(terms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def head_divergence(
    hidden: tuple[Float[Array, "R T D"], Float[Array, "R T E"]],  # of student and teacher
    heads: tuple[Float[Array, "D V"], Float[Array, "E V"]],
    needed: Bool[Array, "R T"],  # elsewhere it is 0
    divergence: Divergence,
    chunk_tokens: int,  # tokens per device with logits of both in memory at the same time
) -> Float[Array, "R T"]:
    """Return the student's divergence from the teacher's next-token distributions, in nats."""
    return sharded(_run, "hhwwr", "r", divergence, chunk_tokens)(*hidden, *heads, needed)


def _gradients(divergence, chunk_tokens, kept, upstream):
    hidden, heads, needed = kept
    run = sharded(_run, "hhwwrr", "hw", divergence, chunk_tokens)
    back, gradient = run(*hidden, *heads, needed, upstream)
    return (back, None), (gradient, None), None


head_divergence.defvjp(lambda *args: (head_divergence(*args), args[:3]), _gradients)


def divergences_of(
    algorithm: Algorithm,
    params: tuple[Any, Any],  # of student and teacher
    hidden: tuple[Float[Array, "R T D"], Float[Array, "R T E"]],
    needed: Bool[Array, "R T"],
    chunk_tokens: int,
) -> Float[Array, "R T"]:
    """Return, at t, the divergence of the distributions of tokens[t]; float32, in nats."""
    kind = Divergence(algorithm.distillation_beta, algorithm.distillation_temperature)
    heads, drawn_from = tuple(map(head_kernel, params)), jnp.roll(needed, -1, axis=1)
    divergences: Any = head_divergence(hidden, heads, drawn_from, kind, chunk_tokens)
    return jnp.roll(divergences, 1, axis=1)
