"""Sliding windows in training, prefill, decoding and scoring; which layers have one."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from flax.traverse_util import flatten_dict

from dapo_jax.model import inference
from dapo_jax.model.caches import KVCache, PageCache
from dapo_jax.model.config_json import decoder_from_json, decoder_to_json
from dapo_jax.model.decode_attention import PagedAttention, SlotContext, attend_slots
from dapo_jax.model.decoder import (
    Decoder,
    for_decoding,
    head_kernel,
    init_params,
    layer_paths,
    scaled_embeddings,
)
from dapo_jax.model.rotary import RopeScaling
from dapo_jax.runtime.settings import ConfigError
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


@pytest.mark.slow
@pytest.mark.parametrize(("sliding", "first"), [((), 7), ((True, False), 0)])
def test_the_last_token_sees_as_far_as_its_layers_together(sliding, first, tiny_params):
    """Two layers with a window of three reach back four tokens; a full one reaches all."""
    config = dataclasses.replace(MIXED, sliding=sliding)

    def last(embedded):
        table = jnp.concatenate([tiny_params["embedding"], embedded])
        params, own = tiny_params | {"embedding": table}, 32 + jnp.arange(LENGTH)[None]
        return jnp.sum(jnp.sin(hidden(params, dataclasses.replace(config, vocab=44), own)[0, -1]))

    gradient = jax.grad(last)(tiny_params["embedding"][TOKENS[0]])
    reached = np.flatnonzero(np.abs(gradient).sum(axis=1) > 0)
    assert reached.tolist() == list(range(first, LENGTH))


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


def test_slots_pages_and_scores_equal_training(one_device):
    """Of layers that differ in window and rotation, and with the other switches of Gemma."""
    stacked = unbox(init_params(GEMMA, jax.random.key(0)))
    noise = iter(jax.random.split(jax.random.key(1), 99))
    stacked = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), stacked)
    logits = (hidden(stacked, GEMMA) @ head_kernel(stacked))[0]
    params, run = unstacked(stacked, GEMMA), jax.jit(decode, static_argnums=(2, 4))
    shape = (1, TINY.kv_heads, LENGTH, TINY.head_dim)
    slots = KVCache(jnp.zeros(shape).swapaxes(2, 3), jnp.zeros(shape))
    found = run(params, slots, attend_slots, None, GEMMA)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    pages = PageCache(jnp.zeros((5, 4, 2 * TINY.kv_heads, TINY.head_dim)))
    attend = PagedAttention(one_device, kernel=False)
    with jax.set_mesh(one_device):
        found = run(params, pages, attend, jnp.array([[3, 1, 4]]), GEMMA)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    scored, *_ = inference.score(params, GEMMA, TOKENS[0], likeliest=1, chunk_tokens=4)
    wanted = jax.nn.log_softmax(logits)[jnp.arange(LENGTH - 1), TOKENS[0, 1:]]
    np.testing.assert_allclose(scored[:-1], wanted, atol=1e-5)


BASE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("values", "window", "sliding"),
    [
        ({"model_type": "qwen2", "sliding_window": 8}, None, ()),
        ({"model_type": "qwen2", "use_sliding_window": True}, None, ()),  # of 28 layers and more
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, 4096, ()),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2},
            4096,
            (False, False, True),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": [SLIDING, FULL, FULL],
            },
            8,
            (True, False, False),
        ),
        ({"model_type": "mistral"}, 4096, ()),
        ({"model_type": "mistral", "sliding_window": None}, None, ()),
        ({"model_type": "ministral", "layer_types": [FULL, FULL, FULL]}, None, ()),
        ({"model_type": "ministral", "sliding_window": 8}, 8, ()),
        ({"model_type": "ministral3", "rope_scaling": None}, None, ()),
        ({"model_type": "llama", "sliding_window": 8}, None, ()),  # nothing reads it
        ({"model_type": "gemma3_text"}, 4096, ()),  # every sixth layer is full
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, 4096, (True, False, True)),
    ],
)
def test_windows_are_those_that_transformers_reads(values, window, sliding):
    config = decoder_from_json(BASE | values, "folder", "model.folder")
    assert (config.window, config.sliding) == (window, sliding)
    assert [config.of_layer(i).window for i in range(3)] == [
        window if slides else None for slides in sliding or (True,) * 3
    ]
    written = json.loads(json.dumps(decoder_to_json(config)))
    assert decoder_from_json(written, "folder", "model.folder") == config


def test_older_and_newer_folders_of_gemma_mean_the_same():
    old = BASE | {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}
    old |= {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    tables = {FULL: old["rope_scaling"] | {"rope_theta": 5e5}, SLIDING: {"rope_type": "default"}}
    new = BASE | {"model_type": "gemma3_text", "sliding_window": 8, "rope_parameters": tables}
    new["layer_types"] = [SLIDING, FULL, SLIDING]
    config = decoder_from_json(old, "old", "model.folder")
    assert decoder_from_json(new, "new", "model.folder") == config
    assert config.tie_embeddings and config.head_dim == 256 and config.query_scalar == 256
    full, sliding = config.of_layer(1), config.of_layer(0)
    assert (full.rope_theta, full.rope_scaling) == (5e5, RopeScaling(8.0, kind="linear"))
    assert (sliding.rope_theta, sliding.rope_scaling) == (1e4, None)


def test_the_scale_of_embeddings_is_rounded_as_they_are():
    wide = dataclasses.replace(GEMMA, embed=3072, dtype=jnp.bfloat16)
    ones = jnp.ones((1, 3072), jnp.bfloat16)
    assert (scaled_embeddings(ones, wide) == 55.5).all()  # the root is 55.4256


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50}, "attn_logit_softcapping 50"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {SLIDING: {"rope_type": "yarn"}}},
            "no 'factor'",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2}},
            },
            "of sliding_attention: must be of type 'default'",
        ),
        ({"model_type": "qwen2", "layer_types": [SLIDING] * 3}, "must be full_attention, each"),
        ({"model_type": "mistral", "layer_types": [FULL] * 3}, "must be sliding_attention, each"),
        ({"model_type": "ministral", "layer_types": [FULL] * 2}, "or sliding_attention, each of 3"),
        ({"model_type": "ministral", "layer_types": [FULL, "linear", FULL]}, "'linear'"),
        ({"model_type": "ministral", "sliding_window": 0}, "sliding_window = 0: must be a whole"),
    ],
)
def test_layers_that_no_window_fits_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        decoder_from_json(BASE | values, "folder", "model.folder")
