"""Gated delta-net layers: chunks, segments, decoding, adapters, meshes, limits."""

import dataclasses
import functools
import itertools
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DELTA
from jax.extend.core import jaxprs_in_params
from safetensors.numpy import load_file, save_file
from samplers import PROMPTS, make_sampler, place, sample, tokens_of
from test_windows import LENGTH, TOKENS, unstacked

from dapo_jax.config.experiment import Lora
from dapo_jax.extras.families import delta_net
from dapo_jax.extras.families.delta_net import (
    DeltaInputs,
    convolve,
    delta_rule,
    empty_state,
    unit_inverse,
)
from dapo_jax.model import inference
from dapo_jax.model.caches import KVCache
from dapo_jax.model.decode_attention import SlotContext, attend_slots
from dapo_jax.model.decoder import Decoder, head_kernel, init_params
from dapo_jax.model.load_huggingface import read_config, read_layers
from dapo_jax.model.param_paths import param_shapes, published_names
from dapo_jax.model.trainable import choose_trained
from dapo_jax.run.build import check_divisible
from dapo_jax.runtime.sharding import make_mesh, unbox
from dapo_jax.types.errors import ConfigError

MODELS = pathlib.Path(__file__).parents[1] / "fixtures/models"


@functools.cache
def random_params(config=DELTA):
    params = unbox(jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    return params | {"embedding": 5 * params["embedding"]}


# --- the rule ------------------------------------------------------------------------------------


def random_inputs(length, heads=2, groups=2, key=8, value=6, rows=2):
    draws = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(draws.normal(size=(rows, length, heads, *shape)), jnp.float32)

    keys = normal(key)
    keys /= jnp.linalg.norm(keys, axis=-1, keepdims=True)
    rates = -jnp.abs(normal(groups)), jax.nn.sigmoid(normal(groups))
    return DeltaInputs(normal(key), keys, normal(groups, value), *rates)


# Tokens of segments: longer and shorter than a chunk of 16 and than the convolution.
LAYOUTS = [37, 3, 19, 1, 2, 5, 3], [14, 2, 6, 9, 1, 30, 8]


def row_segments():
    return jnp.asarray([np.repeat(np.arange(1, 8), counts) for counts in LAYOUTS])


def path_matrices(segments):
    """[W, B, T, T]: 1 if the second token is at this distance before the first in its segment."""
    places = np.arange(segments.shape[1])
    distance = places[:, None] - places
    same = np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None]
    return jnp.asarray([same & (distance == number) for number in range(4)], jnp.float32)


def scan_tokens(inputs, state, segments):
    """Reads and last state, token by token."""
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)

    def feed(state, token):
        queries, keys, values, decay, beta, own, before = token
        kept = jnp.where((own == before)[:, None, None], jnp.exp(decay), 0)
        state = state * kept[..., None, None]
        new = beta[..., None] * (values - jnp.einsum("bhk,bhgkv->bhgv", keys, state))
        state += jnp.einsum("bhk,bhgv->bhgkv", keys, new)
        return state, jnp.einsum("bhk,bhgkv->bhgv", queries, state)

    by_token = tuple(jnp.moveaxis(array, 1, 0) for array in (*inputs, segments, before))
    state, read = jax.lax.scan(feed, state, by_token)
    return jnp.moveaxis(read, 0, 1), state


