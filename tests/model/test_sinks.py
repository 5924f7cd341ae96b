"""Attention sinks in every kind of attention, and the other switches of gpt-oss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from flax.traverse_util import flatten_dict, unflatten_dict
from test_attention import assert_equal, inputs, ragged_ids
from test_windows import LENGTH, TOKENS, decode, hidden, unstacked

from dapo_jax.commands.plan.simulated_engine import named_mesh
from dapo_jax.config.experiment import Mesh, Sampler
from dapo_jax.model import blockwise_attention, inference, splash_attention
from dapo_jax.model.caches import KVCache, PageCache
from dapo_jax.model.decode_attention import PagedAttention, attend_slots
from dapo_jax.model.decoder import abstract_params, head_kernel
from dapo_jax.model.experts import NAMES, Experts, mix
from dapo_jax.model.layers import ACTIVATIONS, BIAS
from dapo_jax.model.training_attention import TRAINING_ATTENTION, Context, Window
from dapo_jax.rollout.paged_cache import PagedLayout, choose_layout
from dapo_jax.rollout.slot_cache import SlotLayout
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox

SINKS = jnp.array([0.5, -1.0, 3.0, 0.0])  # of four query heads
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


def random_params():
    """Random parameters: no bias or sink is zero, and some gates are clipped."""
    random = np.random.default_rng(1)

    flat = {}
    for path, leaf in flatten_dict(unbox(abstract_params(GPT_OSS)), sep="/").items():
        drawn = {"kernel": 0.4, "scale": 0.2}.get(path.split("/")[-1], 0.5)
        drawn *= random.normal(size=leaf.shape) * (4 if "expert_gate/" in path else 1)
        flat[path] = jnp.asarray(drawn + path.endswith("scale"), jnp.float32)
    return unflatten_dict(flat, sep="/")


@pytest.fixture(scope="module")
def params():
    return random_params()


def by_definition(queries, keys, values, ids, sinks):
    """Attention head by head, with a sink as one more column of scores; 0 for padding."""
    heads = []
    mask = (ids[:, :, None] == ids[:, None]) & jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
    for head in range(queries.shape[2]):
        of_keys = head * keys.shape[2] // queries.shape[2]
        scores = jnp.einsum("bqe,bke->bqk", queries[:, :, head], keys[:, :, of_keys])
        scores = jnp.where(mask, scores * queries.shape[-1] ** -0.5, -jnp.inf)
        column = jnp.broadcast_to(sinks[head], (*scores.shape[:2], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
        heads.append(jnp.einsum("bqk,bke->bqe", weights, values[:, :, of_keys]))
    return jnp.where(ids[..., None, None] > 0, jnp.stack(heads, axis=2), 0)


def gradients(attend, arrays, mesh=None):
    *arrays, weights = arrays

    def loss(*arrays):
        mixed = attend(*arrays)
        return jnp.sum(jnp.sin(mixed) * weights), mixed

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    with sharding.activate(mesh or make_mesh(1, 1, 1, jax.devices()[:1])):
        return run(*arrays, SINKS)


def by_name(name, ids, window=None):
    context = Context(jnp.zeros_like(ids), jnp.asarray(ids))

    def attend(queries, keys, values, sinks):
        arrays = queries, keys, values, context, None, window, sinks
        mixed = TRAINING_ATTENTION[name](*arrays)[0]
        return jnp.where(context.segment_ids[..., None, None] > 0, mixed, 0)

    return attend


@pytest.fixture(scope="module")
def short():
    """Arrays, segments, and attention by its definition."""
    arrays, ids = inputs(48), ragged_ids(48)
    expected = gradients(lambda *x: by_definition(*x[:3], jnp.asarray(ids), x[3]), arrays)
    return arrays, ids, expected


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("plain", {}),
        ("blocked", {"tensor": 2}),
        ("blocked", {"context": 2, "tensor": 2}),
    ],
)
def test_sinks_and_their_gradients_are_those_of_one_more_column(name, sizes, short, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 16)
    arrays, ids, expected = short
    mesh = make_mesh(**({"data": 1, "fsdp": -1, "tensor": 1} | sizes))
    assert_equal(gradients(by_name(name, ids), arrays, mesh), expected)


@pytest.mark.parametrize("name", ["blocked", "splash"])
def test_sinks_of_sliding_layers_equal_plain(name, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 64)
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    arrays, ids, window = inputs(256), ragged_ids(256), Window(100, jnp.array(True))
    mesh = make_mesh(2, 2, 2)
    expected = gradients(by_name("plain", ids, window), arrays)
    assert_equal(gradients(by_name(name, ids, window), arrays, mesh), expected)


@pytest.fixture(scope="module")
def logits(params):
    """Of the whole forward pass."""
    run = jax.jit(lambda p: hidden(p, GPT_OSS) @ head_kernel(p))
    return np.asarray(run(params)[0])


@pytest.mark.parametrize("layout", ["slots", "pages"])
def test_decoding_equals_the_whole_forward_pass(layout, params, logits, one_device):
    shape = (1, TINY.kv_heads, LENGTH, TINY.head_dim)
    cache, attend, tables = KVCache(jnp.zeros(shape).swapaxes(2, 3), jnp.zeros(shape)), None, None
    if layout == "pages":
        cache = PageCache(jnp.zeros((5, 4, 2 * TINY.kv_heads, TINY.head_dim)))
        attend, tables = PagedAttention(one_device, kernel=False), jnp.array([[3, 1, 4]])
    arrays = unstacked(params, GPT_OSS), cache, attend or attend_slots, tables, GPT_OSS
    with jax.set_mesh(one_device):
        found = jax.jit(decode, static_argnums=(2, 4))(*arrays)
    np.testing.assert_allclose(found, logits, atol=2e-5)


@pytest.mark.slow
def test_scores_are_those_of_the_whole_forward_pass(params, logits):
    tree = unstacked(params, GPT_OSS)
    scored, *_ = inference.score(tree, GPT_OSS, TOKENS[0], likeliest=1, chunk_tokens=4)
    wanted = jax.nn.log_softmax(logits)[jnp.arange(LENGTH - 1), TOKENS[0, 1:]]
    np.testing.assert_allclose(scored[:-1], wanted, atol=2e-5)


def test_experts_with_biases_and_clipped_gates_are_those_of_a_loop():
    random = np.random.default_rng(0)
    shapes = [(4, 6, 5), (4, 6, 5), (4, 5, 6)]
    matrices = {
        name: 3 * random.normal(size=shape) for name, shape in zip(NAMES, shapes, strict=True)
    }
    matrices |= {name + BIAS: random.normal(size=(4, x.shape[2])) for name, x in matrices.items()}
    x, weights = random.normal(size=(7, 6)), random.random((7, 2))
    chosen = np.array([[0, 1], [1, 0], [2, 0], [0, 2], [1, 2], [2, 1], [0, 1]])  # none takes 3
    expected, clipped = np.zeros_like(x), 0
    for token, (own, both) in enumerate(zip(weights, chosen, strict=True)):
        for weight, expert in zip(own, both, strict=True):
            gate, up = (
                x[token] @ matrices[name][expert] + matrices[name + BIAS][expert]
                for name in NAMES[:2]
            )
            clipped += (gate > 7).sum() + (np.abs(up) > 7).sum()
            gate, up = np.minimum(gate, 7), np.minimum(np.maximum(up, -7), 7)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out = inner @ matrices[NAMES[2]][expert] + matrices[NAMES[2] + BIAS][expert]
            expected[token] += weight * out
    matrices = {name: jnp.asarray(array, jnp.float32) for name, array in matrices.items()}
    arrays = jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32), jnp.asarray(chosen)
    found = mix(*arrays, matrices, ACTIVATIONS["clipped_swish"])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert clipped > 5


def test_experts_with_biases_on_eight_devices_are_those_of_one(params):
    """A bias is added once, on whatever devices an expert and its width are."""
    layer = jax.tree.map(lambda stack: stack[0], params["layers"]["moe"])
    x = jax.random.normal(jax.random.key(2), (8, 16, GPT_OSS.embed))

    def loss(layer):
        return jnp.sum(jnp.sin(Experts(GPT_OSS).apply({"params": layer}, x)))

    found = []
    for mesh in (make_mesh(1, 1, 1, jax.devices()[:1]), make_mesh(1, 1, 2, expert=4)):
        with sharding.activate(mesh):
            found.append(jax.jit(jax.value_and_grad(loss))(layer))
    assert_equal(found[1], found[0], 2e-5)


def test_no_kernel_without_sinks_reads_the_pages():
    """Where a TPU would take pages for others, the layout is of slots."""
    wide = dataclasses.replace(GPT_OSS, head_dim=128, dtype=jnp.bfloat16)
    chip = named_mesh(Mesh(), "tpu", 1)
    for sinks, layout in (False, PagedLayout), (True, SlotLayout):
        config = dataclasses.replace(wide, sinks=sinks, window=None, sliding=())
        assert isinstance(choose_layout(config, chip, Sampler(slots=2), 256), layout)
