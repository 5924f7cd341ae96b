"""The same devices used differently while training and while decoding, and what goes between."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from samplers import place

from dapo_jax.config.experiment import Mesh, Sampler
from dapo_jax.model import decoder
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.run.build import check_divisible, open_mesh, open_meshes
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import SamplingRule

PROMPT = np.array([3, 9, 4, 7, 20, 5, 0, 0], np.int32)


def make_engine(mesh, config=TINY, load_layers=0) -> PolicyEngine:
    sizes = {"slots": 4, "burst_tokens": 12, "max_response_tokens": 12, "first_window_tokens": 20}
    sampler = Sampler(**sizes, load_layers=load_layers)
    return PolicyEngine(config, mesh, sampler, max_prompt_tokens=8, end_ids=(1,))


def test_decode_tensor_cuts_embed_in_training_and_heads_in_decoding(tiny_params):
    mesh = make_mesh(1, 4, 1, decode_tensor=2)
    training = place(tiny_params, TINY, mesh)
    query = training["layers"]["query"]["kernel"]  # [L, D, H, E]
    assert query.addressable_shards[0].data.shape == (2, 32 // 8, 4, 8)
    loaded = make_engine(mesh).load_params(training)
    query = loaded["layers"][0]["query"]["kernel"]
    assert query.addressable_shards[0].data.shape == (32, 4 // 2, 8)
    assert loaded["embedding"].addressable_shards[0].data.shape == (32 // 2, 32)


@pytest.mark.parametrize("per_slot", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drawn_tokens_are_the_same_however_devices_are_used(tiny_params, one_device, per_slot):
    found = []
    for mesh in (one_device, make_mesh(1, 4, 1, decode_tensor=2)):
        engine = make_engine(mesh, load_layers=0 if mesh is one_device else 1)
        params = engine.load_params(place(tiny_params, TINY, mesh))
        keys = jnp.stack([jax.random.key(0)] * engine.prefill_batch(1))
        prefix = engine.prefill_prompts(params, PROMPT[None], [6], keys)
        state, rules = engine.init_decode_state(), ()
        if per_slot:
            state, rules = engine.with_rules(state, SamplingRule()), [SamplingRule()]
        state = engine.insert(prefix, state, 2, rules=rules)
        state, _ = engine.generate(params, state, longest=8)
        found.append(engine.fetch_responses(state, [2])[0].tokens.tolist())
    assert found[0] == found[1] and len(set(found[0])) > 1


@pytest.mark.parametrize("load_layers", [1, 3])
def test_loading_by_layers_gives_what_loading_at_once_gives(load_layers):
    config = dataclasses.replace(TINY, layers=5, frozen_layers=1, tie_embeddings=False)
    mesh = make_mesh(1, 2, 2, decode_tensor=1, devices=jax.devices()[:4])
    params = sharding.unbox(
        jax.jit(decoder.init_params, static_argnums=0)(config, jax.random.key(0))
    )
    params = place(params, config, mesh)
    at_once = make_engine(mesh, config).load_params(params)
    by_layers = make_engine(mesh, config, load_layers).load_params(params)
    jax.tree.map(np.testing.assert_array_equal, by_layers, at_once)
    same = jax.tree.map(
        lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), by_layers, at_once
    )
    assert all(jax.tree.leaves(same))


def test_a_mesh_that_only_training_or_decoding_fits_is_rejected():
    with pytest.raises(ConfigError, match="rows_per_microbatch = 4.*decode_tensor = 8"):
        open_mesh(Mesh(decode_tensor=4), rows_per_microbatch=4)
    mesh = open_mesh(Mesh(decode_tensor=4), rows_per_microbatch=8)
    with pytest.raises(ConfigError, match="4 shards divide the model's kv_heads = 2"):
        check_divisible(TINY, mesh)


@dataclasses.dataclass(frozen=True)
class Chip:
    """TPU chip that need not be there."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform = "tpu"
    device_kind = "TPU v5p"
    core_on_chip = 0

    @property
    def process_index(self) -> int:
        return self.id // 4


def two_slices(holes=()):
    """Chips of two slices of v5p 2x2x2, which repeat coordinates, in no order."""
    places = list(itertools.product(range(2), range(2), range(2)))
    return [
        Chip(len(places) * number + i, number, place)
        for i, place in enumerate(places)
        for number in range(2)
        if place not in holes
    ]


@pytest.mark.parametrize("holes, sizes", [((), (2, 4, 2)), ([(0, 0, 0), (1, 1, 1)], (2, 3, 2))])
def test_only_data_goes_across_slices(holes, sizes):
    grid = make_mesh(*sizes, two_slices(holes)).devices
    assert grid.shape == (sizes[0], sizes[1], 1, 1, 1, sizes[2])
    numbers = [{chip.slice_index for chip in half.flat} for half in grid]
    assert numbers == [{0}, {1}]
    assert len({chip.id for chip in grid.flat}) == grid.size


def test_samplers_of_two_slices_have_a_mesh_of_their_own():
    sizes = Mesh(data=2, fsdp=-1, tensor=2, sampler_share=0.5)
    learning, sampling = open_meshes(sizes, 8, devices=two_slices())
    assert learning.devices.shape == sampling.devices.shape == (2, 2, 1, 1, 1, 2)
    assert [{chip.slice_index for chip in half.flat} for half in sampling.devices] == [{0}, {1}]


def hosts_of_four(count: int) -> list[Chip]:
    """Chips of v5p in a row of hosts of 2 x 2."""
    inner = [(x, y) for y in range(2) for x in range(2)]
    return [
        Chip(4 * host + i, 0, (2 * host + x, y, 0))
        for host in range(count)
        for i, (x, y) in enumerate(inner)
    ]


def test_a_replica_of_four_chips_may_lie_on_halves_of_two_hosts():
    """Weights then go from each chip that learns to the one with its pieces in the same host."""
    sizes = Mesh(fsdp=-1, decode_tensor=2, tensor=2, sampler_share=0.5)
    learning, sampling = open_meshes(sizes, 16, devices=hosts_of_four(8))
    assert sampling.devices.shape == (1, 4, 1, 1, 2, 2) == learning.devices.shape
    assert not set(sampling.devices.flat) & set(learning.devices.flat)
    for one, other in zip(learning.devices.flat, sampling.devices.flat, strict=True):
        assert one.process_index == other.process_index
    replicas = sampling.devices.reshape(4, 4)
    assert all(len({chip.process_index for chip in replica}) == 2 for replica in replicas)


def test_meshes_that_do_not_fit_slices_or_hosts_are_rejected():
    """Three chips of each host sample, each with another quarter, and one has a quarter."""
    with pytest.raises(ConfigError, match="mesh.data = 1: must be a multiple of the 2 slices"):
        make_mesh(1, -1, 1, two_slices())
    said = "sampler_share = 0.75: must be 0, 0.5, or a fraction that gives.* tensor = 4 devices"
    with pytest.raises(ConfigError, match=said):
        open_meshes(Mesh(tensor=4, sampler_share=0.75), 48, devices=hosts_of_four(16))
    learning, _ = open_meshes(Mesh(tensor=4, sampler_share=0.25), 48, devices=hosts_of_four(16))
    assert learning.size == 48
