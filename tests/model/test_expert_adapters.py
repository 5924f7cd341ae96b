"""Low-rank adapters of experts: W + scale A B of each one, in training, decoding and folders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file
from test_peft_adapters import random_adapters
from test_windows import GPT_OSS, random_params

from dapo_jax.config.experiment import Lora
from dapo_jax.model import peft_adapters, save_huggingface
from dapo_jax.model.decoder import init_params
from dapo_jax.model.load_huggingface import load_params
from dapo_jax.model.logprobs import Rows, hidden_states
from dapo_jax.model.trainable import choose_trained
from dapo_jax.run.export import policy_layers
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox

DECODER = choose_trained(MOE, 0.0, Lora(rank=2, alpha=3.0, targets="query,gate,up,down"))
ADAPTERS = random_adapters(DECODER)
ROWS = jax.random.randint(jax.random.key(1), (4, 9), 2, 32), jnp.ones((4, 9), jnp.int32)
ROWS = (*ROWS, jnp.broadcast_to(jnp.arange(9), (4, 9)))


@pytest.fixture(scope="module")
def base():
    """Parameters without adapters, by path."""
    return flatten_dict(unbox(init_params(MOE, jax.random.key(0))), sep="/")


def export_merged(base, adapters, decoder, plain, folder, mesh):
    """Return the parameters of the folder with merged adapters, by path."""
    save_huggingface.save_folder(folder / "base", unflatten_dict(base, sep="/"), plain, (1,))
    layers = policy_layers(adapters, adapters.__getitem__, decoder, str(folder / "base"))
    (folder / "merged").mkdir()
    save_huggingface.save_weights(folder / "merged", layers, decoder)
    return flatten_dict(load_params(folder / "merged", plain, mesh), sep="/")


def states(flat, config, rows=ROWS):
    return jax.jit(lambda p: hidden_states(p, config, Rows(*rows))[0])(
        unflatten_dict(flat, sep="/")
    )


@pytest.mark.parametrize(
    "config", [MOE, pytest.param(GPT_OSS, marks=pytest.mark.slow)], ids=lambda c: c.family
)
def test_adapters_of_experts_compute_what_merged_experts_do(config, base, tmp_path, one_device):
    if config is GPT_OSS:
        base = flatten_dict(random_params(), sep="/")
    decoder = choose_trained(config, 0.0, Lora(rank=2, alpha=3.0, targets="out,gate,up,down"))
    adapters = random_adapters(decoder)
    merged = export_merged(base, adapters, decoder, config, tmp_path, one_device)
    adapted = states(base | adapters, decoder)
    np.testing.assert_allclose(adapted, states(merged, config), atol=1e-4)
    assert np.abs(adapted - states(base, config)).max() > 0.1
    changed = {path for path in merged if np.abs(merged[path] - base[path]).max() > 1e-3}
    names = ("out", "moe/expert_gate", "moe/expert_up", "moe/expert_down")
    assert changed == {f"layers/{name}/kernel" for name in names}


@pytest.mark.parametrize("sizes", [{"expert": 4, "tensor": 2, "fsdp": 1}, {"fsdp": 4, "tensor": 2}])
def test_adapters_of_experts_are_the_same_on_a_mesh(sizes, base):
    expected = states(base | ADAPTERS, DECODER)
    with sharding.activate(make_mesh(**({"data": 1} | sizes))):
        actual = states(base | ADAPTERS, DECODER, [jnp.tile(x, (2, 1)) for x in ROWS])
    np.testing.assert_allclose(actual[:4], expected, atol=2e-5)


def test_a_folder_of_peft_names_each_expert_and_is_read_back(tmp_path, one_device):
    peft_adapters.save_adapters(tmp_path, ADAPTERS, ADAPTERS.__getitem__, DECODER, "base")
    tensors = load_file(tmp_path / peft_adapters.WEIGHTS)
    below = "base_model.model.model.layers.1.mlp.experts.5.down_proj"
    assert tensors[f"{below}.lora_A.weight"].shape == (2, MOE.mlp)
    np.testing.assert_array_equal(
        tensors[f"{below}.lora_B.weight"], ADAPTERS["layers/moe/expert_down/lora_b"][1, 5].T
    )
    loaded = peft_adapters.load_adapters(str(tmp_path), DECODER, one_device)
    for path, array in flatten_dict(loaded, sep="/").items():
        np.testing.assert_array_equal(array, ADAPTERS[path])
