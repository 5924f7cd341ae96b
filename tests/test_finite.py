"""Numbers that are not finite: refused at the door, never saved, never exported, and named."""

import dataclasses
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from safetensors.numpy import load_file, save_file
from small_runs import make_quick_config, read_rows
from test_update import make_batch, make_learner, place

from dapo_jax.checkpoints import Checkpoints
from dapo_jax.experiment.config import Checkpoint, Optimizer
from dapo_jax.experiment.settings import ConfigError
from dapo_jax.finite import NotFinite, count_skipped, describe
from dapo_jax.model import huggingface, saving
from dapo_jax.run import train


def test_arrays_are_named_with_how_much_of_them_is_not_finite():
    tree = {"a": {"b": jnp.array([1.0, jnp.nan, -jnp.inf])}, "c": jnp.arange(3)}
    assert describe(tree) == "a/b (2 of 3)"
    assert describe({"c": jnp.ones(2)}) == ""


def spoil(folder, name: str, value: float) -> None:
    """One number of a tensor in a model folder."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].flat[5] = value
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_folder_with_a_number_that_is_not_finite_is_refused(
    value, tiny_folder, one_device, tmp_path
):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, "model.layers.1.mlp.up_proj.weight", value)
    with pytest.raises(ConfigError, match=r"model.folder = .*not finite: layers/up/kernel \(1 of"):
        huggingface.load_params(tmp_path, TINY, one_device)


def test_a_folder_that_would_hold_such_numbers_is_not_written(tiny_params, tmp_path):
    params = tiny_params | {"embedding": tiny_params["embedding"] * 1e6}
    leaves = saving.flatten(params)
    with pytest.raises(NotFinite, match="embed_tokens.*not finite as float16"):
        saving.save_weights(tmp_path, leaves, TINY, "float16")


def spoil_moment(state):
    adam = state.opt_state[1]
    scale = adam.nu["final_norm"]["scale"].at[0].set(jnp.nan)
    adam = adam._replace(nu=adam.nu | {"final_norm": {"scale": scale}})
    return state.replace(opt_state=(state.opt_state[0], adam, state.opt_state[2]))


@pytest.mark.parametrize("reason", ["gradient", "moments", "parameters"])
def test_an_update_that_would_not_be_finite_changes_nothing_and_says_why(
    reason, tiny_params, one_device
):
    learner = make_learner(one_device)
    batch, used = make_batch()
    state = learner.start(place(tiny_params, learner))
    if reason == "gradient":
        batch = dataclasses.replace(batch, advantages=batch.advantages * np.float32(np.nan))
    if reason == "moments":
        state = spoil_moment(state)
    before = jax.device_get(state)
    rate = 1e30 if reason == "parameters" else 1e-3
    state, metrics = learner.update(state, batch, used, rate)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    said = {name for name, mean in metrics.items() if name.startswith("skipped_") and mean.value()}
    assert said == {"skipped_updates", f"skipped_for_{reason}"}


def test_only_steps_without_any_update_count_and_only_in_a_row():
    count, shares = {}, [1.0, 0.5, 1.0, None, 1.0]
    found = []
    for share in shares:
        count = count_skipped(count, {} if share is None else {"skipped_updates": share})
        found.append(count[""])
    assert found == [1, 0, 1, 1, 2] and count["value_"] == 0


OVERFLOWING = """
import numpy as np
def heavy(group, sample):
    late = group.completions[0].policy_step >= 1
    return np.full(len(group.completions[sample]), 1e30 if late else 1.0)
"""


@pytest.fixture
def overflowing(base, write_module, alone, tmp_path):
    """A run whose first step is good and whose others only overflow."""
    write_module("heavy_module", OVERFLOWING)
    config = make_quick_config(
        base,
        tmp_path / "run",
        updates=1,
        total_steps=9,
        checkpoint=Checkpoint(every_steps=1, keep=2),
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=2, max_skipped_steps=2),
    )
    config.algorithm.token_weights = "heavy_module:heavy"
    return config


def test_a_run_that_only_skips_stops_and_keeps_the_checkpoints_from_before(overflowing, capsys):
    with pytest.raises(NotFinite, match="2 steps in a row .* the gradient was not finite .* = 2"):
        train(overflowing)
    rows = read_rows(pathlib.Path(overflowing.run_dir))
    assert [row["skipped_updates"] for row in rows] == [0, 1, 1]
    assert "step 2: an update was skipped: the gradient was not finite" in capsys.readouterr().out
    with Checkpoints(overflowing.run_dir) as checkpoints:
        assert checkpoints.latest_step() == 1
