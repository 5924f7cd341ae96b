"""Attention without a [T, T] array equals plain attention, and is what a long row is trained by."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY

from dapo_jax.config.experiment import Compute
from dapo_jax.model import blockwise_attention, decoder, splash_attention, training_attention
from dapo_jax.run.compute import numerics
from dapo_jax.runtime import sharding
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import make_mesh

RNG = np.random.default_rng(3)
ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 4, 384, 4, 2, 16


def ragged_ids(length: int, rows: int = ROWS) -> np.ndarray:
    """Rows of segments of very different lengths; the first is full, the last nearly empty."""
    ids = np.zeros((rows, length), np.int32)
    for row in range(rows):
        end = length - row * (length // rows)
        cuts = np.sort(RNG.choice(np.arange(1, end), 5, replace=False)) if row else []
        ids[row, :end] = 1 + np.searchsorted(cuts, np.arange(end), side="right")
    return ids


def inputs(length: int = LENGTH):
    """Queries, keys, values, and the weights of a loss that tells every output apart."""
    shapes = [(ROWS, length, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


def results(name: str, arrays, ids, mesh=None, window=None):
    """Output and gradients of one kind of training attention; `window` as arrays of one program.

    Padding, whose output nothing reads, is left out.
    """
    queries, keys, values, weights = arrays
    context = training_attention.Context(jnp.zeros_like(ids), jnp.asarray(ids))

    def loss(queries, keys, values, window):
        arrays = queries, keys, values, context, None, window
        mixed, _ = training_attention.TRAINING_ATTENTION[name](*arrays)
        mixed = jnp.where(jnp.asarray(ids)[..., None, None] > 0, mixed, 0)
        return jnp.sum(jnp.sin(mixed) * weights), mixed

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    if mesh is None:
        return run(queries, keys, values, window)
    with sharding.activate(mesh):
        return run(queries, keys, values, window)


def assert_equal(actual, expected, tolerance=2e-6):
    def check(a, b):
        assert np.abs(np.asarray(a) - b).max() <= tolerance * max(np.abs(b).max(), 1)

    jax.tree.map(check, jax.device_get(actual), jax.device_get(expected))


@pytest.mark.parametrize("length", [64, 50, 16, 1])
def test_blocked_attention_equals_plain(length, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 16)
    ids = ragged_ids(length) if length > 16 else np.ones((ROWS, length), np.int32)
    arrays = inputs(length)
    assert_equal(results("blocked", arrays, ids), results("plain", arrays, ids))


@pytest.fixture(scope="module")
def by_plain():
    """Arrays, segments, and what plain attention makes of them."""
    arrays, ids = inputs(), ragged_ids(LENGTH)
    return arrays, ids, results("plain", arrays, ids)


@pytest.mark.parametrize("block", [128, 1024])
def test_splash_attention_equals_plain(block, monkeypatch, one_device, by_plain):
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", block)  # 3 x 3 blocks, or one
    arrays, ids, expected = by_plain
    assert_equal(results("splash", arrays, ids, one_device), expected)


@pytest.mark.parametrize("window", [None, 200])
def test_splash_skips_blocks_of_other_segments(window, monkeypatch, one_device):
    """NaN in a segment stays in its blocks and their gradients; a mask alone would spread it."""
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    ids = np.repeat([[1, 2, 2, 3, 0, 0]], 128, axis=1)
    arrays = [array[:1] for array in inputs(ids.size)]
    spoilt = [array.at[:, 128:384].set(jnp.nan) for array in arrays]
    shown = window and training_attention.Window(window, jnp.array(True))
    outcomes = [
        jax.device_get(results("splash", x, ids, one_device, shown)) for x in (arrays, spoilt)
    ]
    for whole, found in zip(*map(jax.tree.leaves, outcomes), strict=True):
        others = np.delete(found, np.s_[128:384], axis=1)
        np.testing.assert_array_equal(others, np.delete(whole, np.s_[128:384], axis=1))
        assert np.isnan(found[:, 128:384]).all()


@pytest.mark.parametrize("sizes", [(2, 2, 1, 2), (1, 2, 2, 2), (1, 1, 4, 2)])
@pytest.mark.parametrize("name", ["blocked", "splash"])
def test_each_device_attends_with_its_own_rows_and_heads(name, sizes, monkeypatch, by_plain):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 128)
    data, fsdp, decode_tensor, tensor = sizes
    mesh = make_mesh(data, fsdp, tensor, decode_tensor=decode_tensor)
    arrays, ids, expected = by_plain
    assert_equal(results(name, arrays, ids, mesh), expected)


def loop_mask(ids: np.ndarray, window: int) -> np.ndarray:
    """Pairs of query and key in the same segment, the key at most `window` - 1 before."""
    mask = np.zeros((*ids.shape, ids.shape[1]), bool)
    for row, query, key in np.ndindex(mask.shape):
        mask[row, query, key] = 0 <= query - key < window and ids[row, query] == ids[row, key]
    return mask


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_window_masks_what_a_loop_masks(tokens):
    ids = ragged_ids(32)
    for slides, seen in ((None, tokens), (jnp.array(True), tokens), (jnp.array(False), 32)):
        window = training_attention.Window(tokens, slides)
        np.testing.assert_array_equal(
            training_attention.packed_mask(jnp.asarray(ids), window), loop_mask(ids, seen)
        )


@pytest.mark.parametrize(("length", "tokens"), [(50, 7), (50, 16), (50, 33), (50, 1), (9, 3)])
def test_blocked_attention_with_a_window_equals_plain(length, tokens, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 16)
    ids = ragged_ids(length) if length > 16 else np.ones((ROWS, length), np.int32)
    arrays, window = inputs(length), training_attention.Window(tokens)
    expected = results("plain", arrays, ids, window=window)
    assert_equal(results("blocked", arrays, ids, window=window), expected)


@pytest.mark.parametrize("name", ["blocked", "splash"])
def test_one_program_attends_in_sliding_layers_and_in_full_ones(name, monkeypatch, by_plain):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 64)
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    arrays, ids, full = by_plain
    sliding = results("plain", arrays, ids, window=training_attention.Window(100))
    mesh = make_mesh(2, 2, 2)
    for slides, expected in ((True, sliding), (False, full)):
        window = training_attention.Window(100, jnp.array(slides))
        assert_equal(results(name, arrays, ids, mesh, window), expected)


def gradient_program(config: decoder.DecoderConfig, length: int, mesh):
    """Text of the compiled gradient of a decoder over rows of `length` tokens."""
    params = sharding.unbox(decoder.abstract_params(config))
    rows = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def loss(params, tokens):
        return jnp.sum(decoder.Decoder(config).apply({"params": params}, tokens, tokens, tokens))

    with sharding.activate(mesh):
        return jax.jit(jax.grad(loss)).lower(params, rows).as_text()


def test_no_array_of_a_blocked_program_is_as_large_as_length_squared(one_device):
    length = 1536
    text = gradient_program(dataclasses.replace(TINY, attention="blocked"), length, one_device)
    plain = gradient_program(TINY, length, one_device)
    square = rf"x{length}x{length}x"
    assert re.search(square, plain) and not re.search(square, text)


@pytest.mark.parametrize("name", ["blocked", "splash"])
def test_remat_attention_keeps_what_attention_needs(name, one_device):
    """Where it is recomputed, it is named once more."""

    def count(remat: str, what: str = "name=attention") -> int:
        config = dataclasses.replace(TINY, attention=name, remat=remat)
        params = sharding.unbox(decoder.abstract_params(config))
        rows = jax.ShapeDtypeStruct((2, 256), jnp.int32)

        def loss(params, tokens):
            hidden = decoder.Decoder(config).apply({"params": params}, tokens, tokens, tokens)
            return jnp.sum(hidden)

        with sharding.activate(one_device):
            return str(jax.make_jaxpr(jax.grad(loss))(params, rows)).count(what)

    assert count("dots") == count("attention") == count("none") < count("full")
    product = "dot_general["
    assert count("none", product) == count("dots", product) < count("attention", product)


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "blocked"])
def test_what_backward_keeps_does_not_change_the_numbers(name, tiny_params, one_device):
    tokens = jnp.asarray(RNG.integers(2, 32, (2, 24)))
    ids = jnp.asarray(ragged_ids(24, rows=2))

    def gradient(remat):
        config = dataclasses.replace(TINY, attention=name, remat=remat)

        def loss(params):
            hidden = decoder.Decoder(config).apply({"params": params}, tokens, ids, tokens)
            return jnp.sum(jnp.sin(hidden))

        with sharding.activate(one_device):
            return jax.jit(jax.grad(loss))(tiny_params)

    expected = gradient("none")
    for remat in ("full", "dots", "attention", "offload"):
        assert_equal(gradient(remat), expected, 1e-5)


class _Devices:
    """Stand-in for a mesh of devices that this machine lacks."""

    def __init__(self, platform: str, memories=("device",)):
        self.platform, self._memories = platform, memories
        self.devices, self.shape = np.array([self], object), {"context": 1}

    def addressable_memories(self):
        kinds = type("Memory", (), {"__init__": lambda self, kind: setattr(self, "kind", kind)})
        return [kinds(kind) for kind in self._memories]


def test_attention_that_rows_or_devices_do_not_support_is_rejected():
    on_tpu = functools.partial(numerics, mesh=_Devices("tpu"))
    assert on_tpu(Compute(), row_tokens=22_528)["attention"] == "splash"
    assert on_tpu(Compute(attention="blocked"), row_tokens=22_500)["attention"] == "blocked"
    with pytest.raises(ConfigError, match=r"packing.row_tokens = 22500.*multiple of 128"):
        on_tpu(Compute(), row_tokens=22_500)
    with pytest.raises(ConfigError, match=r"compute.attention = 'splash'.*on gpu"):
        numerics(Compute(attention="splash"), _Devices("gpu"), 256)
    with pytest.raises(ConfigError, match=r"compute.remat = 'offload'.*pinned_host"):
        on_tpu(Compute(remat="offload"), row_tokens=256)
