"""Attention sinks in every kind of attention, and the other switches of gpt-oss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from flax.traverse_util import flatten_dict, unflatten_dict
from test_attention import assert_equal, inputs, ragged_ids, results
from test_windows import assert_decoding_equals_training

from dapo_jax.commands.plan.simulate import named_mesh
from dapo_jax.config.experiment import Mesh, Sampler
from dapo_jax.model import blockwise_attention
from dapo_jax.model.decoder import abstract_params
from dapo_jax.rollout.paged_cache import PagedLayout, choose_layout
from dapo_jax.rollout.slot_cache import SlotLayout
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


def random_params(config=GPT_OSS):
    """Return random parameters: no bias or sink is zero, and some gates are clipped."""
    random, flat = np.random.default_rng(1), {}
    for path, leaf in flatten_dict(unbox(abstract_params(config)), sep="/").items():
        drawn = {"kernel": 0.4, "scale": 0.2}.get(path.split("/")[-1], 0.5)
        drawn *= random.normal(size=leaf.shape) * (4 if "expert_gate/" in path else 1)
        flat[path] = jnp.asarray(drawn + path.endswith("scale"), jnp.float32)
    return unflatten_dict(flat, sep="/")


@pytest.fixture(scope="module")
def params():
    return random_params()


def by_definition(queries, keys, values, context, mesh, window, sinks):
    """Return attention head by head, with a sink as one more column of scores."""
    heads, ids = [], context.segment_ids
    mask = (ids[:, :, None] == ids[:, None]) & jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
    for head in range(queries.shape[2]):
        of_keys = head * keys.shape[2] // queries.shape[2]
        scores = jnp.einsum("bqe,bke->bqk", queries[:, :, head], keys[:, :, of_keys])
        scores = jnp.where(mask, scores * queries.shape[-1] ** -0.5, -jnp.inf)
        column = jnp.broadcast_to(sinks[head], (*scores.shape[:2], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
        heads.append(jnp.einsum("bqk,bke->bqe", weights, values[:, :, of_keys]))
    return jnp.stack(heads, axis=2), None


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("plain", {}),
        ("blocked", {"tensor": 2}),
        ("blocked", {"context": 2, "tensor": 2}),
    ],
)
def test_sinks_and_their_gradients_are_those_of_one_more_column(name, sizes, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 16)
    arrays, ids = inputs(48), ragged_ids(48)
    mesh = make_mesh(**({"data": 1, "fsdp": -1, "tensor": 1} | sizes))
    expected = results(by_definition, arrays, ids, sinks=SINKS)
    assert_equal(results(name, arrays, ids, mesh, sinks=SINKS), expected)


def test_slots_pages_and_scores_equal_training(params, one_device):
    assert_decoding_equals_training(params, GPT_OSS, one_device)


def test_no_kernel_without_sinks_reads_the_pages():
    """A TPU that would take pages without sinks takes slots."""
    wide = dataclasses.replace(GPT_OSS, head_dim=128, dtype=jnp.bfloat16)
    chip = named_mesh(Mesh(), "tpu", 1)
    for sinks, layout in (False, PagedLayout), (True, SlotLayout):
        config = dataclasses.replace(wide, sinks=sinks, window=None, sliding=())
        assert isinstance(choose_layout(config, chip, Sampler(slots=2), 256), layout)
