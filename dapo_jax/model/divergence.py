"""Divergence of a policy's next-token distributions from a teacher's, sharded by vocabulary.

Computed at both output heads, in chunks of tokens, so neither's [R, T, V] ever exists.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dapo_jax.model.lm_head import Share, add_up, cut_chunks, logits_of, sharded, uncut

LEAST = 1e-30  # probability of what is left beside the likeliest tokens


class Divergence(NamedTuple):
    """Generalised Jensen-Shannon divergence of teacher P and student Q (GKD, arXiv 2306.13649).

    beta KL(P || M) + (1 - beta) KL(Q || M), with M = beta P + (1 - beta) Q. At the ends, where that
    is 0, its limits over beta and over 1 - beta: KL(P || Q) for 0, KL(Q || P) for 1.

    Attributes:
        top_k: the teacher's likeliest tokens that are told apart, all others being one; 0: all are.
        temperature: of both softmaxes.
    """

    beta: float = 0.5
    top_k: int = 0
    temperature: float = 1.0

    def terms(self, p: Array, q: Array) -> Array:
        """Each outcome's share, from its log-probabilities."""
        mixture = self._mixture(p, q)
        of_p, of_q = self._weights()
        return of_p * jnp.exp(p) * (p - mixture) + of_q * jnp.exp(q) * (q - mixture)

    def slopes(self, p: Array, q: Array) -> Array:
        """Derivatives by q, but for multiples of exp(q): they move no normalised distribution."""
        if self.beta == 0:
            return -jnp.exp(p)
        return self._weights()[1] * jnp.exp(q) * (q - self._mixture(p, q))

    def _weights(self) -> tuple[float, float]:
        """Weights of both KL terms."""
        return (1 - self.beta, self.beta) if self.beta in (0, 1) else (self.beta, 1 - self.beta)

    def _mixture(self, p: Array, q: Array) -> Array:
        if self.beta in (0, 1):
            return p if self.beta else q
        return jnp.logaddexp(math.log(self.beta) + p, math.log1p(-self.beta) + q)


def _log_softmax(share: Share, logits: Float[Array, "n v"]) -> Float[Array, "n v"]:
    logits -= share.largest(jnp.max(logits, axis=-1))[:, None]
    return logits - jnp.log(share.add(jnp.sum(jnp.exp(logits), axis=-1)))[:, None]


def _distributions(share: Share, divergence: Divergence, states: Sequence, heads: Sequence):
    """Log-probabilities of teacher and student: of tokens [n, v], and of all the rest [n, 1].

    Between the two, which tokens are told apart [n, v].
    """
    student, teacher = (
        _log_softmax(share, logits_of(hidden, head, divergence.temperature))
        for hidden, head in zip(states, heads, strict=True)
    )
    apart = jnp.ones(teacher.shape, bool)
    if divergence.top_k:
        apart = share.likeliest(teacher, divergence.top_k)
    left = [jnp.sum(jnp.where(apart, 0.0, jnp.exp(one)), axis=-1) for one in (teacher, student)]
    rest = jnp.log(jnp.maximum(share.add(jnp.stack(left)), LEAST))[..., None]
    return (teacher, student), apart, tuple(rest)


def _divergences(share: Share, divergence: Divergence, chunk_tokens: int, *arrays):
    hidden, head, teacher, teacher_head = arrays
    heads = share.whole(head, hidden.dtype), share.whole(teacher_head, teacher.dtype)

    def of_chunk(states):
        both, apart, rest = _distributions(share, divergence, states, heads)
        terms = jnp.sum(jnp.where(apart, divergence.terms(*both), 0.0), axis=-1)
        return share.add(terms) + divergence.terms(*rest)[:, 0]

    found = jax.lax.map(of_chunk, cut_chunks(chunk_tokens, hidden, teacher))
    return uncut(found, *hidden.shape[:2])


def _divergence_gradients(share: Share, divergence: Divergence, chunk_tokens: int, *arrays):
    """Gradients of the student's hidden states and head; the last array is that of the values.

    d D / d logit = s - q sum(s), with the slopes s = d D / d log q.
    """
    hidden, head, teacher, teacher_head, upstream = arrays
    heads = share.whole(head, hidden.dtype), share.whole(teacher_head, teacher.dtype)

    def slope_of_chunk(chunk):
        *states, upstream = chunk
        both, apart, rest = _distributions(share, divergence, states, heads)
        # A token of the rest has its share of the rest's slope.
        inside = jnp.exp(both[1] - rest[1]) * divergence.slopes(*rest)
        slopes = jnp.where(apart, divergence.slopes(*both), inside)
        total = share.add(jnp.sum(slopes, axis=-1))[:, None]
        return (slopes - jnp.exp(both[1]) * total) * upstream[:, None] / divergence.temperature

    chunks = cut_chunks(chunk_tokens, hidden, teacher, upstream)
    return add_up(share, slope_of_chunk, hidden, head, heads[0], chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def head_divergence(
    hidden: Float[Array, "R T D"],
    head: Float[Array, "D V"],
    teacher: Float[Array, "R T E"],
    teacher_head: Float[Array, "E V"],
    divergence: Divergence,
    chunk_tokens: int,
) -> Float[Array, "R T"]:
    """Divergence of the student's next-token distribution from the teacher's, in nats; float32.

    Args:
        hidden, teacher: final hidden states of both; the teacher's have no gradient.
        chunk_tokens: number of tokens per device whose logits, of both, exist at the same time.
    """
    return _keep_divergence(hidden, head, teacher, teacher_head, divergence, chunk_tokens)[0]


def _keep_divergence(hidden, head, teacher, teacher_head, divergence, chunk_tokens):
    def local(share, *arrays):
        return _divergences(share, divergence, chunk_tokens, *arrays)

    arrays = hidden, head, teacher, teacher_head
    with jax.named_scope("divergence"):
        return sharded(local, "hwhw", "r")(*arrays), arrays


def _gradients_of_divergence(divergence, chunk_tokens, kept, upstream):
    def local(share, *arrays):
        return _divergence_gradients(share, divergence, chunk_tokens, *arrays)

    with jax.named_scope("divergence"):
        return *sharded(local, "hwhwr", "hw")(*kept, upstream), None, None


head_divergence.defvjp(_keep_divergence, _gradients_of_divergence)
