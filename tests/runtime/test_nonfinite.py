"""Numbers that are not finite: refused at the door, never saved, never exported, and named."""

import contextlib
import dataclasses
import io
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, first_devices
from learners import make_batch, make_learner, place
from safetensors.numpy import load_file, save_file
from small_runs import make_quick_config, open_run, read_rows

from dapo_jax.config.experiment import Checkpoint, Config, Log, Optimizer
from dapo_jax.config.files import read_config
from dapo_jax.learner.update import LearnerStates
from dapo_jax.model import load_huggingface, save_huggingface
from dapo_jax.run import store
from dapo_jax.run.loop import train
from dapo_jax.run.store import saved_steps
from dapo_jax.runtime import nonfinite
from dapo_jax.runtime.nonfinite import NotFinite, count_skipped, describe
from dapo_jax.types.errors import ConfigError


def test_arrays_are_named_with_how_much_of_them_is_not_finite():
    tree = {"a": {"b": jnp.array([1.0, jnp.nan, -jnp.inf])}, "c": jnp.arange(3)}
    assert describe(tree) == "a/b (2 of 3)"
    assert describe({"c": jnp.ones(2)}) == ""


def test_the_check_of_a_stack_needs_less_memory_than_the_stack():
    stack = jnp.ones((16, 64, 256), jnp.bfloat16)
    program = nonfinite._is_finite.lower(stack).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.6 * stack.nbytes


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
        load_huggingface.load_params(tmp_path, TINY, one_device)


def test_a_folder_that_would_hold_such_numbers_is_not_written(tiny_params, tmp_path):
    params = tiny_params | {"embedding": tiny_params["embedding"] * 1e6}
    leaves = save_huggingface.flatten(params)
    with pytest.raises(NotFinite, match="embed_tokens.*not finite as float16"):
        save_huggingface.save_weights(tmp_path, leaves, TINY, "float16")


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
    state, (metrics, _) = learner.update(state, batch, used, rate)
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


HEAVY = """
import numpy as np
def heavy(group, sample):
    spoilt = sample == 1 and group.completions[0].policy_step >= 1
    weights = np.ones(len(group.completions[sample]))
    weights[-1] = 1e30 if spoilt else 1.0
    return weights
"""


@pytest.fixture(scope="module")
def stopped(base, tmp_path_factory):
    """A run whose first step is good and whose others only overflow; what it said, and raised."""
    folder = tmp_path_factory.mktemp("overflowing")
    (folder / "heavy_module.py").write_text(HEAVY)
    config = make_quick_config(
        base,
        folder / "run",
        updates=1,
        total_steps=9,
        checkpoint=Checkpoint(every_steps=1, keep=2),
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=2, max_skipped_steps=2),
        log=Log(0, tensorboard=False, report=False),
    )
    config.algorithm.token_weights = "heavy_module:heavy"
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, first_devices(), contextlib.redirect_stdout(said):
        patch.syspath_prepend(folder)
        with pytest.raises(NotFinite) as raised:
            train(config)
    return pathlib.Path(config.run_dir), said.getvalue().replace("\n", " "), str(raised.value)


def test_a_run_that_only_skips_stops_and_keeps_the_checkpoints_from_before(stopped):
    run_dir, said, error = stopped
    assert "2 steps in a row took no update: the gradient was not finite" in error
    assert "optimizer.max_skipped_steps = 2" in error
    assert [row["skipped_updates"] for row in read_rows(run_dir)] == [0, 1, 1]
    assert "step 2: updates were skipped as not finite: skipped_for_gradient 1" in said
    assert saved_steps(run_dir) == [1]


def test_a_checkpoint_that_is_not_finite_is_neither_written_nor_read(
    stopped, alone, tmp_path, monkeypatch
):
    config = read_config(Config, str(stopped[0]))
    config.run_dir = str(tmp_path / "run")
    config.algorithm.token_weights = ""
    with open_run(config) as run:
        learners = LearnerStates(spoil_moment(run.state.learners.policy))
        run.state = dataclasses.replace(run.state, learners=learners)
        moment = "optimizer moments of the policy are not finite: nu/final_norm/scale"
        with pytest.raises(NotFinite, match=f"step 0 is not saved: {moment}"):
            run.save()
        run.state = dataclasses.replace(run.state, step=3)
        with monkeypatch.context() as patch:  # as from elsewhere
            patch.setattr(store, "check_state", lambda *_: None)
            run.save()
        run.checkpoints.wait()
        with store.Checkpoints(config.run_dir) as saved:
            with pytest.raises(NotFinite, match=f"checkpoints/3: {moment}"):
                saved.state(run.components.learners.policy.abstract_state)
