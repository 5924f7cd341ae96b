"""Counts of a plan: operations of a policy, and traffic of a compiled text."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from dapo_jax.commands.plan import hlo_text, roofline
from dapo_jax.commands.plan.hlo_text import Times
from dapo_jax.commands.plan.published_shapes import read_shape
from dapo_jax.model.decoder import abstract_params
from dapo_jax.model.logprobs import Rows, token_logprobs
from dapo_jax.runtime.sharding import unbox


def test_operations_agree_with_a_count_by_hand():
    """Every matrix and every attention score of Qwen2.5-32B."""
    large = dataclasses.replace(read_shape("Qwen2.5-32B"), remat="full")
    tokens, row = 22_528.0, 22_528
    attention = 2 * 5120 * (40 + 8 + 8) * 128 + 2 * 40 * 128 * 5120
    layer = attention + 3 * 2 * 5120 * 27_648
    head = 2 * 5120 * 152_064
    scores = 64 * 2 * 2 * 40 * 128 * (tokens * row / 2)
    forward = tokens * (64 * layer + head) + scores
    by_hand = 3 * forward + tokens * (64 * layer + head) + scores  # all is computed again
    assert roofline.update_flops(large, tokens, tokens * row / 2) == pytest.approx(
        by_hand, rel=0.02
    )
    assert roofline.forward_flops(large, tokens, tokens * row / 2) == pytest.approx(
        forward, rel=0.02
    )
    # One pass over one token without attention is two operations for each weight but the lookup.
    assert roofline.forward_flops(large, 1, 0) / 2 == pytest.approx(31.98e9, rel=0.02)


def test_operations_of_a_small_policy_are_those_that_xla_counts():
    decoder = dataclasses.replace(
        read_shape("Qwen2.5-0.5B"), layers=1, vocab=512, scan_unroll=1, attention="plain"
    )
    params = unbox(abstract_params(decoder))

    def forward(params, tokens, segments, positions):
        return token_logprobs(
            params, decoder, Rows(tokens, segments, positions), temperature=1.0, chunk_tokens=80
        )[0]

    whole = jax.ShapeDtypeStruct((1, 80), np.int32)
    counted = jax.jit(forward).lower(params, whole, whole, whole).compile().cost_analysis()
    # XLA computes both halves of the scores; the half above the diagonal is masked.
    by_plan = roofline.forward_flops(decoder, 80, 80 * 80)
    assert by_plan == pytest.approx(counted["flops"], rel=0.02)


def test_a_window_bounds_the_pairs_that_training_attention_computes():
    """Five of six layers of Gemma 3 see 1,024 tokens; each pair is counted by hand."""
    decoder = read_shape("gemma-3-27b")
    near, full = (np.minimum(np.arange(1, 5001), reach).sum() for reach in (1024, 5000))
    sliding = sum(decoder.sliding) / decoder.layers
    assert 0.8 < sliding < 0.85
    by_hand = sliding * near + (1 - sliding) * full
    assert roofline.seen_pairs(decoder, 5000) == pytest.approx(by_hand, rel=0.001)
    assert roofline.seen_pairs(decoder, 900) == 900**2 / 2  # the window holds it all
    assert roofline.seen_pairs(read_shape("Qwen2.5-7B"), 5000) == 5000**2 / 2


@pytest.mark.parametrize("window", [None, 100])
def test_pairs_of_a_packed_row_are_those_of_the_blocks_that_the_kernel_computes(window):
    """A block of 64 is computed if one of its pairs is seen; pairs are counted one by one."""
    decoder, lengths = dataclasses.replace(read_shape("Qwen2.5-7B"), window=window), [150, 42, 128]
    ids, places = np.repeat([1, 2, 3, 0], [*lengths, 192]), np.arange(512)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or 512)) & (ids[:, None] == ids)
    blocks = seen.reshape(8, 64, 8, 64).any(axis=(1, 3))
    blocks[5:] = np.eye(8)[5:]  # of padding, the block itself
    counted = roofline.row_pairs(decoder, lengths, 512, 64)
    assert counted == 64**2 * blocks.sum()


TEXT = pathlib.Path(__file__).with_suffix(".hlo").read_text()


def test_traffic_of_a_text_is_counted_as_often_as_its_loops_run():
    counted = hlo_text.read(TEXT, 8)
    gathered = 32 * 64 * 2 * 3 / 4  # of which a chip sends three quarters, in a ring of 4
    scattered, reduced = 16 * 64 * 2 * 3, 2 * 4 * 7 / 8  # in a ring of 4, and over all 8
    assert counted.sent == Times(reduced, 5 * gathered + scattered)
    assert counted.crossed == Times(2 * 8 * 64 * 4, 0.0)
    # Written: the add and the sum around the loop; inside it a row in place, what was gathered,
    # and what was scattered. What stays on the chip, S(1), is not.
    assert counted.written == Times(8 * 64 * 4 + 4, 5 * (64 * 4 + 32 * 64 * 2) + 16 * 64 * 2)
