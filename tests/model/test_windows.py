"""Sliding windows and attention sinks in training, prefill, decoding and scoring."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import TINY
from flax.traverse_util import flatten_dict, unflatten_dict
from named_meshes import named_mesh
from test_attention import GEMMA, SINKS, assert_equal, inputs, ragged_ids, results

from dapo_jax.config.experiment import Mesh, Sampler
from dapo_jax.model import inference
from dapo_jax.model.caches import KVCache, PageCache
from dapo_jax.model.decode_attention import PagedAttention, SlotContext, attend_slots
from dapo_jax.model.decoder import (
    Decoder,
    abstract_params,
    for_decoding,
    head_kernel,
    init_params,
    layer_paths,
    scaled_embeddings,
)
from dapo_jax.model.lm_head import Scale
from dapo_jax.rollout.cache_layout import CacheLayout
from dapo_jax.runtime.sharding import unbox

LENGTH = 12
TOKENS = np.random.default_rng(1).integers(2, 32, (1, LENGTH)).astype(np.int32)
ROW = TOKENS, np.ones((1, LENGTH), np.int32), np.arange(LENGTH, dtype=np.int32)[None]


@functools.partial(jax.jit, static_argnums=1)
def hidden(params, config, tokens=TOKENS):
    return Decoder(config).apply({"params": params}, tokens, *ROW[1:])


def unstacked(params, config):
    """Parameters as decoding has them."""
    flat = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        layers = layer_paths(path, config)
        flat |= {path: leaf} if layers == [path] else dict(zip(layers, leaf, strict=True))
    return for_decoding(flat, config)


def decode(params, caches, attend, tables, config, count):
    """Logits after each token, fed `count` at a time."""

    def feed(caches, places):
        context = SlotContext(places[None], jnp.array([True]), tables)
        fed = params, config, attend, jnp.asarray(TOKENS)[:, places], context, caches
        logits, caches, _ = inference.decode_step(*fed)
        return caches, logits[0]

    logits = jax.lax.scan(feed, caches, jnp.arange(LENGTH).reshape(-1, count))[1]
    return logits.reshape(LENGTH, -1)


def assert_decoding_equals_training(stacked, config, mesh):
    logits = np.asarray(hidden(stacked, config)) @ np.asarray(head_kernel(stacked))
    logits = Scale(cap=config.logit_cap).logits(logits[0])
    params, run = unstacked(stacked, config), jax.jit(decode, static_argnums=(2, 4, 5))
    layers = config.each_layer[: config.cached_layers]
    empty = [jnp.zeros((1, layer.kv_heads, LENGTH, layer.head_dim)) for layer in layers]
    slots = tuple(KVCache(values.swapaxes(2, 3), values) for values in empty)
    shapes = [(5, 4, 2 * layer.kv_heads, layer.head_dim) for layer in layers]
    pages = tuple(PageCache(jnp.zeros(shape)) for shape in shapes)
    by_pages = pages, PagedAttention(mesh, kernel=False), jnp.array([[3, 1, 4]]), config
    with jax.set_mesh(mesh):
        for cache, count in (
            ((slots, attend_slots, None, config), 1),
            (by_pages, 1),
            (by_pages, 3),
        ):
            np.testing.assert_allclose(run(params, *cache, count), logits, atol=2e-5)
    score = functools.partial(inference.score, config=config, likeliest=1, chunk_tokens=4)
    scored, *_ = jax.jit(score)(params, tokens=TOKENS[0])
    expected = jax.nn.log_softmax(logits)[jnp.arange(LENGTH - 1), TOKENS[0, 1:]]
    np.testing.assert_allclose(scored[:-1], expected, atol=2e-5)


def test_slots_pages_and_scores_equal_training(one_device):
    """Of layers that differ in window and rotation, and with the other switches of Gemma."""
    stacked = unbox(jax.jit(init_params, static_argnums=0)(GEMMA, jax.random.key(0)))
    noise = np.random.default_rng(1)
    stacked = jax.tree.map(lambda x: x + np.float32(noise.normal(0, 0.1, x.shape)), stacked)
    assert_decoding_equals_training(stacked, GEMMA, one_device)


def test_the_scale_of_embeddings_is_rounded_as_they_are():
    wide = dataclasses.replace(GEMMA, embed=3072, dtype=jnp.bfloat16)
    ones = jnp.ones((1, 3072), jnp.bfloat16)
    assert (scaled_embeddings(ones, wide) == 55.5).all()  # the root is 55.4256


# --- sinks ---------------------------------------------------------------------------------------

GPT_OSS = dataclasses.replace(  # every switch of the family
    TINY,
    family="gpt_oss",
    window=3,
    sliding=(True, False),
    out_bias=True,
    sinks=True,
    mlp=32,
    experts=8,
    experts_per_token=3,
    normalise_experts=True,
    expert_bias=True,
    activation="clipped_swish",
)


def random_params(config=GPT_OSS):
    """Return random parameters: no bias or sink is zero, and some gates are clipped."""
    random, flat = np.random.default_rng(1), {}
    for path, leaf in flatten_dict(unbox(abstract_params(config)), sep="/").items():
        drawn = {"kernel": 0.4, "scale": 0.2}.get(path.split("/")[-1], 0.5)
        drawn *= random.normal(size=leaf.shape) * (4 if "expert_gate/" in path else 1)
        flat[path] = jnp.asarray(drawn + path.endswith("scale"), jnp.float32)
    return unflatten_dict(flat, sep="/")


def by_definition(queries, keys, values, context, cache, options):
    """Return attention head by head, with a sink as one more column of scores."""
    heads, ids = [], context.segment_ids
    mask = (ids[:, :, None] == ids[:, None]) & jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
    for head in range(queries.shape[2]):
        of_keys = head * keys.shape[2] // queries.shape[2]
        scores = jnp.einsum("bqe,bke->bqk", queries[:, :, head], keys[:, :, of_keys])
        scores = jnp.where(mask, scores * queries.shape[-1] ** -0.5, -jnp.inf)
        column = jnp.broadcast_to(options.sinks[head], (*scores.shape[:2], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
        heads.append(jnp.einsum("bqk,bke->bqe", weights, values[:, :, of_keys]))
    return jnp.stack(heads, axis=2), None


def test_sinks_and_their_gradients_are_those_of_one_more_column():
    arrays, ids = inputs(48), ragged_ids(48)
    expected = results(by_definition, arrays, ids, sinks=SINKS)
    assert_equal(results("plain", arrays, ids, sinks=SINKS), expected)


def test_slots_pages_and_scores_equal_training_of_sinks(one_device):
    assert_decoding_equals_training(random_params(), GPT_OSS, one_device)


def test_no_kernel_without_sinks_reads_the_pages():
    """A TPU that would take pages without sinks takes slots."""
    wide = dataclasses.replace(GPT_OSS, head_dim=128, dtype=jnp.bfloat16)
    chip = named_mesh(Mesh(), "tpu", 1)
    for sinks in (False, True):
        config = dataclasses.replace(wide, sinks=sinks, window=None, sliding=())
        layout = CacheLayout(config, chip, Sampler(slots=2), 256)
        assert (layout.pages is None) == sinks
