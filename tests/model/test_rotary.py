"""Rotations for longer contexts, against numbers of the papers' formulas."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY

from dapo_jax.model.config_json import decoder_from_json
from dapo_jax.model.rotary import RopeScaling, query_growth, rope_frequencies, rotate
from dapo_jax.run.compute import check_rotations
from dapo_jax.runtime.settings import ConfigError

BASE = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
}
QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def read(rope: dict, **changes):
    return decoder_from_json(BASE | {"rope_scaling": rope} | changes, "folder", "model.folder")


def yarn_loop(theta, head_dim, factor, slow, fast, original, truncate=True):
    """Section 3.2 of arXiv 2309.00071: a ramp between the frequencies that turn so often."""

    def number(turns):
        return head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = number(fast), number(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    found = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        ramp = min(max((i - max(low, 0)) / (min(high, head_dim - 1) - max(low, 0)), 0), 1)
        found.append(frequency * (1 - ramp) + frequency / factor * ramp)
    return found


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("case", [(1e6, 128, 4.0, 1.0, 32.0, 32_768), (1e2, 16, 3.0, 0.5, 8.0, 64)])
def test_yarn_slows_long_wavelengths_and_keeps_short_ones(case, truncate):
    theta, head_dim, factor, slow, fast, original = case
    scaling = RopeScaling(factor, slow, fast, original, "yarn", truncate=truncate)
    found, plain = (rope_frequencies(theta, head_dim, s) for s in (scaling, None))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, yarn_loop(*case, truncate), rtol=1e-5)
    assert found[0] == plain[0] and np.isclose(found[-1], plain[-1] / factor)


def test_linear_scaling_slows_all_and_dynamic_none_within_the_context():
    plain = rope_frequencies(1e4, 8, None)
    np.testing.assert_array_equal(
        rope_frequencies(1e4, 8, RopeScaling(4.0, kind="linear")), plain / 4
    )
    dynamic = RopeScaling(4.0, kind="dynamic", original_tokens=64)
    np.testing.assert_array_equal(rope_frequencies(1e4, 8, dynamic), plain)


def test_rotated_vectors_are_longer_by_the_attention_factor():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 8)), jnp.float32)
    places, frequencies = jnp.arange(5)[None], rope_frequencies(1e4, 8, None)
    plain, longer = (rotate(x, places, frequencies, factor) for factor in (1.0, 1.25))
    np.testing.assert_allclose(longer, 1.25 * plain, atol=1e-6)


def test_queries_grow_by_the_logarithm_of_whole_contexts():
    scaling = RopeScaling(1.0, original_tokens=16, query_growth=0.1)
    found = query_growth(jnp.array([[0, 15, 16, 40]]), scaling)[0, :, 0, 0]
    np.testing.assert_allclose(found, [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)])


@pytest.mark.parametrize(
    ("rope", "changes", "expected"),
    [
        (QWEN, {}, RopeScaling(4.0, 1.0, 32.0, 32_768, "yarn", 0.1 * math.log(4) + 1)),
        (QWEN | {"attention_factor": 0.9}, {}, RopeScaling(4.0, 1, 32, 32_768, "yarn", 0.9)),
        (
            QWEN | {"mscale": 0.7, "mscale_all_dim": 1.4, "beta_slow": 2, "truncate": False},
            {"original_max_position_embeddings": 100},
            RopeScaling(
                4.0,
                2.0,
                32.0,
                100,
                "yarn",
                (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1),
                truncate=False,
            ),
        ),
        ({"type": "yarn", "factor": 0.5}, {}, RopeScaling(0.5, 1.0, 32.0, 32_768, "yarn", 1.0)),
        ({"rope_type": "linear", "factor": 2}, {}, RopeScaling(2.0, kind="linear")),
        (
            {"rope_type": "dynamic", "factor": 2},
            {},
            RopeScaling(2.0, original_tokens=32_768, kind="dynamic"),
        ),
    ],
)
def test_a_table_of_rotations_says_its_scaling(rope, changes, expected):
    found = read(rope, **changes).rope_scaling
    assert dataclasses.replace(found, attention_factor=expected.attention_factor) == expected
    assert found.attention_factor == pytest.approx(expected.attention_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("rope", "changes", "words"),
    [
        (QWEN, {"rope_theta": 1}, "rope_theta = 1.0: must be above 1 with yarn"),
        (QWEN | {"beta_fast": 0.5}, {}, "beta_fast = 0.5: must be above beta_slow = 1.0"),
        (QWEN | {"truncate": 1}, {}, "truncate = 1: must be true or false"),
        (QWEN | {"attention_factor": 0}, {}, "attention_factor = 0: must be a number above 0"),
        ({"type": "longrope"}, {}, "'longrope': must be 'default' or 'linear'"),
        ({"type": ["yarn"]}, {}, "must be 'default' or 'linear'"),
        ({"type": "linear"}, {}, "no 'factor'"),
        ({"type": "dynamic", "factor": 2}, {"max_position_embeddings": None}, "max_position_emb"),
        (QWEN, {"model_type": "ministral3"}, "no 'llama_4_scaling_beta'"),
    ],
)
def test_rotations_that_are_not_known_are_refused(rope, changes, words):
    with pytest.raises(ConfigError, match=words):
        read(rope, **changes)


def test_dynamic_rotations_are_refused_beyond_the_context():
    decoder = dataclasses.replace(TINY, rope_scaling=RopeScaling(2.0, 0, 0, 64, "dynamic"))
    check_rotations(decoder, 64, "model.folder", "folder")
    check_rotations(TINY, 10**6, "model.folder", "folder")
    with pytest.raises(ConfigError, match="model.folder = 'folder'.*dynamic.*65 tokens"):
        check_rotations(decoder, 65, "model.folder", "folder")
