"""Low-rank adapters of experts: W + scale A B of each one, in training, decoding and folders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file
from samplers import PROMPTS, TOKENIZER, make_engine, sample

from dapo_jax.config.experiment import Lora
from dapo_jax.model import peft_adapters, save_huggingface
from dapo_jax.model.decoder import init_params
from dapo_jax.model.logprobs import hidden_states
from dapo_jax.model.trainable import MATRICES, choose_trained, is_trained, without_adapters
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.export import policy_layers
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sharding import make_mesh, unbox

DECODER = choose_trained(MOE, 0.0, Lora(rank=2, alpha=3.0, targets="query,gate,up,down"))
ROWS = jax.random.randint(jax.random.key(1), (4, 9), 2, 32), jnp.ones((4, 9), jnp.int32)
ROWS = (*ROWS, jnp.broadcast_to(jnp.arange(9), (4, 9)))


@pytest.fixture(scope="module")
def params():
    """Parameters with adapters as after some training, by path."""
    flat = flatten_dict(unbox(init_params(DECODER, jax.random.key(0))), sep="/")
    random = np.random.default_rng(5)
    return {
        path: random.normal(0, 0.3, x.shape).astype("f") if is_trained(path, DECODER) else x
        for path, x in flat.items()
    }


@pytest.fixture(scope="module")
def merged(params, tmp_path_factory):
    """Parameters of the merged model, by path."""
    folder = tmp_path_factory.mktemp("base")
    base = {path: x for path, x in params.items() if not is_trained(path, DECODER)}
    save_huggingface.save_folder(folder, unflatten_dict(base, sep="/"), MOE, (1,))
    trained = {path: x for path, x in params.items() if is_trained(path, DECODER)}
    found = {}
    for path, layer in policy_layers(trained, trained.__getitem__, DECODER, str(folder)):
        whole = base[path]
        count = {True: MOE.layers * MOE.experts, False: MOE.layers}["/expert_" in path]
        stack = [layer(i) for i in range(count if path.startswith("layers/") else 1)]
        found[path] = np.stack(stack).reshape(whole.shape)
    return found


def states(flat, config):
    return jax.jit(lambda p: hidden_states(p, config, *ROWS)[0])(unflatten_dict(flat, sep="/"))


def test_adapters_of_experts_compute_what_merged_experts_do(params, merged):
    found = states(params, DECODER)
    np.testing.assert_allclose(found, states(merged, MOE), atol=2e-5)
    without = {path: x for path, x in params.items() if not is_trained(path, DECODER)}
    assert np.abs(found - states(without, without_adapters(DECODER))).max() > 0.1
    changed = {path for path in merged if np.abs(merged[path] - params[path]).max() > 1e-3}
    assert changed == {f"layers/moe/expert_{name}/kernel" for name in MATRICES[4:]} | {
        "layers/query/kernel"
    }


@pytest.mark.parametrize("sizes", [{"expert": 4, "tensor": 2, "fsdp": 1}, {"fsdp": 4, "tensor": 2}])
def test_adapters_of_experts_are_the_same_on_a_mesh(sizes, params):
    expected = states(params, DECODER)
    with sharding.activate(make_mesh(**({"data": 1} | sizes))):
        rows = [jnp.tile(x, (2, 1)) for x in ROWS]
        tree = unflatten_dict(params, sep="/")
        found = jax.jit(lambda p: hidden_states(p, DECODER, *rows)[0])(tree)
    np.testing.assert_allclose(found[:4], expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_sampler_draws_what_the_merged_model_draws(dtype, params, merged, one_device):
    """With int8 matrices adapters keep their dtype, so only the log-probs are near."""

    def draw(config, flat):
        engine = make_engine(one_device, config=config, weights_dtype=dtype)
        tree = unflatten_dict(flat, sep="/")
        return sample(Scheduler(engine, TOKENIZER, seed=5), tree, PROMPTS[:3], 2)

    found, expected = draw(DECODER, params), draw(MOE, merged)
    first = [groups[0][0].sampler_logprobs[0] for groups in (found, expected)]
    np.testing.assert_allclose(*first, atol=1e-4 if dtype == "auto" else 0.3)
    if dtype == "auto":
        for index, group in expected.items():
            for one, other in zip(group, found[index], strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_folder_of_peft_names_each_expert_and_is_read_back(params, tmp_path, one_device):
    trained = {path: np.asarray(x) for path, x in params.items() if is_trained(path, DECODER)}
    peft_adapters.save_adapters(tmp_path, trained, trained.__getitem__, DECODER, "base")
    tensors = load_file(tmp_path / peft_adapters.WEIGHTS)
    below = "base_model.model.model.layers.1.mlp.experts.5.down_proj"
    assert tensors[f"{below}.lora_A.weight"].shape == (2, MOE.mlp)
    np.testing.assert_array_equal(
        tensors[f"{below}.lora_B.weight"], trained["layers/moe/expert_down/lora_b"][1, 5].T
    )
    found = peft_adapters.load_adapters(str(tmp_path), DECODER, one_device)
    for path, array in flatten_dict(found, sep="/").items():
        np.testing.assert_array_equal(array, trained[path])


def test_an_update_moves_adapters_of_experts_alone(params):
    def loss(trained):
        return jnp.sum(
            jnp.sin(hidden_states(unflatten_dict(rest | trained, sep="/"), DECODER, *ROWS)[0])
        )

    trained = {path: x for path, x in params.items() if is_trained(path, DECODER)}
    rest = {path: x for path, x in params.items() if path not in trained}
    gradient = jax.jit(jax.grad(loss))(trained)
    assert len(gradient) == 8 and all(np.abs(g).max() > 1e-4 for g in gradient.values())
