"""Sliding windows in training, prefill, decoding and scoring; which layers have one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from conftest import TINY
from flax.traverse_util import flatten_dict

from dapo_jax.model import inference
from dapo_jax.model.caches import KVCache, PageCache
from dapo_jax.model.decode_attention import PagedAttention, SlotContext, attend_slots
from dapo_jax.model.decoder import (
    Decoder,
    for_decoding,
    head_kernel,
    init_params,
    layer_paths,
    scaled_embeddings,
)
from dapo_jax.runtime.sharding import unbox

MIXED = dataclasses.replace(TINY, window=3, sliding=(True, False))
GEMMA = dataclasses.replace(  # every switch of the family
    MIXED,
    sliding_rope_theta=10.0,
    query_scalar=5,
    out_norms=True,
    norm_offset=True,
    scale_embeddings=True,
    activation="gelu_tanh",
)
LENGTH = 12
TOKENS = jax.random.randint(jax.random.key(1), (1, LENGTH), 2, 32)
ROW = TOKENS, jnp.ones((1, LENGTH), jnp.int32), jnp.arange(LENGTH)[None]


def hidden(params, config, tokens=TOKENS):
    return Decoder(config).apply({"params": params}, tokens, *ROW[1:])


def unstacked(params, config):
    """Parameters as decoding has them."""
    flat = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        layers = layer_paths(path, config)
        flat |= {path: leaf} if layers == [path] else dict(zip(layers, leaf, strict=True))
    return for_decoding(flat, config)


def test_frozen_layers_keep_their_own_windows(tiny_params):
    frozen, trained = (
        jax.tree.map(lambda leaf, at=at: leaf[at], tiny_params["layers"])
        for at in (slice(0, 1), slice(1, 2))
    )
    params = tiny_params | {"frozen_layers": frozen, "layers": trained}
    split = hidden(params, dataclasses.replace(MIXED, frozen_layers=1))
    np.testing.assert_allclose(split, hidden(tiny_params, MIXED), atol=1e-6)


def decode(params, cache, attend, tables, config):
    """Logits after each token, fed one by one."""

    def feed(caches, place):
        context = SlotContext(place[None, None], jnp.array([True]), tables)
        fed = params, config, attend, TOKENS[0, place][None], context, caches
        logits, caches, _ = inference.decode_step(*fed)
        return caches, logits[0]

    return jax.lax.scan(feed, (cache,) * config.layers, jnp.arange(LENGTH))[1]


def assert_decoding_equals_training(stacked, config, mesh):
    logits = (jax.jit(hidden, static_argnums=1)(stacked, config) @ head_kernel(stacked))[0]
    params, run = unstacked(stacked, config), jax.jit(decode, static_argnums=(2, 4))
    shape = (1, TINY.kv_heads, LENGTH, TINY.head_dim)
    slots = KVCache(jnp.zeros(shape).swapaxes(2, 3), jnp.zeros(shape))
    pages = PageCache(jnp.zeros((5, 4, 2 * TINY.kv_heads, TINY.head_dim)))
    with jax.set_mesh(mesh):
        decoded = (
            run(params, slots, attend_slots, None, config),
            run(params, pages, PagedAttention(mesh, kernel=False), jnp.array([[3, 1, 4]]), config),
        )
    np.testing.assert_allclose(decoded[0], logits, atol=2e-5)
    np.testing.assert_allclose(decoded[1], logits, atol=2e-5)
    scored, *_ = inference.score(params, config, TOKENS[0], likeliest=1, chunk_tokens=4)
    expected = jax.nn.log_softmax(logits)[jnp.arange(LENGTH - 1), TOKENS[0, 1:]]
    np.testing.assert_allclose(scored[:-1], expected, atol=2e-5)


def test_slots_pages_and_scores_equal_training(one_device):
    """Of layers that differ in window and rotation, and with the other switches of Gemma."""
    stacked = unbox(init_params(GEMMA, jax.random.key(0)))
    noise = iter(jax.random.split(jax.random.key(1), 99))
    stacked = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), stacked)
    assert_decoding_equals_training(stacked, GEMMA, one_device)


def test_the_scale_of_embeddings_is_rounded_as_they_are():
    wide = dataclasses.replace(GEMMA, embed=3072, dtype=jnp.bfloat16)
    ones = jnp.ones((1, 3072), jnp.bfloat16)
    assert (scaled_embeddings(ones, wide) == 55.5).all()  # the root is 55.4256
