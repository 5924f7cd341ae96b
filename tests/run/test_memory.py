"""A run that can't fit into memory is rejected with the estimate before anything is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from conftest import TINY
from small_runs import make_quick_config

from dapo_jax import algorithms
from dapo_jax.config.experiment import Lora, Packing, Rollout, Sampler
from dapo_jax.extras.serve import server
from dapo_jax.extras.serve.settings import ServeConfig
from dapo_jax.model.decoder import init_params
from dapo_jax.model.trainable import choose_trained
from dapo_jax.rollout.cache_layout import CacheLayout
from dapo_jax.run import memory
from dapo_jax.run.components import build
from dapo_jax.runtime.sharding import unbox
from dapo_jax.types.errors import ConfigError

TOO_MUCH = {
    "slots": (
        {"sampler": Sampler(slots=10**8, max_response_tokens=24)},
        "config.sampler.slots = 100000000 .*: must be smaller, since sampling takes at least .* GB "
        "on each of 1 device and .* are there: cache .* GB, .*parameters",
    ),
    "response budget": (
        {
            "sampler": Sampler(slots=16, max_response_tokens=10**9),
            "packing": Packing(row_tokens=10**9 + 64, rows_per_microbatch=8),
        },
        "config.sampler.slots = 16 of .*sampler.max_response_tokens = 1000000000: .*cache",
    ),
    "rows": (
        {"packing": Packing(row_tokens=64, rows_per_microbatch=10**9)},
        "config.packing.rows_per_microbatch = 1000000000 of .*: .* an update takes .*activations",
    ),
    "prompts": (
        {"rollout": Rollout(10**9, 16, updates_per_rollout=1)},
        "config.rollout.prompts_per_step = 1000000000: .* rollout batches take at least 16.0 TB",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_run_beyond_memory_is_rejected_with_the_estimate(name, tiny_folder, alone, tmp_path):
    changes, message = TOO_MUCH[name]
    config = make_quick_config(tiny_folder, tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match=message):
        build(config)


def test_serving_refuses_slots_beyond_memory(byte_folder, alone):
    config = ServeConfig(model=str(byte_folder), slots=10**8)
    with pytest.raises(ConfigError, match="config.slots = 100000000 .* serving takes at least"):
        server.load_served(config)


def sizes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_estimate_equals_the_size_of_the_arrays(one_device, eight_devices, tiny_folder, tmp_path):
    params = sizes(jax.eval_shape(lambda: unbox(init_params(TINY, jax.random.key(0)))))
    assert memory.params_bytes(TINY, one_device) == params
    assert params / 8 < memory.params_bytes(TINY, eight_devices) < params / 2
    layout = CacheLayout(TINY, one_device, Sampler(slots=6), 40, jnp.float32)
    cache = sizes(jax.eval_shape(lambda: layout.empty(40)))
    assert memory.cache_bytes(TINY, Sampler(), one_device, 6, 10, 30) == cache + 6 * 30 * 8
    config = make_quick_config(tiny_folder, tmp_path, algorithm=algorithms.preset("grpo"))
    held = memory.resident_bytes(config, TINY, one_device, training=True)
    assert held["parameters"] == params and held["optimizer"] == 2 * params
    lora = choose_trained(TINY, 0.0, Lora(rank=2))
    held = memory.resident_bytes(config, lora, one_device, training=True)
    assert held["frozen parameters"] == params and 0 < held["optimizer"] < params / 2
    bfloat16 = dataclasses.replace(lora, dtype=jnp.bfloat16)
    held = memory.resident_bytes(config, bfloat16, one_device, training=True)
    assert params / 2 < held["frozen parameters"] < 0.6 * params
