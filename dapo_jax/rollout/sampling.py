"""Token sampling: the next token of every slot, its log-probability, and its support.

The support of a token that was sampled from the likeliest ones alone is two numbers: the log of
their mass, and the edge, a log-prob relative to the largest one between the least likely token that
was kept and the likeliest one that was not. It lies midway, so that rounding moves no token over
it. An edge of -inf keeps all tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dapo_jax.types.structs import SamplingRule

BLOCK = 128
BITS = 30  # of a probability: float32 up to 1 has fewer than 2^30 patterns
MIN_TOP_P = 1e-6  # below, float32 could leave no token; the most likely one is kept
# Purposes, part of a random key. A served prompt's key has its order of arrival, or its seed.
SAMPLE_FOR_TRAINING, SAMPLE_FOR_EVALUATION, SAMPLE_FOR_SERVING, SAMPLE_BY_SEED = range(4)


class SamplingRules(NamedTuple):
    """Sampling rule of each slot."""

    temperature: Float[Array, "S"]
    top_p: Float[Array, "S"]
    top_k: Int[Array, "S"]


class Sampled(NamedTuple):
    """Sampled tokens, with log-probs at the temperature BEFORE top-k and top-p."""

    tokens: Int[Array, "S"]
    logprobs: Float[Array, "S"]
    supports: Float[Array, "S 2"]


def stack_rules(rules: Sequence[SamplingRule]) -> SamplingRules:
    """Return the sampling rules of several slots."""
    temperature, top_p, top_k = np.array(rules, np.float64).T
    top_p = np.maximum(top_p, MIN_TOP_P).astype(np.float32)
    return SamplingRules(temperature.astype(np.float32), top_p, top_k.astype(np.int32))


def truncate(probabilities: Float[Array, "S V"], top_p: float, top_k: int) -> Float[Array, "S V"]:
    """Zero the tokens outside top-k, then top-p; ties with the last kept token are kept."""
    vocab = probabilities.shape[-1]
    if not 0 < top_k < vocab and top_p >= 1:
        return probabilities
    return _most_likely(probabilities, top_p, top_k if 0 < top_k < vocab else None)


@jax.named_scope("most_likely")
def _most_likely(probabilities: Array, top_p: Any, top_k: Any) -> Array:
    """Truncate by limits that are numbers or arrays [S, 1]; `top_k` None keeps all."""
    if top_k is not None:
        probabilities = _above_edge(probabilities, 1, top_k)
    limit = jnp.where(top_p < 1, top_p * jnp.sum(probabilities, -1, keepdims=True), jnp.inf)
    return _above_edge(probabilities, probabilities, limit)


def _above_edge(probabilities: Float[Array, "S V"], weights: Array | int, limit: Any) -> Array:
    """Zero each token unless the weights of all tokens that are likelier sum to less than a limit.

    The least likely token that stays is found by halving an interval of float32 bit patterns, which
    have the order of the numbers: 30 sums instead of a sort of the vocabulary.
    """
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) // 2
        likelier = jnp.sum(jnp.where(bits > middle, weights, 0), axis=-1, keepdims=True)
        return jnp.where(likelier < limit, low, middle), jnp.where(likelier < limit, middle, high)

    largest = jnp.max(bits, axis=-1, keepdims=True)
    edge = jax.lax.fori_loop(0, BITS, halve, (jnp.full_like(largest, -1), largest))[1]
    return jnp.where(bits >= edge, probabilities, 0)


def _sampled(logprobs: Float[Array, "S V"], tokens: Array, mass: Float[Array, "S V"], cut: Any):
    """Return sampled tokens with log-probs and supports; a row that is not `cut` supports all."""
    kept = mass > 0
    least = jnp.min(jnp.where(kept, logprobs, jnp.inf), axis=-1)
    most = jnp.max(jnp.where(kept, -jnp.inf, logprobs), axis=-1)
    edges = (least + most) / 2 - jnp.max(logprobs, axis=-1)
    support = jnp.stack([jnp.log(jnp.sum(mass, axis=-1)), edges], axis=-1)
    support = jnp.where(jnp.reshape(cut, (-1, 1)), support, jnp.array([0, -jnp.inf]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens, chosen, support)


def invert_cdf(mass: Float[Array, "S V"], uniform: Float[Array, "S"]) -> Int[Array, "S"]:
    """Return the first index with a running sum of `mass` above `uniform` times the total.

    Two levels (sums of blocks, then one block) keep both sums short: float32 keeps its precision at
    a vocabulary of 150,000, and a sample costs one uniform number instead of V of them. An index
    with zero mass is never returned.
    """
    slots, vocab = mass.shape
    blocks = jnp.pad(mass, ((0, 0), (0, -vocab % BLOCK))).reshape(slots, -1, BLOCK)
    block_ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    target = (uniform * block_ends[:, -1])[:, None]
    block = jnp.argmax(block_ends > target, axis=-1)
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    ends = jnp.cumsum(chosen, axis=-1)
    block_end = jnp.take_along_axis(block_ends, block[:, None], axis=1)
    inside = ends > target - (block_end - ends[:, -1:])
    # Rounding can leave no entry above the target: take the block's last one with mass.
    last = BLOCK - 1 - jnp.argmax(chosen[:, ::-1] > 0, axis=-1)
    place = jnp.where(inside.any(axis=-1), jnp.argmax(inside & (chosen > 0), axis=-1), last)
    return (block * BLOCK + place).astype(jnp.int32)


def sample_tokens(
    logits: Float[Array, "S V"], keys: jax.Array, positions: Int[Array, "S"], rule: SamplingRule
) -> Sampled:
    """Sample a token per slot.

    Args:
        logits: [S, V] float32.
        keys: a typed key per response; the sample depends on key and position only.
        positions: number of tokens that the response has so far.
        rule: temperature and truncation.

    Returns:
        tokens, log-probs and supports. Greedy sampling records temperature 1.
    """
    scaled = logits / (rule.temperature or 1.0)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    if rule.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return _sampled(logprobs, tokens, logprobs, False)
    mass = truncate(jnp.exp(logprobs), rule.top_p, rule.top_k)
    tokens = invert_cdf(mass, _uniform(keys, positions))
    return _sampled(logprobs, tokens, mass, rule.top_p < 1 or rule.top_k > 0)


def _uniform(keys: jax.Array, positions: Int[Array, "S"]) -> Float[Array, "S"]:
    token_keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.uniform)(token_keys)


def sample_tokens_by_slot(
    logits: Float[Array, "S V"], keys: jax.Array, positions: Int[Array, "S"], rules: SamplingRules
) -> Sampled:
    """Sample as `sample_tokens` does, with a rule per slot: one program serves all rules.

    A slot's token depends on its own logits, key, position and rule only. Finding the likeliest
    tokens is the expensive part, and is skipped if no slot truncates.
    """
    greedy, vocab = rules.temperature == 0, logits.shape[-1]
    scaled = logits / jnp.where(greedy, 1.0, rules.temperature)[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    top_k = jnp.where((rules.top_k > 0) & (rules.top_k < vocab), rules.top_k, vocab)
    cut = (~greedy & ((top_k < vocab) | (rules.top_p < 1)))[:, None]
    mass = jnp.exp(logprobs)
    mass = jax.lax.cond(
        cut.any(),
        lambda: jnp.where(cut, _most_likely(mass, rules.top_p[:, None], top_k[:, None]), mass),
        lambda: mass,
    )
    sampled = invert_cdf(mass, _uniform(keys, positions))
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), sampled)
    return _sampled(logprobs, tokens, mass, cut)


def sample_keys(parts: Sequence[tuple[int, int, int, int]]) -> jax.Array:
    """Return the keys [n] of prompts from (seed, purpose, step, position in the data) of each.

    One call per prompt costs the host more than the prefill of a small policy.
    """
    return _fold_each(np.array([[int(x) % 2**32 for x in part] for part in parts], np.uint32))


@jax.jit
@jax.vmap
def _fold_each(parts: Any) -> jax.Array:
    key = jax.random.key(parts[0])
    for i in range(1, 4):
        key = jax.random.fold_in(key, parts[i])
    return key
