"""Sampling: the next token of every slot, and the log-probability that is recorded for it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dapo_jax.structs import SamplingRule

BLOCK = 128
SMALLEST_TOP_P = 1e-6  # below, float32 could leave no token at all; the likeliest one is kept
# Purposes of a key. What is served is keyed by the order of arrival, or by a seed of its own.
SAMPLE_FOR_TRAINING, SAMPLE_FOR_EVALUATION, SAMPLE_FOR_SERVING, SAMPLE_BY_SEED = range(4)


class SamplingRules(NamedTuple):
    """Sampling rule of each slot."""

    temperature: Float[Array, "S"]
    top_p: Float[Array, "S"]
    top_k: Int[Array, "S"]


def repeat_rule(rule: SamplingRule, count: int) -> SamplingRules:
    """Sampling rules of `count` slots that all have one rule."""
    return SamplingRules(
        temperature=jnp.full(count, rule.temperature, jnp.float32),
        top_p=jnp.full(count, max(rule.top_p, SMALLEST_TOP_P), jnp.float32),
        top_k=jnp.full(count, rule.top_k, jnp.int32),
    )


def truncate(probabilities: Float[Array, "S V"], top_p: float, top_k: int) -> Float[Array, "S V"]:
    """Zeroes what top-k, then top-p leave out; ties with the last kept token stay."""
    vocab = probabilities.shape[-1]
    if not 0 < top_k < vocab and top_p >= 1:
        return probabilities
    return _likeliest(probabilities, top_p, top_k if 0 < top_k < vocab else None)


def _likeliest(probabilities: Array, top_p: Any, top_k: Any) -> Array:
    """Mass that `truncate` keeps; limits are numbers, or arrays [S, 1]. `top_k` None keeps all."""
    ordered = jnp.sort(probabilities, axis=-1, descending=True)
    if top_k is not None:
        kept = jnp.arange(probabilities.shape[-1]) < top_k
        ordered = jnp.where(jnp.atleast_2d(kept), ordered, 0)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    inside = (before < top_p * jnp.sum(ordered, axis=-1, keepdims=True)) & (ordered > 0)
    smallest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probabilities >= smallest, probabilities, 0)


def invert_cdf(mass: Float[Array, "S V"], uniform: Float[Array, "S"]) -> Int[Array, "S"]:
    """Index where the running sum of `mass` first exceeds `uniform` times the total.

    Two levels (sums of blocks, then one block), so that neither sum is long: float32 keeps its
    precision at a vocabulary of 150,000, and a draw costs one uniform instead of V of them.
    An index with zero mass is never returned.
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
    # Rounding can leave no entry above the target: then the block's last one with mass is it.
    last = BLOCK - 1 - jnp.argmax(chosen[:, ::-1] > 0, axis=-1)
    place = jnp.where(inside.any(axis=-1), jnp.argmax(inside & (chosen > 0), axis=-1), last)
    return (block * BLOCK + place).astype(jnp.int32)


def draw(
    logits: Float[Array, "S V"], keys: jax.Array, positions: Int[Array, "S"], rule: SamplingRule
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """One token per slot and its log-probability.

    Args:
        logits: [S, V] float32.
        keys: one typed key per response; the draw is keyed by (key, position), nothing else.
        positions: how many tokens the response has so far.
        rule: temperature and truncation.

    Returns:
        tokens, and their log-probability under the temperature-scaled distribution BEFORE top-k
        and top-p, which is what the trainer recomputes. Greedy draws record temperature 1.
    """
    scaled = logits / (rule.temperature or 1.0)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    if rule.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        uniform = _uniform(keys, positions)
        tokens = invert_cdf(truncate(jnp.exp(logprobs), rule.top_p, rule.top_k), uniform)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def _uniform(keys: jax.Array, positions: Int[Array, "S"]) -> Float[Array, "S"]:
    draw_keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return jax.vmap(jax.random.uniform)(draw_keys)


def draw_each(
    logits: Float[Array, "S V"], keys: jax.Array, positions: Int[Array, "S"], rules: SamplingRules
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """One token per slot as `draw` makes it, by a rule for each slot: one program serves all rules.

    A slot's token depends on its own logits, key, position and rule alone. Sorting the vocabulary
    is the expensive part, and left out while no slot asks for it.
    """
    greedy, vocab = rules.temperature == 0, logits.shape[-1]
    scaled = logits / jnp.where(greedy, 1.0, rules.temperature)[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    top_k = jnp.where((rules.top_k > 0) & (rules.top_k < vocab), rules.top_k, vocab)
    cut = (~greedy & ((top_k < vocab) | (rules.top_p < 1)))[:, None]
    mass = jnp.exp(logprobs)
    mass = jax.lax.cond(
        cut.any(),
        lambda: jnp.where(cut, _likeliest(mass, rules.top_p[:, None], top_k[:, None]), mass),
        lambda: mass,
    )
    drawn = invert_cdf(mass, _uniform(keys, positions))
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def sample_key(seed: int, purpose: int, step: int | np.uint32, index: int) -> jax.Array:
    """Key of one prompt's responses: purpose, policy step, place in the data."""
    return _fold(_first_key(seed), np.array([purpose, step, index], np.uint32))


def sample_keys(seed: int, purpose: int, steps: Sequence[int], indices: Sequence[int]) -> jax.Array:
    """Keys [n] of several prompts, as `sample_key` makes them, in one call.

    One by one they cost the host more than their prefill costs a small policy.
    """
    parts = np.array([[purpose] * len(steps), steps, indices], np.uint32)
    return _fold_each(_first_key(seed), parts.T)


@functools.lru_cache(maxsize=8)
def _first_key(seed: int) -> jax.Array:
    return jax.random.key(seed)


def _fold_in_order(key: jax.Array, parts: Any) -> jax.Array:
    for i in range(3):
        key = jax.random.fold_in(key, parts[i])
    return key


_fold = jax.jit(_fold_in_order)
_fold_each = jax.jit(jax.vmap(_fold_in_order, (None, 0)))