def test_chunks_equal_a_scan_over_tokens_with_gradients(monkeypatch):
    monkeypatch.setattr(delta_net, "CHUNK_TOKENS", 16)
    inputs, state = random_inputs(70), jnp.ones((2, 2, 2, 8, 6))
    weights = random_inputs(70).values

    def loss(rule, *arrays):
        read, last = rule(DeltaInputs(*arrays[:-1]), arrays[-1], row_segments())
        return jnp.sum(read * weights) + jnp.sum(last**2)

    expected, actual = (
        jax.jit(jax.value_and_grad(functools.partial(loss, rule), argnums=range(6)))(*inputs, state)
        for rule in (scan_tokens, delta_rule)
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for ours, reference in zip(actual[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5 * np.abs(reference).max())


def test_the_convolution_stays_in_its_segment_with_gradients():
    segments, x = row_segments(), random_inputs(70).queries
    kernel, weights = random_inputs(4).keys[0].transpose(1, 2, 0), random_inputs(70).keys
    paths = path_matrices(segments)

    def ours(x, kernel):
        return jnp.sum(convolve(x, kernel, jnp.zeros((2, 3, 2, 8)), segments) * weights)

    def reference(x, kernel):
        by_distance = jnp.einsum("dbij,bjhx,hxd->bihx", paths, x, kernel[..., ::-1])
        return jnp.sum(by_distance * weights)

    expected, actual = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, kernel) for f in (reference, ours)
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_the_inverse_is_exact_for_equal_keys():
    lower = jnp.tril(jnp.full((64, 64), 0.9), -1)
    np.testing.assert_allclose(unit_inverse(lower) @ (lower + jnp.eye(64)), np.eye(64), atol=1e-5)


def sizes_of(jaxpr):
    """Sizes of all arrays in a traced program, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield from (math.prod(out.aval.shape) for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes_of(inner)


def test_no_array_holds_pairs_of_tokens_or_a_state_per_token():
    length = 4096
    inputs = jax.tree.map(lambda x: x[:1], random_inputs(length, key=16, value=16))
    ids = jnp.zeros((1, length), jnp.int32)

    def loss(inputs):
        x = convolve(inputs.queries, jnp.ones((2, 16, 4)), jnp.zeros((1, 3, 2, 16)), ids)
        read, _ = delta_rule(inputs._replace(queries=x), jnp.zeros((1, 2, 2, 16, 16)), ids)
        return read.sum()

    largest = max(sizes_of(jax.make_jaxpr(jax.grad(loss))(inputs).jaxpr))
    assert largest == length * 64  # pairs within a chunk; values are smaller


# --- layers --------------------------------------------------------------------------------------


@functools.cache
def packed_logits():
    """Logits of a row of segments of 5, 1, 2, 4 tokens, of each one alone, and of one segment."""
    first = np.cumsum([0, 5, 1, 2, 4])
    tokens, segments, places = np.zeros((3, 6, LENGTH), np.int32)
    tokens[[0, 5]], segments[5], places[5] = TOKENS, 1, np.arange(LENGTH)
    for number, (start, end) in enumerate(itertools.pairwise(first), 1):
        length = end - start
        segments[0, start:end], places[0, start:end] = number, np.arange(length)
        tokens[number, :length], segments[number, :length] = TOKENS[0, start:end], 1
        places[number, :length] = np.arange(length)
    params = random_params()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_net, "CHUNK_TOKENS", 4)
        apply = jax.jit(Decoder(DELTA).apply)
        return apply({"params": params}, tokens, segments, places) @ head_kernel(params), first


def test_segments_of_a_packed_row_see_themselves():
    (packed, *alone, _), first = packed_logits()
    for (start, end), separate in zip(itertools.pairwise(first), alone, strict=True):
        ours = packed[start:end]
        np.testing.assert_allclose(ours, separate[: end - start], rtol=1e-5, atol=1e-4)  # of 10


def test_decoding_and_scoring_equal_training_and_inactive_slots_keep_their_states():
    expected = packed_logits()[0][-1]
    params = unstacked(random_params(), DELTA)
    shape = 2, DELTA.kv_heads, LENGTH, DELTA.head_dim
    slots = KVCache(jnp.zeros(shape).swapaxes(2, 3), jnp.zeros(shape))
    state = empty_state(DELTA, 2)
    active = jnp.array([True, False])

    @jax.jit
    def step(caches, position):
        context = SlotContext(jnp.full((2, 1), position), active, None)
        fed = jnp.full((2, 1), jnp.asarray(TOKENS)[0, position])
        return inference.decode_step(params, DELTA, attend_slots, fed, context, caches)[:2]

    caches = (state, slots)
    for position in range(LENGTH):
        decoded, caches = step(caches, position)
        np.testing.assert_allclose(decoded[0, 0], expected[position], rtol=1e-5, atol=1e-4)  # of 10
    assert all((leaf[1] == 0).all() for leaf in jax.tree.leaves(caches[0]))
    score = functools.partial(inference.score, likeliest=1, chunk_tokens=4)
    scored, *_ = jax.jit(score, static_argnums=1)(params, DELTA, TOKENS[0])
    reference = jax.nn.log_softmax(expected)[jnp.arange(LENGTH - 1), TOKENS[0, 1:]]
    np.testing.assert_allclose(scored[:-1], reference, rtol=1e-5, atol=1e-4)  # of 10
    # Prefilled at once and in chunks, all tokens but the last are in the state.
    fill = jax.jit(inference.prefill, static_argnums=(1, 4))
    fed = params, DELTA, jnp.repeat(TOKENS, 2, axis=0), jnp.array([LENGTH, 7])
    whole, cut = (fill(*fed, chunk)[0][0] for chunk in (0, 5))
    before = (state, slots)
    for position in range(6):
        before = step(before, position)[1]
    for a, b, c in zip(*map(jax.tree.leaves, (whole, cut, before[0])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(a[1], c[0], atol=1e-5)


# --- the sampler ---------------------------------------------------------------------------------

SOME = PROMPTS[:5]
PAGES = {"cache": "paged", "page_tokens": 4}


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_layout_or_devices(one_device):
    def tokens(mesh, **settings):
        sampler = make_sampler(mesh, config=DELTA, **settings)
        return tokens_of(sample(sampler, place(random_params(), DELTA, mesh), SOME))

    expected = tokens(one_device)
    assert (
        tokens(one_device, slots=8, burst=7, first_window_tokens=2, prefill_chunk_tokens=3)
        == expected
    )
    assert tokens(one_device, **PAGES, pages=16, prefill_prompts=4) == expected
    assert tokens(make_mesh(2, 2, 2), slots=8) == expected
    assert tokens(make_mesh(2, 2, 2), slots=8, **PAGES) == expected


# --- adapters, meshes, limits --------------------------------------------------------------------


def test_unsupported_settings_are_rejected(eight_devices):
    with pytest.raises(ConfigError, match="freeze_layers = 0.5: must be 0"):
        choose_trained(DELTA, 0.5, Lora())
    with pytest.raises(ConfigError, match="lora.targets.*delta_qkv"):
        choose_trained(DELTA, 0.0, Lora(rank=2, targets="delta_qkvz"))
    with pytest.raises(ConfigError, match="mesh.context = 2: must be 1 with delta-net layers"):
        check_divisible(DELTA, make_mesh(1, 2, 2, context=2))
    with pytest.raises(ConfigError, match="delta_key_heads = 2"):
        check_divisible(dataclasses.replace(DELTA, heads=4, kv_heads=4), make_mesh(1, 2, 4))


# --- folders -------------------------------------------------------------------------------------


def test_published_folders_with_other_parts_are_read_like_text_models(tmp_path, capsys):
    """Prediction of several tokens, and fused experts; test_mixed_layers.py has vision."""
    plain = MODELS / "qwen3_next"
    tensors = load_file(plain / "model.safetensors")
    fused = {"mtp.layers.0.weight": np.zeros(3, np.float32)}
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{i}.{name}_proj.weight") for i in range(4)])
            for name in ("gate", "up", "down")
        )
        fused |= {f"{stem}.gate_up_proj": np.concatenate([gate, up], 1), f"{stem}.down_proj": down}
    save_file(tensors | fused, tmp_path / "model.safetensors")
    shutil.copy(plain / "config.json", tmp_path)
    config = read_config(tmp_path)
    for (path, expected), (_, actual) in zip(
        *(read_layers(folder, param_shapes(config), config) for folder in (plain, tmp_path)),
        strict=True,
    ):
        for number in range(len(published_names(path, config))):
            np.testing.assert_array_equal(actual(number), expected(number))
    skipped = "1 tensors that a text model does not read, such as mtp.layers.0.weight, are skipped"
    assert capsys.readouterr().out.count(skipped) == 1
