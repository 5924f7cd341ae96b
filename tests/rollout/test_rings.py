"""Layers with a window have ring buffers: the same responses in less memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from samplers import (
    GREEDY,
    PROMPTS,
    greedy_loop,
    make_engine,
    make_sampler,
    place,
    sample,
    tokens_of,
)

from dapo_jax.config.experiment import Sampler
from dapo_jax.model.caches import KVCache, PageCache
from dapo_jax.model.decode_attention import in_ring
from dapo_jax.model.decoder import init_params
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run import memory
from dapo_jax.runtime.sharding import make_mesh, unbox

WINDOW = 5  # prompts are of 3 to 7 tokens, responses of 20
MIXED = dataclasses.replace(TINY, layers=3, window=WINDOW, sliding=(True, False, True))
ALL = dataclasses.replace(TINY, window=WINDOW)
LAYOUTS = {"slots": {}, "pages": {"cache": "paged", "page_tokens": 4}}
SOME = PROMPTS[:5]


def params_of(config):
    params = unbox(init_params(config, jax.random.key(0)))
    return params | {"embedding": params["embedding"] * 20}


def open_sampler(mesh, config, **settings) -> Scheduler:
    return make_sampler(mesh, config=config, **settings)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_a_ring_holds_its_newest_tokens(length):
    for last in range(20):
        ring = {}
        for position in range(last + 1):
            ring[position % length] = position
        actual = np.asarray(in_ring(length, jnp.array([[last]])))[0]
        assert [ring.get(i, -1) for i in range(length)] == np.maximum(actual, -1).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config", [MIXED, pytest.param(ALL, marks=pytest.mark.slow)], ids=["mixed", "all"]
)
def test_greedy_decoding_equals_the_whole_forward_pass(config, layout, one_device):
    params, sampler = params_of(config), open_sampler(one_device, config, **LAYOUTS[layout])
    groups = sample(sampler, params, SOME, 1, GREEDY)
    for prompt in SOME:
        expected = greedy_loop(params, prompt.tokens.tolist(), 20, config)
        assert groups[prompt.index][0].tokens.tolist() == expected
    assert max(len(done) for (done,) in groups.values()) > 2 * WINDOW


@pytest.fixture(scope="module")
def tokens(one_device):
    return tokens_of(sample(open_sampler(one_device, MIXED), params_of(MIXED), SOME))


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 8, "burst": 7, "first_window_tokens": 2, "prefill_chunk_tokens": 3},
        {"cache": "paged", "page_tokens": 4, "pages": 16, "prefill_prompts": 4},
    ],
    ids=["growing", "few pages"],
)
def test_tokens_do_not_depend_on_the_layout(settings, one_device, tokens):
    sampler = open_sampler(one_device, MIXED, **settings)
    assert tokens_of(sample(sampler, params_of(MIXED), SOME)) == tokens


@pytest.mark.parametrize("layout", [pytest.param("slots", marks=pytest.mark.slow), "pages"])
def test_eight_devices_sample_what_one_does(layout, tokens):
    mesh, params = make_mesh(2, 2, 2), params_of(MIXED)
    sharded = open_sampler(mesh, MIXED, slots=8, **LAYOUTS[layout])
    assert tokens_of(sample(sharded, place(params, MIXED, mesh), SOME)) == tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_ring_is_as_long_as_the_window(layout, dtype, one_device):
    engine = make_engine(one_device, config=MIXED, cache_dtype=dtype, **LAYOUTS[layout])
    caches = engine.programs.empty(window=28).caches
    first, full, last = (sum(x.nbytes for x in jax.tree.leaves(cache)) for cache in caches)
    assert first == last < full / 4
    assert [type(cache) for cache in caches[::2]] == [KVCache, KVCache]
    assert isinstance(caches[1], PageCache if layout == "pages" else KVCache)
    if layout == "slots":
        estimate = memory.cache_bytes(MIXED, Sampler(cache_dtype=dtype), one_device, 4, 8, 20)
        assert estimate == first + full + last + 4 * 20 * memory.SAMPLED_TOKEN_BYTES


def test_a_window_longer_than_the_cache_uses_pages(one_device):
    wide = dataclasses.replace(MIXED, window=28)
    engine = make_engine(one_device, config=wide, **LAYOUTS["pages"])
    assert all(isinstance(c, PageCache) for c in engine.init_decode_state().caches)
