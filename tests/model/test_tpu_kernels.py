"""TPU kernels as the project calls them, run by Pallas' TPU interpreter against plain arithmetic.

It compiles nothing and keeps no time: what a TPU's compiler makes of a kernel is not tested here.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, make_prompt
from paged_slots import SIZE, WIDTH, Slots, decode, make_slots, normal
from row_files import read_table
from samplers import TOKENIZER, sample
from tpu_interpreter import interpret, interpreted

from dapo_jax.config.experiment import Sampler
from dapo_jax.model import splash_attention
from dapo_jax.model.decoder import init_params
from dapo_jax.model.grouped_products import matrices_gradient
from dapo_jax.model.training_attention import TRAINING_ATTENTION, AttentionOptions, Context, Window
from dapo_jax.rollout import cache_layout
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.runtime import sharding
from dapo_jax.runtime.kept_programs import forget_programs

pytestmark = pytest.mark.slow

FLOAT32, BFLOAT16 = jnp.float32, jnp.bfloat16
# Two cores share a chip's memory and a grid's parallel dimensions, as in v4 and v5p.
TWO_CORES = {"detect_races": True, "num_cores_or_threads": 2}


def difference(found, expected) -> float:
    """Largest difference, relative to the largest expected value where that exceeds 1."""
    found, expected = (np.asarray(array, np.float32) for array in (found, expected))
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1))


# --- splash: training attention ------------------------------------------------------------------

# Ends of segments: of one token, inside a block of 128, at its end, two blocks long and more; the
# second row ends in padding.
ENDS = ((1, 30, 128, 384), (9, 256, 333)), ((1, 640), (50, 256, 590))


def packed_ids(ends: tuple[tuple[int, ...], ...], length: int) -> np.ndarray:
    """Segment numbers of rows; 0 is padding."""
    ids = np.zeros((len(ends), length), np.int32)
    for row, cuts in zip(ids, ends, strict=True):
        row[: cuts[-1]] = 1 + np.searchsorted(cuts, np.arange(cuts[-1]), side="right")
    return ids


def exact_attention(arrays, ids, weights, window: int | None) -> list[np.ndarray]:
    """Output of tokens, 0 for padding, and gradients of the sum of output * weights."""
    queries, keys, values = (np.asarray(array, np.float64) for array in arrays)
    group, scale = queries.shape[2] // keys.shape[2], queries.shape[3] ** -0.5
    place = np.arange(queries.shape[1])
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or len(place)))
    results = [np.zeros_like(array) for array in (queries, queries, keys, values)]
    for row, head in np.ndindex(queries.shape[0], queries.shape[2]):
        at, shared = (row, slice(None), head), (row, slice(None), head // group)
        mask = seen & (ids[row][:, None] == ids[row])
        shares = np.where(mask, np.exp(queries[at] @ keys[shared].T * scale), 0)
        shares /= shares.sum(1, keepdims=True)
        mixed = shares @ values[shared]
        tokens = ids[row][:, None] > 0
        by_mixed = np.asarray(weights[at], np.float64) * tokens
        by_shares = by_mixed @ values[shared].T
        by_scores = scale * shares * (by_shares - (by_mixed * mixed).sum(1, keepdims=True))
        results[0][at] = mixed * tokens
        results[1][at] = by_scores @ keys[shared]
        results[2][shared] += by_scores.T @ queries[at]
        results[3][shared] += shares.T @ by_mixed
    return results


def training_attention(name: str, arrays, ids, weights, window: Window | None, mesh, run):
    """Output and gradients of one of the project's kinds of attention, by `run`."""
    context = Context(jnp.zeros_like(ids), jnp.asarray(ids))

    def loss(queries, keys, values):
        whole = queries, keys, values, context, None, AttentionOptions(window)
        mixed, _ = TRAINING_ATTENTION[name](*whole)
        mixed = jnp.where(context.segment_ids[..., None, None] > 0, mixed, 0)
        return jnp.sum(mixed.astype(FLOAT32) * weights), mixed

    def output_and_gradients(*arrays):
        gradients, mixed = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
        return mixed, *gradients

    with sharding.activate(mesh):
        return run(output_and_gradients, *arrays)


