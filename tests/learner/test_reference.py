"""The frozen reference policy: which folder it is, that it stays, and who holds one."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from conftest import TINY
from small_runs import learn, make_groups, make_quick_config

from dapo_jax.config.experiment import Compute, Mesh, Model
from dapo_jax.learner.batches import TrainState
from dapo_jax.learner.learners import LearnerStates
from dapo_jax.model import save_huggingface
from dapo_jax.rollout.source import SourceState
from dapo_jax.run.components import build
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.train import TrainerState


@pytest.fixture
def other_folder(tiny_folder, tiny_params, tmp_path):
    """A folder of the same shape and tokenizer with other weights."""
    folder = tmp_path / "other"
    other = jax.tree.map(lambda leaf: leaf * 1.5, tiny_params)
    save_huggingface.save_folder(folder, other, TINY, (1,))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    return folder


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(left), jax.device_get(right))


@pytest.fixture(scope="module")
def grpo_parts(tiny_folder, tmp_path_factory):
    """A run of GRPO, its KL in the loss, one update per batch."""
    config = make_quick_config(tiny_folder, tmp_path_factory.mktemp("grpo"), "grpo", updates=1)
    devices = jax.devices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices[:1])
        parts = build(config)
    yield parts
    parts.close()


def distances(parts, params, groups) -> tuple[list[float], TrainState]:
    """KL to the reference before each of three updates, and where they led."""
    learner = parts.learners.policy
    params = jax.device_put(params, learner.shardings.params)
    run, actual = TrainerState(1, LearnerStates(learner.start(params)), SourceState()), []
    for _ in range(3):
        run, values = learn(parts, run, groups)
        actual.append(values["kl_reference"])
    return actual, run.learners.policy


def test_the_reference_stays_while_the_policy_moves_away_from_it(grpo_parts, tiny_params):
    groups = make_groups(grpo_parts.config)
    actual, state = distances(grpo_parts, tiny_params, groups)
    assert_same(grpo_parts.learners.reference, tiny_params)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, tiny_params)
    assert all(jax.tree.leaves(moved))
    assert abs(actual[0]) < 1e-9  # before the first update both are the same policy
    assert 1e-6 < actual[1] < actual[2]


def test_if_all_rewards_are_equal_the_kl_pulls_the_policy_to_its_reference(grpo_parts, tiny_params):
    groups = [
        dataclasses.replace(group, rewards=np.ones(len(group.completions)))
        for group in make_groups(grpo_parts.config)
    ]
    astray = jax.tree.map(lambda leaf: leaf * 1.1, tiny_params)
    actual, _ = distances(grpo_parts, astray, groups)
    assert actual[0] > 0.1 and max(actual[1:]) < 0.5 * actual[0]


def test_a_reference_folder_of_its_own_is_read(
    tiny_folder, tiny_params, other_folder, alone, tmp_path
):
    model = Model(folder=str(tiny_folder), reference_folder=str(other_folder))
    parts = build(make_quick_config(tiny_folder, tmp_path, "grpo", model=model))
    parts.close()
    assert_same(parts.learners.reference, jax.tree.map(lambda leaf: leaf * 1.5, tiny_params))
    assert_same(parts.first_params(), tiny_params)


def test_the_reference_is_held_in_the_compute_dtype_and_sharded_as_the_policy(
    tiny_folder, tmp_path
):
    changes = {"compute": Compute(dtype="bfloat16"), "mesh": Mesh(2, 2, 2)}
    parts = build(make_quick_config(tiny_folder, tmp_path, "dpo", **changes))
    parts.close()
    leaves = jax.tree.leaves(parts.learners.reference)
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16", "float32"}  # norms stay float32
    assert parts.learners.reference["embedding"].dtype == "bfloat16"
    places = jax.tree.leaves(parts.learners.policy.shardings.params)
    for leaf, place in zip(leaves, places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


@pytest.mark.slow
def test_a_reference_of_another_shape_or_tokenizer_is_rejected(
    tiny_folder, other_folder, base, alone, tmp_path
):
    tokenizer = other_folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("again", "gaina"))
    for folder, words in ((base, "shape"), (other_folder, "tokenizer")):
        model = Model(folder=str(tiny_folder), reference_folder=str(folder))
        config = make_quick_config(tiny_folder, tmp_path, "grpo", model=model)
        with pytest.raises(ConfigError, match=f"model.reference_folder = '{folder}'.*{words}"):
            build(config)
