"""The critic beside the policy: where it starts, learns alone and is resumed; the reference."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from conftest import TINY, first_devices
from small_runs import equal, learn, make_groups, make_quick_config, open_run, read_rows

from dapo_jax import algorithms
from dapo_jax.config.experiment import Checkpoint, Compute, Config, Critic, Mesh, Model, Optimizer
from dapo_jax.config.rates import choose_rates
from dapo_jax.learner.advantages import gather_feedback
from dapo_jax.learner.batches import TrainState
from dapo_jax.learner.critic import scalar_config
from dapo_jax.learner.update import LearnerStates, learning_rates
from dapo_jax.model import load_huggingface, save_huggingface
from dapo_jax.rollout.source import SourceState
from dapo_jax.run.build import build
from dapo_jax.run.loop import train
from dapo_jax.run.metrics import feedback_metrics
from dapo_jax.step import TrainerState
from dapo_jax.types.errors import ConfigError

STEPS, ALONE = 3, 1


def host(run) -> dict:
    """What a step changes, on the host."""
    return jax.device_get(run.state.learners.by_name())


def make_ppo(base, run_dir) -> Config:
    return make_quick_config(
        base,
        run_dir,
        "ppo",
        total_steps=STEPS,
        model=Model(folder=str(base), freeze_layers=0.5),
        critic=Critic(
            pretrain_steps=ALONE, optimizer=Optimizer(learning_rate=1e-3, warmup_steps=0)
        ),
        checkpoint=Checkpoint(every_steps=1, keep=9),
    )


@pytest.mark.slow
def test_the_critic_learns_alone_before_the_policy_moves(base, alone, tmp_path):
    states = []
    with open_run(make_ppo(base, tmp_path)) as run:
        states.append(host(run))
        while run.state.step < STEPS:
            run.step()
            states.append(host(run))
        run.finish()
    (start, first, *later), rows = states, read_rows(tmp_path)
    assert equal(first["policy"], start["policy"])
    assert not equal(first["critic"].params, start["critic"].params)
    assert int(first["policy"].update_count) == 0 and int(first["critic"].update_count) == 2
    assert "frozen_layers" not in first["policy"].params
    assert "loss" not in rows[0] and rows[0]["learning_rate"] == 0
    # the policy's own warm-up begins when it does
    assert [row["learning_rate"] for row in rows[1:]] == [5e-4, 1e-3] and "loss" in rows[1]
    for before, after in zip([first, *later], later, strict=False):
        assert not equal(after["policy"].params, before["policy"].params)
        assert not equal(after["critic"].params, before["critic"].params)


def test_how_long_the_critic_learns_alone_is_the_presets_unless_set():
    """VAPO, arXiv 2504.05118: 50 steps, in which the policy's learning rate is 0."""
    config = Config(total_steps=60, algorithm=algorithms.vapo())
    config, _, _ = choose_rates(config, 7_000_000_000, 60)
    assert config.critic_pretrain_steps() == 50
    assert [learning_rates(config, step)["policy"] > 0 for step in (0, 49, 50)] == [
        False,
        False,
        True,
    ]
    for own in (0, 7):
        config.critic.pretrain_steps = own
        assert config.critic_pretrain_steps() == own and learning_rates(config, own)["policy"] > 0
    for preset in set(algorithms.PRESETS) - {"vapo"}:
        assert not Config(algorithm=algorithms.PRESETS[preset]()).critic_pretrain_steps()


def make_tiny(folder, critic_folder="") -> Config:
    algorithm = algorithms.vapo()
    config = Config(algorithm=algorithm, model=Model(folder=str(folder)))
    config.critic.folder = str(critic_folder)
    return config


def first_critic(config):
    parts = build(config)
    critic = jax.device_get(parts.first_params("critic"))
    parts.close()
    return critic


def test_a_critic_from_a_policy_has_its_layers_and_a_head_of_zeros(tiny_folder, tiny_params):
    config = make_tiny(tiny_folder)
    config.model.freeze_layers = 0.5  # of the policy alone
    critic = first_critic(config)
    np.testing.assert_array_equal(critic.pop("score"), np.zeros(TINY.embed))
    jax.tree.map(np.testing.assert_array_equal, critic, jax.device_get(tiny_params))


def test_a_critic_from_a_reward_model_has_its_head(tiny_folder, score_folder, score_params):
    critic = first_critic(make_tiny(tiny_folder, score_folder))
    jax.tree.map(np.testing.assert_array_equal, critic, jax.device_get(score_params))


def test_a_critic_of_an_untied_policy_leaves_its_vocabulary_head_behind(
    tiny_params, one_device, tmp_path
):
    untied = load_huggingface.DecoderConfig(**(vars(TINY) | {"tie_embeddings": False}))
    head = np.ones((TINY.embed, TINY.vocab), np.float32)
    save_huggingface.save_folder(tmp_path, tiny_params | {"head": head}, untied, (1,))
    critic = load_huggingface.load_params(
        tmp_path, scalar_config(untied), one_device, fresh_score=True
    )
    assert set(critic) == set(tiny_params) | {"score"}


def test_a_critic_folder_that_does_not_fit_stops_before_anything_is_written(
    base, tiny_folder, alone, tmp_path
):
    config = make_quick_config(tiny_folder, tmp_path / "run", "ppo", critic=Critic(str(base)))
    with pytest.raises(ConfigError, match=f"config.critic.folder = '{base}'.*shape"):
        train(config)
    assert not (tmp_path / "run").exists()


# --- explained variance --------------------------------------------------------------------

INDEX = np.array([[-1, 0, 0, 0, -1, 1, 1, -1]])


def explained(values: np.ndarray, returns: np.ndarray) -> float:
    known = {"groups": np.array([0, 0]), "correct": np.array([True, False]), "values": values}
    feedback = gather_feedback(INDEX, np.array([1.0, -1.0]), **known)
    measured = feedback_metrics(algorithms.ppo(), feedback, np.ones(INDEX.shape), returns)
    return measured["explained_variance"]


def test_explained_variance_compares_values_with_returns_on_responses_alone():
    rng, on = np.random.default_rng(0), INDEX >= 0
    returns = np.where(on, rng.normal(size=INDEX.shape), 77.0)
    off = np.where(on, 0.0, 55.0)
    assert explained(returns + off, returns) == 1
    assert explained(np.full(INDEX.shape, 3.0) + off, returns) == pytest.approx(0)
    assert explained(-returns + off, returns) == pytest.approx(-3)


# --- references ----------------------------------------------------------------------------------


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
    with first_devices():
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
    assert_same(grpo_parts.learners.scorers["reference"].params, tiny_params)
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
    assert_same(
        parts.learners.scorers["reference"].params,
        jax.tree.map(lambda leaf: leaf * 1.5, tiny_params),
    )
    assert_same(parts.first_params(), tiny_params)


def test_the_reference_is_held_in_the_compute_dtype_and_sharded_as_the_policy(
    tiny_folder, tmp_path
):
    changes = {"compute": Compute(dtype="bfloat16"), "mesh": Mesh(2, 2, 2)}
    parts = build(make_quick_config(tiny_folder, tmp_path, "dpo", **changes))
    parts.close()
    leaves = jax.tree.leaves(parts.learners.scorers["reference"].params)
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16", "float32"}  # norms stay float32
    assert parts.learners.scorers["reference"].params["embedding"].dtype == "bfloat16"
    places = jax.tree.leaves(parts.learners.policy.shardings.params)
    for leaf, place in zip(leaves, places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
