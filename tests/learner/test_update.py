"""The packed, sharded, microbatched update against a loop written from the paper's equation."""

import dataclasses
import functools
import math
import re

import hlo_arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, make_completion, make_prompt
from learners import (
    ADVANTAGES,
    SEGMENTS,
    assert_close,
    make_batch,
    make_learner,
    make_segments,
    place,
    token_logprobs,
)

from dapo_jax import algorithms
from dapo_jax.config.experiment import Optimizer, Packing
from dapo_jax.learner.packing import (
    Segment,
    assign_rows,
    choose_rows,
    fill,
    pack,
    pack_updates,
    padded_microbatches,
    row_shapes,
)
from dapo_jax.learner.policy import EDGES
from dapo_jax.learner.update import learning_rate
from dapo_jax.model.logprobs import Rows
from dapo_jax.runtime import sharding


def microbatches_of(row_tokens: int, rows: int) -> int:
    return -(-len(assign_rows(SEGMENTS, row_tokens)) // rows)


def loop_loss(params, algorithm):
    """DAPO's equation 8, response by response, unpacked."""
    terms, groups = [], []
    whole = [np.append(s.prompt.tokens, s.completion.tokens).astype(np.int32) for s in SEGMENTS]
    tokens = jnp.stack([np.pad(row, (0, 24 - len(row))) for row in whole])
    segments = jnp.stack([np.arange(24) < len(row) for row in whole]).astype(jnp.int32)
    rows = Rows(tokens, segments, jnp.broadcast_to(jnp.arange(24), tokens.shape))
    every = token_logprobs(params, TINY, rows)[0]
    for segment, own, advantage in zip(SEGMENTS, every, ADVANTAGES, strict=True):
        prompt, response = segment.prompt.tokens, segment.completion.tokens
        if len(response) == 0 or (segment.completion.truncated and algorithm.overlong_filtering):
            continue
        logprobs = own[len(prompt) : len(prompt) + len(response)]
        ratio = jnp.exp(logprobs - segment.completion.sampler_logprobs)
        clipped = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
        objective = jnp.minimum(ratio * advantage, clipped * advantage)
        if advantage < 0 and algorithm.dual_clip:
            objective = jnp.maximum(objective, algorithm.dual_clip * advantage)
        terms.append(-objective)
        groups.append(segment.prompt.index)
    members = [[t for t, g in zip(terms, groups, strict=True) if g == own] for own in set(groups)]
    return jnp.mean(jnp.stack([jnp.mean(jnp.concatenate(parts)) for parts in members]))


def test_packed_gradient_equals_the_papers_loop(tiny_params, one_device):
    changes = {"aggregate": "token_mean_per_group", "overlong_filtering": True}
    algorithm = dataclasses.replace(algorithms.dapo(), **changes)
    learner = make_learner(one_device, algorithm)
    batch, used = make_batch(algorithm)
    actual = learner.differentiate(place(tiny_params, learner), batch, used)[0]
    expected = jax.jit(jax.grad(functools.partial(loop_loss, algorithm=algorithm)))(tiny_params)
    assert_close(actual, expected, 1e-5)


def test_weights_and_moments_are_sharded(tiny_params, eight_devices):
    """Bytes on each device are about total / (fsdp x tensor); norms and counters are whole."""
    learner = make_learner(eight_devices)
    state = learner.start(place(tiny_params, learner))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for device in jax.devices():
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        assert total / 4 <= held <= total / 4 * 1.1


def test_data_parallel_devices_synchronise_once_per_update():
    mesh = sharding.make_mesh(2, 1, 1, jax.devices()[:2])
    learner, (batch, _) = make_learner(mesh), make_batch(rows=8, microbatches=2)
    text = learner.lower("update", batch).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1


@pytest.mark.slow
def test_replicas_of_several_devices_synchronise_once_per_update():
    """The loop over microbatches has the collectives of a single replica, except for bins."""
    looped, all_reduces = [], []
    for data in (1, 2):
        mesh = sharding.make_mesh(data, 2, 1, devices=jax.devices()[: 2 * data])
        learner, (batch, _) = make_learner(mesh), make_batch(rows=2 * data, microbatches=4)
        text = learner.lower("update", batch).compile().as_text()
        made = hlo_arrays.instructions(text)
        large = [x for x in made if math.prod(x.shape) > len(EDGES) + 1 and x.group != 1]
        looped.append(hlo_arrays.looped_collectives(large))
        all_reduces.append(len(re.findall(r" all-reduce(?:-start)?\(", text)))
    assert looped[0] == looped[1] != []
    assert all_reduces[1] > all_reduces[0]


def test_rows_beyond_the_used_microbatches_are_never_read(tiny_params, one_device):
    learner = make_learner(one_device)
    params = place(tiny_params, learner)
    batch, used = make_batch(rows=4, microbatches=6)

    def poison(array):
        array = np.array(array)
        array[used:] = 31 if array.dtype == np.int32 else np.nan
        return array

    poisoned = jax.tree.map(poison, batch)
    assert_close(
        learner.differentiate(params, poisoned, used)[0],
        learner.differentiate(params, batch, used)[0],
        0,
    )


def test_only_matrices_decay(tiny_params, one_device):
    learner = make_learner(one_device, weight_decay=0.5)
    batch, used = make_batch()
    idle = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    before = jax.device_get(tiny_params)
    state, _ = learner.update(learner.start(place(tiny_params, learner)), idle, used, 0.1)
    after = jax.device_get(state.params)
    np.testing.assert_array_equal(after["final_norm"]["scale"], before["final_norm"]["scale"])
    query = [tree["layers"]["query"]["kernel"] for tree in (after, before)]
    np.testing.assert_allclose(query[0], query[1] * (1 - 0.1 * 0.5), rtol=1e-6)


def test_no_step_of_any_schedule_is_wasted_at_rate_zero():
    settings = Optimizer(learning_rate=2.0, warmup_steps=4)
    rates = [learning_rate(settings, step, 8) for step in range(8)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]
    settings.schedule = "linear"
    assert [learning_rate(settings, step, 8) for step in range(3, 8)] == [2.0, 2.0, 1.5, 1.0, 0.5]
    settings.schedule = "cosine"
    assert learning_rate(settings, 6, 8) == pytest.approx(1.0)
    assert learning_rate(Optimizer(learning_rate=2.0, warmup_steps=0), 0, 8) == 2.0


# --- packing ------------------------------------------------------------------------------


def test_every_token_of_every_segment_is_packed_once():
    rollouts, used = pack(SEGMENTS, 20, 2, 5)
    tokens, index = rollouts.tokens.reshape(-1, 20), rollouts.response_index.reshape(-1, 20)
    ids, positions = rollouts.segment_ids.reshape(-1, 20), rollouts.positions.reshape(-1, 20)
    seen = 0
    for row in range(len(ids)):
        for number in range(1, ids[row].max() + 1):
            places = np.flatnonzero(ids[row] == number)
            np.testing.assert_array_equal(positions[row, places], np.arange(len(places)))
            matches = [
                s
                for s in SEGMENTS
                if tokens[row, places].tolist() == [*s.prompt.tokens, *s.completion.tokens]
            ]
            assert len(matches) == 1
            segment = matches[0]
            expected = [-1] * len(segment.prompt.tokens) + [segment.index] * len(segment.completion)
            assert index[row, places].tolist() == expected
            seen += 1
    assert seen == len(SEGMENTS) and used == microbatches_of(20, 2)


def test_arrays_are_less_than_twice_as_wide_as_their_use_and_of_few_widths():
    """A program is compiled for each width."""
    widths = set()
    for count in range(1, 14):
        segments = make_segments([14] * count)  # one per row
        rollouts, used = pack(segments, 20, 1)
        width = len(rollouts.tokens)
        assert used == count and used <= width < 2 * used
        assert width == padded_microbatches([count, 1], 1)
        widths.add(width)
    assert len(widths) == 5


def test_a_segment_longer_than_a_row_is_rejected():
    with pytest.raises(ValueError, match="row_tokens = 10"):
        pack(SEGMENTS, 10, 4, 4)


# --- packing.row_tokens=auto ----------------------------------------------------------------------


PROMPT = make_prompt(0, [3, 4, 5, 6])
SHORTEST = Packing(row_tokens=100, rows_per_microbatch=8, share_prompts=False)


def choose(updates, shortest=SHORTEST, longest=10_000, attention_tokens=1e9) -> Packing:
    return choose_rows(updates, row_shapes(shortest, 2, longest), attention_tokens)


def segments(lengths) -> list[Segment]:
    """Prompts and responses of so many tokens in all."""
    return [
        Segment(PROMPT, make_completion([7] * (length - len(PROMPT.tokens))), i)
        for i, length in enumerate(lengths)
    ]


def places(updates, packing: Packing) -> int:
    """That updates in such rows compute."""
    _, used = pack_updates(updates, packing)
    return sum(used) * packing.rows_per_microbatch * packing.row_tokens


def test_responses_over_half_a_row_get_longer_rows():
    updates = [segments([60 + i % 5 for i in range(96)])]
    actual = choose(updates)
    assert actual.row_tokens > 100 and actual.rows_per_microbatch % 2 == 0
    assert actual.row_tokens * actual.rows_per_microbatch <= 800
    assert places(updates, actual) < 0.75 * places(updates, SHORTEST)


def test_no_row_is_longer_than_attention_allows():
    updates = [segments([60] * 96)]
    assert choose(updates, longest=100) == SHORTEST
    assert choose(updates, longest=250).row_tokens == 200
    # Where attention is most of the work, padding is cheaper than longer rows.
    assert choose(updates, attention_tokens=10.0) == SHORTEST


def test_rows_of_earlier_steps_are_taken_unless_others_save_a_tenth():
    updates = [segments([40 + i % 60 for i in range(96)])]
    shapes = row_shapes(SHORTEST, 2, 10_000)
    best = choose_rows(updates, shapes, 1e9)
    near = next(shape for shape in shapes if shape.row_tokens == 200)
    far = SHORTEST
    assert [places(updates, shape) for shape in (best, near, far)] == [6600, 7200, 8000]
    for compiled, expected in (([near], near), ([far], best), ([far, near], near)):
        assert choose_rows(updates, shapes, 1e9, compiled=compiled) == expected


def test_fill_counts_what_microbatches_compute_and_arrays_never_get_fewer():
    rollouts, used = pack_updates([segments([9])], Packing(100, 2, False), 4)
    assert rollouts.tokens.shape == (1, 4, 2, 100) and used == [1]
    rollouts, used = pack_updates([segments([50, 50, 30]), segments([9])], Packing(100, 2, False))
    assert used == [1, 1] and fill(rollouts, used) == pytest.approx(139 / 400)