def compiled(function, *args):
    return jax.jit(function)(*args)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block", [128, 1024], ids=["blocks", "block"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "ends", "window", "reach"),
    [
        pytest.param(4, 2, 128, ENDS[0], None, None, id="128"),
        pytest.param(7, 1, 64, ENDS[0], None, None, id="64"),
        pytest.param(4, 2, 64, ENDS[0], Window(100), 100, id="64-window"),
        # Gemma 3 1B: one program for layers that slide and for full ones.
        pytest.param(4, 1, 256, ENDS[1], Window(512, jnp.array(True)), 512, id="gemma-slides"),
        pytest.param(4, 1, 256, ENDS[1], Window(512, jnp.array(False)), None, id="gemma-full"),
    ],
)
def test_splash_gives_plain_attention_and_its_gradients(
    heads, kv_heads, head_dim, ends, window, reach, block, dtype, monkeypatch, one_device
):
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", block)
    rng, ids = np.random.default_rng(0), packed_ids(ends, ends[0][-1])
    shapes = [(*ids.shape, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    arrays = [normal(rng, shape, dtype) for shape in shapes]
    weights = normal(rng, shapes[0], dtype)
    expected = exact_attention(arrays, ids, weights, reach)

    call = functools.partial(training_attention, arrays=arrays, ids=ids, weights=weights)
    call = functools.partial(call, window=window, mesh=one_device)
    found, kernels = call("splash", run=interpret)
    assert len(kernels) == 3 * len(ids)  # forward, gradient by queries, by keys and values
    worst = max(map(difference, found, expected))
    plain = max(map(difference, call("plain", run=compiled), expected))
    print(f"{worst:.2e} plain {plain:.2e}")
    assert worst <= min(1e-6 if dtype == FLOAT32 else 5.1e-3, 1.5 * plain)


def test_splash_has_no_race_between_two_cores(monkeypatch, one_device, capfd):
    """But one: both cores leave their last sums in outputs [block, 128], which nothing reads."""
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    rng, ids = np.random.default_rng(0), packed_ids(((1, 100, 256), (9, 200)), 256)
    shapes = [(*ids.shape, count, 128) for count in (4, 2, 2)]
    arrays, weights = [normal(rng, shape, FLOAT32) for shape in shapes], np.ones(shapes[0], "f")
    run = functools.partial(interpret, **TWO_CORES)
    found, races = training_attention("splash", arrays, ids, weights, None, one_device, run)
    assert races == [True] * len(ids) + [False] * 2 * len(ids)  # forward; by queries, and by keys
    reported = re.findall(r"(?:read|write) of \S+ \S+ \S+ \S+\[(.*)\] from", capfd.readouterr().out)
    assert len(reported) == 3 * 2 * len(ids) and set(reported) == {
        "(slice(0, 128, 1), slice(0, 128, 1))"
    }
    expected = exact_attention(arrays, ids, weights, None)
    assert max(map(difference, found, expected)) <= 1e-6


# --- ragged paged attention: decoding ------------------------------------------------------------

# At, before and after the end of one page and of two, one token, all that a slot may have; idle
# slots (0) first, last and between.
LENGTHS = (0, 15, 16, 17, 31, 0, 32, 33, 1, SIZE * WIDTH, 129, 70, 0)
FEW = (0, 17, 16, 15, 33, 0, 40, 1, 18, 0)  # more than the kernel works on at a time


def assert_decodes(slots: Slots, result, window: int | None, tolerance: float) -> None:
    """The step's output is the loops', its pages have the new tokens and are else as before."""
    mixed, pages = result
    busy = slots.lengths > 0
    assert np.isfinite(np.asarray(mixed, np.float32)).all()  # of idle slots, too
    found = difference(np.asarray(mixed, np.float32)[busy], slots.mixed(window)[busy])
    print(found)
    assert found <= tolerance
    np.testing.assert_array_equal(np.asarray(pages, np.float32)[1:], slots.written()[1:])


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), read_table(__file__, "ragged")
)
def test_ragged_kernel_reads_each_slots_pages(heads, kv_heads, head_dim, window, dtype, one_device):
    slots = make_slots(heads, kv_heads, head_dim, LENGTHS, dtype)
    step = decode(one_device, window and Window(window))
    result, kernels = interpret(step, *slots.arrays(dtype))
    assert len(kernels) == 1
    assert_decodes(slots, result, window, 1e-6 if dtype == FLOAT32 else 3.9e-3)


