"""Low-rank adapters: what they compute, leave alone, and merge into; and frozen layers."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samplers
from conftest import TINY, make_prompt
from flax.traverse_util import flatten_dict
from learners import assert_close, make_batch, make_learner, place
from small_runs import equal, learn, make_groups, make_quick_config, open_run

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, ExportConfig, Lora, Mesh, Model, Optimizer
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model import load_huggingface
from dapo_jax.model.peft_adapters import read_adapters
from dapo_jax.model.trainable import (
    MATRICES,
    choose_trained,
    fresh_adapters,
    frozen_layers,
    join,
    without,
)
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.build import build, load_frozen
from dapo_jax.run.evaluate import evaluate
from dapo_jax.run.export import SavedPolicy, export
from dapo_jax.types.errors import ConfigError

LORA = Lora(rank=3, alpha=6.0)
DECODER = choose_trained(TINY, 0.0, LORA)
PROMPTS = [make_prompt(i, [2 + i, 7, 9]) for i in range(3)]


def sample(sampler, params) -> dict[int, list[list[int]]]:
    return samplers.tokens_of(samplers.sample(sampler, params, PROMPTS, 4))


def frozen_learner(config, folder, mesh, **optimizer):
    score, frozen = PolicySettings(algorithms.dapo(), Compute()), load_frozen(folder, config, mesh)
    return policy_learner(score, Optimizer(learning_rate=1e-3, **optimizer), config, mesh, frozen)


def test_fresh_adapters_change_no_log_prob(tiny_folder, tiny_params, one_device):
    learner, (batch, used) = frozen_learner(DECODER, tiny_folder, one_device), make_batch()
    actual = learner.score(
        fresh_adapters(DECODER, one_device, 0), batch.scored.rollouts, used
    ).values
    expected = make_learner(one_device).score(tiny_params, batch.scored.rollouts, used).values
    np.testing.assert_array_equal(actual, expected)


def test_fresh_adapters_are_keyed_by_the_seed_and_the_same_on_any_mesh(one_device, eight_devices):
    adapters = fresh_adapters(DECODER, one_device, 7)
    assert equal(adapters, fresh_adapters(DECODER, eight_devices, 7))
    assert not equal(adapters, fresh_adapters(DECODER, one_device, 8))
    assert set(adapters["layers"]) == set(MATRICES)
    some = choose_trained(TINY, 0.0, Lora(rank=2, targets="query, down"))
    assert set(fresh_adapters(some, one_device, 0)["layers"]) == {"query", "down"}


def test_frozen_parameters_are_held_in_the_compute_dtype(tiny_folder, tiny_params, eight_devices):
    half = dataclasses.replace(DECODER, dtype=jnp.bfloat16)
    frozen = flatten_dict(load_frozen(tiny_folder, half, eight_devices), sep="/")
    for path, whole in flatten_dict(tiny_params, sep="/").items():
        dtype = jnp.float32 if path.endswith("scale") else jnp.bfloat16
        assert frozen[path].dtype == dtype
        np.testing.assert_array_equal(frozen[path], whole.astype(dtype))


@pytest.fixture(scope="module")
def run(tiny_folder, tmp_path_factory):
    """Two saved steps with adapters on eight devices: their config and last state."""
    run_dir, folder = tmp_path_factory.mktemp("lora"), tmp_path_factory.mktemp("base")
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    config = make_lora_config(folder, run_dir)
    with open_run(config) as run:
        for step in (1, 2):
            state, _ = learn(run.components, run.state, make_groups(config))
            run.state = dataclasses.replace(state, step=step)
            run.save()
        return config, jax.device_get(run.state.learners.policy)


def make_lora_config(folder, run_dir, **changes):
    optimizer = Optimizer(learning_rate=0.3, warmup_steps=0)
    quick = {"lora": LORA, "mesh": Mesh(2, 2, 2), "optimizer": optimizer}
    return make_quick_config(folder, run_dir, "grpo", updates=1, **quick | changes)


def test_a_run_resumes_bit_for_bit_and_its_export_is_merged_and_gives_the_same_tokens(
    run, tmp_path, one_device, tiny_params
):
    """From adapters and their moments alone."""
    config, state = run
    adapters = flatten_dict(state.params, sep="/")
    assert {path.rpartition("/")[2] for path in adapters} == {"lora_a", "lora_b"}
    assert SavedPolicy(config.run_dir).shapes() == {p: a.shape for p, a in adapters.items()}
    moments = [leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(moments) == 2 * sum(array.size for array in adapters.values())
    out = export(ExportConfig(run=config.run_dir, out=str(tmp_path / "out")))
    decoder = load_huggingface.read_config(out)
    assert decoder == TINY
    params = load_huggingface.load_params(out, decoder, one_device)
    sizes = {"burst": 4, "response": 24, "width": 4, "first_window_tokens": 16}
    engine = samplers.make_engine(one_device, **sizes)
    sampler = Scheduler(engine, samplers.TOKENIZER, seed=0)
    with open_run(config) as resumed:
        assert resumed.state.step == 2
        assert equal(jax.device_get(resumed.state.learners.policy), state)
        trained = sample(resumed.components.sampler, resumed.state.learners.policy.params)
    exported, base = (sample(sampler, own) for own in (params, tiny_params))
    assert trained == exported != base


def test_an_export_has_the_adapters_beside_it_or_alone(run, tmp_path):
    config, state = run
    for name, weights in (("out", "merged"), ("alone", "adapter")):
        export(ExportConfig(run=config.run_dir, out=str(tmp_path / name), weights=weights))
    parts = "adapter_config.json", "adapter_model.safetensors"
    for folder in ("out.adapter", "alone"):
        read = read_adapters(str(tmp_path / folder), DECODER)
        for path, array in flatten_dict(state.params, sep="/").items():
            np.testing.assert_array_equal(read[path], array)
        assert all((tmp_path / folder / part).exists() for part in parts)
    assert not list(tmp_path.glob("out/adapter*")) + list(tmp_path.glob("alone/model*"))
    assert not list(tmp_path.glob("alone.adapter"))


@pytest.mark.slow
def test_a_run_starts_from_adapters_that_its_reference_has_too(run, tmp_path):
    config, state = run
    export(ExportConfig(run=config.run_dir, out=str(tmp_path / "old"), weights="adapter"))
    lora = dataclasses.replace(LORA, folder=str(tmp_path / "old"))
    config = make_lora_config(config.model.folder, tmp_path / "new", lora=lora)
    with open_run(config) as begun:
        first = begun.state.learners.policy.params
        assert equal(jax.device_get(first), state.params)
        reference = flatten_dict(begun.components.learners.scorers["reference"].params)
        for path, array in flatten_dict(state.params).items():
            np.testing.assert_array_equal(reference[path], array)
        begun.state = dataclasses.replace(begun.state, step=1)
        begun.save()
    changed = tmp_path / "old/adapter_config.json"
    changed.write_text(changed.read_text() + " ")
    with pytest.raises(ConfigError, match="config.lora.folder .content. = .* was made with"):
        open_run(config).__enter__()


def flip_a_bit(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_rotations(folder):
    values = json.loads((folder / "config.json").read_text()) | {"rope_theta": 77.0}
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "change", [pytest.param(flip_a_bit, marks=pytest.mark.slow), change_rotations]
)
def test_a_changed_base_is_rejected_by_every_command(change, run, tmp_path):
    config, _ = run
    folder = pathlib.Path(config.model.folder)
    kept = shutil.copytree(folder, tmp_path / "kept")
    change(folder)
    out = ExportConfig(run=config.run_dir, out=str(tmp_path / "out"))
    commands = open_run(config).__enter__, lambda: export(out), lambda: evaluate(config)
    words = "model.* = .*(must be unchanged|but the run was made)"
    try:
        for command in commands:
            with pytest.raises(ConfigError, match=words):
                command()
    finally:
        shutil.copytree(kept, folder, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (Lora(2, targets="query,q_proj"), "lora.targets = 'query,q_proj': must be some"),
        (Lora(2, targets="up,up"), "lora.targets = 'up,up': must be some of query"),
        (Lora(folder="old"), "lora.rank = 0: must be above 0 .*r of its adapter_config.json"),
    ],
)
def test_invalid_settings_are_rejected(lora, words, tiny_folder, tmp_path, alone):
    with pytest.raises(ConfigError, match=words):
        build(make_quick_config(tiny_folder, tmp_path, lora=lora))


# --- frozen layers -------------------------------------------------------------------------------

HALF = dataclasses.replace(TINY, frozen_layers=1)


def split(params):
    """Return parameters with the first layer moved into the frozen stack."""
    layers = params["layers"]
    return params | {
        "frozen_layers": jax.tree.map(lambda leaf: leaf[:1], layers),
        "layers": jax.tree.map(lambda leaf: leaf[1:], layers),
    }


def test_the_gradient_is_the_unfrozen_ones_without_the_frozen_layers(
    tiny_params, tiny_folder, one_device
):
    whole = make_learner(one_device)
    half = frozen_learner(HALF, tiny_folder, one_device, weight_decay=0.5)
    batch, used = make_batch()
    expected = split(whole.differentiate(place(tiny_params, whole), batch, used)[0])
    expected.pop("frozen_layers")
    actual = half.differentiate(place(without(split(tiny_params), half.frozen), half), batch, used)[
        0
    ]

    assert_close(actual, expected, 1e-4)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(actual))


@pytest.mark.parametrize(("fraction", "layers"), [(0.4, 2), (1 - 1e-12, 2), (0.9, 1)])
def test_a_fraction_that_freezes_nothing_or_everything_is_rejected(fraction, layers):
    with pytest.raises(ConfigError, match=rf"model.freeze_layers = .*from 1/{layers}"):
        frozen_layers(fraction, layers)


def test_a_run_freezes_the_fraction_of_its_config(tiny_folder, tiny_params, alone, tmp_path):
    model = Model(folder=str(tiny_folder), freeze_layers=0.5)
    parts = build(make_quick_config(tiny_folder, tmp_path, "grpo", model=model))
    parts.close()
    for params in (
        join(parts.frozen, parts.first_params()),
        parts.learners.scorers["reference"].params,
    ):
        jax.tree.map(np.testing.assert_array_equal, params, split(tiny_params))
    frozen, kept = (
        x["frozen_layers"] for x in (parts.learners.scorers["reference"].params, parts.frozen)
    )
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (frozen, kept)), strict=True))
    moments = parts.learners.policy.abstract_state.opt_state[1].mu
    assert set(moments) == set(tiny_params) and moments["layers"]["up"]["kernel"].shape[0] == 1
