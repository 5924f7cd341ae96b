"""sampler.weights_dtype = 'int8': decoding weights rounded, the trained ones left alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samplers
from conftest import TINY
from flax.traverse_util import flatten_dict, unflatten_dict
from samplers import place
from served import make_serve_config
from small_runs import make_quick_config, read_rows

from dapo_jax import algorithms
from dapo_jax.config.experiment import Sampler
from dapo_jax.extras.serve import policy
from dapo_jax.model import inference
from dapo_jax.model.decode_attention import PromptContext, attend_prompt
from dapo_jax.model.decoder import abstract_params, for_decoding
from dapo_jax.model.layers import Adapters
from dapo_jax.model.param_paths import summed_axes
from dapo_jax.model.quantisation import int8_product, to_int8
from dapo_jax.model.trainable import MATRICES, is_trained
from dapo_jax.run.loop import train
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh

UNTIED = dataclasses.replace(TINY, tie_embeddings=False)
FROZEN = dataclasses.replace(UNTIED, layers=3, frozen_layers=1)
KINDS = {
    "qwen2 with adapters": dataclasses.replace(TINY, adapters=Adapters(3, 2.0, MATRICES)),
    "qwen3 with a frozen layer": dataclasses.replace(
        UNTIED, frozen_layers=1, qk_norm=True, qkv_bias=False
    ),
    "llama with biases": dataclasses.replace(UNTIED, out_bias=True, mlp_bias=True),
}


def random_params(config):
    """Biases and adapters are too; a channel is zero."""
    rng, shapes = np.random.default_rng(0), sharding.unbox(abstract_params(config))
    params = jax.tree.map(lambda leaf: 0.2 * rng.normal(size=leaf.shape).astype("f"), shapes)
    params["layers"]["gate"]["kernel"][..., 5] = 0
    return params


def make_engine(config, mesh, params, **settings):
    """The engine, and what it loads of the parameters, frozen ones apart."""
    flat = flatten_dict(params, sep="/")
    frozen = {path: leaf for path, leaf in flat.items() if not is_trained(path, config)}
    sizes = {"burst": 12, "response": 12, "width": 1, "first_window_tokens": 20, "page_tokens": 4}
    frozen_tree = unflatten_dict(frozen, sep="/")
    settings = sizes | {"weights_dtype": "int8"} | settings
    engine = samplers.make_engine(mesh, config=config, frozen=frozen_tree, **settings)
    trained = {path: leaf for path, leaf in flat.items() if path not in frozen}
    return engine, engine.load_params(unflatten_dict(trained, sep="/"))


def flatten(loaded):
    layers = {str(i): layer for i, layer in enumerate(loaded["layers"])}
    return flatten_dict(loaded | {"layers": layers}, sep="/")


def dequantise(flat, config):
    """The float weights that the int8 ones stand for."""
    flat = dict(flat)
    for path in [path for path in flat if path + "_scale" in flat]:
        flat[path] = flat[path] * flat.pop(path + "_scale")
    return for_decoding(flat, config)


@functools.partial(jax.jit, static_argnames="config")
def last_logits(loaded, config):
    """After eight tokens of four prompts; the last is decoded, those before are prefilled."""
    tokens = jax.random.randint(jax.random.key(2), (4, 8), 0, config.vocab)
    caches, _ = inference.prefill(loaded, config, tokens, jnp.full(4, 8))
    context = PromptContext(jnp.full((4, 1), 7), jnp.array(7))
    return inference.decode_step(loaded, config, attend_prompt, tokens[:, 7:], context, caches)[0][
        :, 0
    ]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * ("adapters" not in kind)) for kind in KINDS],
)
def test_int8_weights_are_close_and_give_the_logits_of_rounded_weights(kind, one_device):
    config, params = KINDS[kind], random_params(KINDS[kind])
    before = jax.tree.map(np.array, params)
    _, loaded = make_engine(config, one_device, params)
    _, exact = make_engine(config, one_device, params, weights_dtype="auto")
    jax.tree.map(np.testing.assert_array_equal, params, before)
    actual, weights = (flatten(jax.device_get(tree)) for tree in (loaded, exact))
    matrices = {path for path in weights if summed_axes(path)}
    assert len(matrices) == 7 * config.layers + (not config.tie_embeddings)
    assert actual.keys() == weights.keys() | {path + "_scale" for path in matrices}
    for path, weight in weights.items():
        if path not in matrices:
            np.testing.assert_array_equal(actual[path], weight)
            continue
        whole, scale = actual[path], actual[path + "_scale"]
        assert whole.dtype == jnp.int8 and scale.dtype == jnp.float32
        assert scale.shape == weight.shape[-scale.ndim :] and scale.size < weight.size
        largest = np.abs(weight).max(tuple(range(weight.ndim - scale.ndim)))
        np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
        assert (np.abs(whole * scale - weight) <= scale / 2 * (1 + 1e-5)).all()
    logits, rounded, right = (
        last_logits(tree, config) for tree in (loaded, dequantise(actual, config), exact)
    )
    np.testing.assert_allclose(logits, rounded, atol=1e-4 * np.abs(right).max())
    error = np.linalg.norm(logits - right) / np.linalg.norm(right)
    assert 1e-4 < error < 0.05


def test_weights_do_not_depend_on_devices_or_layers_per_call(one_device):
    config, params = FROZEN, random_params(FROZEN)
    _, expected = make_engine(config, one_device, params)
    mesh = make_mesh(1, 2, 1, jax.devices()[:4], decode_tensor=2)
    spread = place(params, config, mesh)
    _, at_once = make_engine(config, mesh, spread)
    _, by_layers = make_engine(config, mesh, spread, load_layers=1)
    for loaded in (at_once, by_layers):
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    layer = at_once["layers"][0]
    scale = layer["query"]["kernel_scale"].addressable_shards[0]
    assert scale.data.shape == (4 // 2, 8)  # cut as the channels are


@pytest.mark.parametrize("pieces", [1, 4])
def test_int8_products_equal_products_of_rounded_factors(pieces):
    rng = np.random.default_rng(0)
    rows, weights = (
        rng.normal(size=(5, 300)) * [[1], [9], [1e-3], [0], [40]],
        rng.normal(size=(300, 7)),
    )
    matrix, scale = to_int8(jnp.asarray(weights, jnp.float32), 0)
    product = functools.partial(
        int8_product, matrix=matrix, scale=scale, dtype=jnp.float32, pieces=pieces
    )
    actual = np.asarray(product(jnp.asarray(rows, jnp.float32)))
    largest = np.abs(rows).max(axis=1, keepdims=True) / 127
    rounded = np.round(rows / np.where(largest, largest, 1)) * largest
    exact = rounded @ (np.asarray(matrix, float) * np.asarray(scale, float))
    np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-6)
    assert np.abs(actual - rows @ weights).max() > 1e-3
    np.testing.assert_array_equal(actual[1:2], product(jnp.asarray(rows[1:2], jnp.float32)))


def test_served_weights_are_rounded(byte_folder, alone):
    params = policy.load_served(make_serve_config(byte_folder, weights_dtype="int8")).params
    assert params["head"].dtype == params["layers"][0]["up"]["kernel"].dtype == jnp.int8


@pytest.mark.slow
def test_a_run_reports_and_corrects_the_rounding_of_its_sampler(base, alone, tmp_path):
    algorithm = algorithms.dapo()
    algorithm.importance_cap = 2.0
    sampler = Sampler(slots=16, burst_tokens=8, max_response_tokens=24, weights_dtype="int8")
    train(make_quick_config(base, tmp_path / "run", algorithm=algorithm, sampler=sampler))
    for row in read_rows(tmp_path / "run")[1:]:
        assert 1e-6 < abs(row["kl_sampler_trainer"]) < 0.01  # unrounded: below 1e-8
        assert 0 < row["sampler_match_fraction"] < 1
        assert 0.9 < row["importance_weight"] < 1.1 and row["importance_weight"] != 1