@pytest.mark.parametrize("cache_dtype", ["auto", "int8_per_head"])
def test_engine_draws_by_the_ragged_kernel_what_it_draws_otherwise(
    cache_dtype, monkeypatch, one_device
):
    """Prefill into pages, shared pages of prompts, bursts, slots that end and begin.

    Otherwise: from slots, or of int8 from gathered pages.
    """
    config = dataclasses.replace(TINY, head_dim=128)
    params = sharding.unbox(init_params(config, jax.random.key(0)))
    params |= {"embedding": params["embedding"] * 20}
    tokens = [[2 + (7 * length + j) % 20 for j in range(length)] for length in (18, 9, 2)]
    prompts = [make_prompt(i, prompt) for i, prompt in enumerate(tokens)]
    kernel = True
    monkeypatch.setattr(cache_layout, "has_kernel", lambda *_: kernel)

    def draw(cache: str):
        settings = Sampler(slots=4, burst_tokens=3, max_response_tokens=20, cache=cache)
        settings.page_tokens, settings.first_window_tokens = 8, 8
        settings.cache_dtype = cache_dtype
        engine = PolicyEngine(
            config,
            one_device,
            settings,
            max_prompt_tokens=18,
            end_ids=TOKENIZER.end_ids,
            insert_width=4,
        )
        groups = sample(Scheduler(engine, TOKENIZER, seed=5), params, prompts, 3)
        return {i: [done.tokens.tolist() for done in group] for i, group in groups.items()}

    with interpreted() as kernels:
        drawn = draw("paged")
    assert len(kernels) >= 20 * config.layers
    kernel = False
    forget_programs()
    assert drawn == draw("slots" if cache_dtype == "auto" else "paged")


def test_ragged_kernel_has_no_race(one_device):
    slots = make_slots(4, 2, 128, FEW, BFLOAT16)
    result, races = interpret(decode(one_device), *slots.arrays(BFLOAT16), detect_races=True)
    assert races == [False]
    assert_decodes(slots, result, None, 3.9e-3)


# --- megablox: gradients by experts' matrices ----------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [(0, 100, 0, 0, 156, 21, 0), (0, 0, 384), (0, 0, 0), (128, 0, 128, 128), (1, 0, 1, 382)],
    ids=str,
)
def test_gradients_by_matrices_are_plain_products_of_each_group(sizes, dtype):
    """Groups without rows get zeros; rows of no group, which hold anything, reach nothing."""
    rng, rows, inner, outer = np.random.default_rng(2), 384, 128, 640  # 640: a tile and a part
    left, right = (normal(rng, (rows, width), dtype) for width in (inner, outer))
    inside = (jnp.arange(rows) < sum(sizes))[:, None]
    left, right = (jnp.where(inside, array, jnp.nan) for array in (left, right))

    def gradient(left, right, sizes):
        return matrices_gradient(left, right, sizes)

    found, kernels = interpret(gradient, left, right, jnp.array(sizes, jnp.int32))
    assert len(kernels) == 1
    ends = np.cumsum(sizes)
    exact = [np.asarray(array, np.float64) for array in (left, right)]
    for matrix, start, end in zip(found, ends - np.array(sizes), ends, strict=True):
        expected = exact[0][start:end].T @ exact[1][start:end]
        if start == end:
            assert not np.asarray(matrix, np.float32).any()
        else:
            print(difference(matrix, expected))
            assert difference(matrix, expected) <= (5e-7 if dtype == FLOAT32 else 2**-8)


def test_gradients_by_matrices_have_no_race_between_two_cores():
    rng, sizes = np.random.default_rng(2), jnp.array((0, 100, 284), jnp.int32)
    left, right = (normal(rng, (384, width), FLOAT32) for width in (128, 640))

    def gradient(left, right, sizes):
        return matrices_gradient(left, right, sizes)

    found, races = interpret(gradient, left, right, sizes, **TWO_CORES)
    assert races == [False]
    assert difference(found[2], np.asarray(left)[100:].T @ np.asarray(right)[100:]) <= 1e-6
