"""Rotations for longer contexts, against numbers of the papers' formulas."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY

from dapo_jax.model.rotary import RopeScaling, query_growth, rope_frequencies
from dapo_jax.run.compute import check_rotations
from dapo_jax.runtime.settings import ConfigError


def yarn_loop(theta, head_dim, factor, slow, fast, original, truncate=True):
    """Section 3.2 of arXiv 2309.00071: a ramp between the frequencies that turn so often."""

    def number(turns):
        return head_dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = number(fast), number(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    frequencies = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        ramp = min(max((i - max(low, 0)) / (min(high, head_dim - 1) - max(low, 0)), 0), 1)
        frequencies.append(frequency * (1 - ramp) + frequency / factor * ramp)
    return frequencies


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("case", [(1e6, 128, 4.0, 1.0, 32.0, 32_768), (1e2, 16, 3.0, 0.5, 8.0, 64)])
def test_yarn_slows_long_wavelengths_and_keeps_short_ones(case, truncate):
    theta, head_dim, factor, slow, fast, original = case
    scaling = RopeScaling(factor, slow, fast, original, "yarn", truncate=truncate)
    actual, plain = (rope_frequencies(theta, head_dim, s) for s in (scaling, None))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, yarn_loop(*case, truncate), rtol=1e-5)
    assert actual[0] == plain[0] and np.isclose(actual[-1], plain[-1] / factor)


def test_linear_scaling_slows_all_and_dynamic_none_within_the_context():
    plain = rope_frequencies(1e4, 8, None)
    np.testing.assert_array_equal(
        rope_frequencies(1e4, 8, RopeScaling(4.0, kind="linear")), plain / 4
    )
    dynamic = RopeScaling(4.0, kind="dynamic", original_tokens=64)
    np.testing.assert_array_equal(rope_frequencies(1e4, 8, dynamic), plain)


def test_queries_grow_by_the_logarithm_of_whole_contexts():
    scaling = RopeScaling(1.0, original_tokens=16, query_growth=0.1)
    found = query_growth(jnp.array([[0, 15, 16, 40]]), scaling)[0, :, 0, 0]
    np.testing.assert_allclose(found, [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)])


def test_dynamic_rotations_are_rejected_beyond_the_context():
    decoder = dataclasses.replace(TINY, rope_scaling=RopeScaling(2.0, 0, 0, 64, "dynamic"))
    check_rotations(decoder, 64, "model.folder", "folder")
    check_rotations(TINY, 10**6, "model.folder", "folder")
    with pytest.raises(ConfigError, match="model.folder = 'folder'.*dynamic.*65 tokens"):
        check_rotations(decoder, 65, "model.folder", "folder")
