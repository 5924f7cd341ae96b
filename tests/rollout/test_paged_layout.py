"""Layout of the cache by platform and shape: which pages the TPU's ragged kernel reads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from paged_slots import SIZE, WIDTH, decode, make_slots
from samplers import make_engine, place

from dapo_jax.commands.plan.simulate import named_mesh
from dapo_jax.config.experiment import Mesh, Sampler
from dapo_jax.model.decode_attention import has_kernel, interleave, rounded
from dapo_jax.model.inference import prefill
from dapo_jax.rollout.paged_cache import PagedLayout, choose_layout
from dapo_jax.rollout.slot_cache import SlotLayout
from dapo_jax.runtime.settings import ConfigError


def layout(cache: str = "auto", *, tensor: int = 1, cache_dtype: str = "auto", **shape):
    """Layout on TPU chips of pages of 16 tokens."""
    config, chips = (
        dataclasses.replace(TINY, **shape),
        named_mesh(Mesh(tensor=tensor), "tpu", tensor),
    )
    settings = Sampler(slots=2, page_tokens=SIZE, cache=cache, cache_dtype=cache_dtype)
    return choose_layout(config, chips, settings, SIZE * WIDTH)


@pytest.mark.parametrize("head_dim", [64, 96, 192])
def test_unaligned_heads_never_use_the_ragged_kernel(head_dim, monkeypatch, one_device):
    def called(*args, **options):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", called)
    slots = make_slots(4, 2, head_dim, (5, 20), jnp.float32)
    slots.pages = np.nan_to_num(slots.pages)  # gathered keys of weight 0 are multiplied
    with pytest.raises(AssertionError, match="the kernel was called"):
        jax.jit(decode(one_device, kernel=True))(*slots.arrays(jnp.float32))
    assert isinstance(layout(head_dim=head_dim), SlotLayout)
    kernel = layout("paged", head_dim=head_dim).attend.kernel
    mixed, _ = jax.jit(decode(one_device, kernel=kernel))(*slots.arrays(jnp.float32))
    np.testing.assert_allclose(mixed, slots.mixed(), atol=2e-6)


BFLOAT16, FLOAT32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype"),
    [
        *((heads, 128, BFLOAT16) for heads in (1, 3, 8, 10, 16)),
        *((heads, 128, FLOAT32) for heads in (3, 8, 10)),
        (2, 64, BFLOAT16),
        (2, 256, BFLOAT16),
    ],
)
def test_supported_kernel_shapes_are_those_that_jax_traces(kv_heads, head_dim, dtype, one_device):
    arrays = make_slots(2 * kv_heads, kv_heads, head_dim, (5,), dtype).arrays(dtype)
    try:
        jax.eval_shape(decode(one_device), *arrays)
        traced = True
    except (AssertionError, ValueError):
        traced = False
    assert has_kernel("tpu", head_dim, SIZE, kv_heads, dtype) == traced
    assert not has_kernel("gpu", head_dim, SIZE, kv_heads, dtype)


def test_the_layout_depends_on_the_heads_per_device():
    of_heads = {"head_dim": 128, "heads": 40, "kv_heads": 40, "dtype": jnp.bfloat16}
    assert isinstance(layout(**of_heads), PagedLayout)
    assert layout(**of_heads).attend.kernel
    assert isinstance(layout(tensor=4, **of_heads), SlotLayout)  # 10 of each
    assert not layout("paged", tensor=4, **of_heads).attend.kernel


def test_int8_pages_on_tpu_need_a_scale_per_head():
    by_head = {"cache_dtype": "int8_per_head", "head_dim": 128}
    assert layout(**by_head).attend.kernel
    with pytest.raises(ConfigError, match=r"sampler.cache_dtype = 'int8_per_head'.*2, 4, 8 or"):
        layout(**by_head, kv_heads=1)  # a word has four int8
    with pytest.raises(ConfigError, match=r"sampler.cache = 'slots'.*'paged' or 'auto'"):
        layout("slots", **by_head)
    assert isinstance(layout(cache_dtype="int8", head_dim=128), SlotLayout)
    with pytest.raises(ConfigError, match=r"sampler.cache = 'paged'.*reads no scales"):
        layout("paged", cache_dtype="int8", head_dim=128)


def test_calibrated_scales_cover_other_prompts(tiny_params, one_device):
    engine = make_engine(one_device, cache="paged", page_tokens=4, cache_dtype="int8_per_head")
    params = engine.load_params(place(tiny_params, TINY, one_device))
    scales = engine.init_decode_state().caches
    prompt = np.array([[3, 9, 4, 7, 20, 5, 2, 11]])
    caches, _ = prefill(params, TINY, jnp.asarray(prompt), jnp.array([8]))
    for own, cache in zip(scales, caches, strict=True):
        pairs = np.asarray(interleave(cache.keys, cache.values, 2))
        assert own.scales.shape == (2 * TINY.kv_heads,) and (pairs.max((0, 1, 3)) > 0).all()
        shares = np.abs(pairs).max((0, 1, 3)) / (127 * np.asarray(own.scales))
        assert (shares > 0.2).all() and (shares <= 1).all()
        whole, none = rounded(own, jnp.asarray(pairs) * 100)  # what is beyond them is cut off
        assert none is None and np.abs(np.asarray(whole, int)).max() == 127
