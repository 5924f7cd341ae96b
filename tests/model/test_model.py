"""Decoder and log-probs; test_families.py has the rotations of transformers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY

from dapo_jax.model import decoder
from dapo_jax.model.lm_head import Scale, head_logprobs
from dapo_jax.model.rotary import RopeScaling, query_growth
from dapo_jax.rollout.sampling import sample_tokens
from dapo_jax.types.structs import SamplingRule

TOKENS = np.random.default_rng(1).integers(2, 32, (2, 12)).astype(np.int32)
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0]] * 2, np.int32)
POSITIONS = np.array([[*range(5), *range(6), 0]] * 2, np.int32)


def hidden(params, tokens=TOKENS, segments=SEGMENTS, positions=POSITIONS, config=TINY):
    return decoder.Decoder(config).apply({"params": params}, tokens, segments, positions)


def test_a_token_reaches_later_tokens_of_its_segment_and_nothing_else(tiny_params):
    run = jax.jit(lambda tokens: hidden(tiny_params, tokens))
    for place, reached in ((0, range(5)), (3, range(3, 5)), (5, range(5, 11)), (8, range(8, 11))):
        changed = TOKENS.copy()
        changed[0, place] = (TOKENS[0, place] + 1) % TINY.vocab
        differs = (np.asarray(run(changed)) != np.asarray(run(TOKENS))).any(axis=-1)
        assert np.flatnonzero(differs[0]).tolist() == list(reached) and not differs[1].any()


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_large_logits_keep_their_precision_and_equal_the_samplers(shift):
    """Logits are multiples of 1/64, which float32 holds exactly up to 2^18."""
    rng = np.random.default_rng(0)
    states = jnp.float32(rng.integers(-8, 9, (2, 7, 3)) / 8).at[..., 0].set(1.0)
    head = jnp.float32(rng.integers(-24, 25, (3, 40)) / 8).at[0].set(shift)
    logits = np.asarray(states @ head)
    keys = jax.vmap(jax.random.key)(jnp.arange(14))
    draw = jax.jit(sample_tokens, static_argnums=3)
    targets, sampled, _ = draw(logits.reshape(14, 40), keys, jnp.arange(14), SamplingRule())
    exact = np.float64(states[..., 1:]) @ np.float64(head[1:])
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    every = np.ones((2, 7), bool)
    for chunk_tokens in (4, 10**6):
        score = jax.jit(lambda *x, size=chunk_tokens: head_logprobs(*x, every, Scale(), size))
        logprobs, entropy = score(states, head, targets.reshape(2, 7))
        expected = np.take_along_axis(exact, np.asarray(targets).reshape(2, 7, 1), -1)[..., 0]
        np.testing.assert_allclose(logprobs, expected, atol=1e-6)
        np.testing.assert_allclose(logprobs.ravel(), sampled, atol=1e-6)
        np.testing.assert_allclose(entropy, -(np.exp(exact) * exact).sum(axis=-1), atol=1e-6)


def test_queries_grow_by_the_logarithm_of_whole_contexts():
    scaling = RopeScaling(1.0, original_tokens=16, query_growth=0.1)
    found = query_growth(jnp.array([[0, 15, 16, 40]]), scaling)[0, :, 0, 0]
    np.testing.assert_allclose(found, [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)])
