"""gpt-oss as a policy: sampled in every layout, adapted, trained with replayed routes, exported."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from kept_groups import make_kept
from mxfp4_folders import write_both
from samplers import GREEDY, PROMPTS, TOKENIZER, greedy_loop, make_engine, place, sample
from small_runs import read_rows
from test_sinks import GPT_OSS, random_params

from dapo_jax.config.experiment import ExportConfig, Lora, Mesh, Optimizer
from dapo_jax.model import save_huggingface
from dapo_jax.model.decode_attention import quantise
from dapo_jax.model.experts import REPLACED
from dapo_jax.model.load_huggingface import load_params, read_config
from dapo_jax.model.logprobs import hidden_states
from dapo_jax.model.param_paths import param_shapes, scaled_axes
from dapo_jax.model.trainable import choose_trained, is_trained
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.export import export, policy_layers
from dapo_jax.run.run import train
from dapo_jax.runtime.sharding import make_mesh

slow = pytest.mark.slow
SOME = PROMPTS[:4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_folder):
    """A model folder of gpt-oss with the embedded task's tokenizer."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    save_huggingface.save_folder(folder, random_params(), GPT_OSS, (1,))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    return folder


@slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache": "paged", "page_tokens": 4},
        {"slots": 8, "burst": 7, "first_window_tokens": 2},
        {"prefill_chunk_tokens": 3, "prefill_prompts": 4},
    ],
    ids=["slots", "pages", "growing", "chunks"],
)
@pytest.mark.parametrize("apart", [False, True])
def test_greedy_decoding_equals_the_whole_forward_pass(settings, apart, one_device):
    mesh = make_mesh(1, 1, 2, expert=4) if apart else one_device
    params = random_params()
    engine = make_engine(mesh, config=GPT_OSS, **{"slots": 8} | settings)
    groups = sample(
        Scheduler(engine, TOKENIZER, seed=5), place(params, GPT_OSS, mesh), SOME, 1, GREEDY
    )
    for prompt in SOME:
        expected = greedy_loop(params, prompt.tokens.tolist(), 20, GPT_OSS)
        assert groups[prompt.index][0].tokens.tolist() == expected


@slow
def test_int8_weights_draw_what_the_rounded_ones_do(one_device):
    params, rounded = random_params(), {}
    for path, array in flatten_dict(params, sep="/").items():
        axes = tuple(axis + path.startswith("layers/") for axis in scaled_axes(path))
        rounded[path] = array
        if axes:
            whole, scale = quantise(array, jnp.int8, axes)
            rounded[path] = whole * jnp.expand_dims(scale, axes)
    found = []
    for tree, dtype in ((params, "int8"), (unflatten_dict(rounded, sep="/"), "auto")):
        engine = make_engine(one_device, config=GPT_OSS, weights_dtype=dtype)
        groups = sample(Scheduler(engine, TOKENIZER, seed=5), tree, SOME, 1)
        found.append([groups[i][0].sampler_logprobs[0] for i in sorted(groups)])
    np.testing.assert_allclose(*found, atol=1e-4)


LORA = Lora(rank=2, alpha=3.0, targets="out,gate,up,down")


@slow
def test_adapters_compute_what_the_merged_folder_does(folder, tmp_path, one_device):
    decoder, random = choose_trained(GPT_OSS, 0.0, LORA), np.random.default_rng(5)
    shapes = {
        path: shape for path, shape in param_shapes(decoder).items() if is_trained(path, decoder)
    }
    trained = {path: random.normal(0, 0.3, shape).astype("f") for path, shape in shapes.items()}
    layers = policy_layers(trained, trained.__getitem__, decoder, str(folder))
    (tmp_path / "out").mkdir()
    save_huggingface.save_weights(tmp_path / "out", layers, decoder)
    merged = load_params(tmp_path / "out", GPT_OSS, one_device)
    rows = jax.random.randint(jax.random.key(1), (4, 9), 2, 32), jnp.ones((4, 9), jnp.int32)
    rows = (*rows, jnp.broadcast_to(jnp.arange(9), (4, 9)))
    adapted = unflatten_dict(flatten_dict(random_params(), sep="/") | trained, sep="/")
    found, expected, base = (
        hidden_states(params, config, *rows)[0]
        for params, config in ((adapted, decoder), (merged, GPT_OSS), (random_params(), GPT_OSS))
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - base).max() > 0.1
    changed = {
        path for path, x in flatten_dict(merged, sep="/").items() if changes(x, adapted, path)
    }
    names = ("out", "moe/expert_gate", "moe/expert_up", "moe/expert_down")
    assert changed == {f"layers/{name}/kernel" for name in names}


def changes(array, params, path):
    return bool(np.abs(array - flatten_dict(params, sep="/")[path]).max() > 1e-3)


@slow
@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_from_mxfp4_replays_routes_and_is_exported(adapted, folder, score_folder, tmp_path):
    packed = tmp_path / "packed"
    write_both(folder, packed, tmp_path / "plain")
    shutil.copy(folder / "tokenizer.json", packed)
    own = {"mesh": Mesh(data=1, fsdp=1, tensor=2, expert=4)}
    own |= {"sampler": {"weights_dtype": "int8"}, "lora": LORA} if adapted else {}
    config = make_kept("plain", packed, score_folder, tmp_path / "run", replay="sampler", **own)
    config.optimizer = Optimizer(learning_rate=0.02, warmup_steps=0)
    train(config)
    rows = read_rows(tmp_path / "run")
    assert 0 < rows[0][REPLACED] < 0.5 and all(np.isfinite(row["loss"]) for row in rows)
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    config = read_config(tmp_path / "out")
    assert (
        config == GPT_OSS
        and "quantization_config" not in (tmp_path / "out/config.json").read_text()
    )
    one = make_mesh(1, 1, 1, jax.devices()[:1])
    before, after = (
        flatten_dict(load_params(f, config, one), sep="/") for f in (packed, tmp_path / "out")
    )
    moved = {path for path, array in after.items() if np.abs(array - before[path]).max() > 0}
    sinks = "layers/sinks" in moved
    assert sinks != adapted and {"layers/moe/expert_up/kernel", "layers/out/kernel"} <= moved
