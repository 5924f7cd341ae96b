"""Every preset trains: it validates, and two steps of a small run move the policy."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest
from small_runs import equal, learn, make_groups, make_quick_config, open_run, read_rows, start

from dapo_jax import algorithms
from dapo_jax.learner import minibatches
from dapo_jax.run.components import build

train_module = importlib.import_module("dapo_jax.train")

QUICK = ("dpo", "grpo", "gspo", "rloo", "vapo")  # between them every branch of an update
RL_PRESETS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(algorithms.PRESETS)
    if name != "sft" and algorithms.preset(name).distillation == "none"  # run/test_teacher.py
]


@pytest.mark.parametrize("preset", RL_PRESETS)
def test_two_steps_of_a_preset_are_finite_and_move_what_it_trains(preset, base, alone, tmp_path):
    config = make_quick_config(base, tmp_path, preset)
    with open_run(config) as run:
        models = {"policy": lambda: run.state.learners.policy.params}
        if config.algorithm.critic:
            models["critic"] = lambda: run.state.learners.critic.params
        before = jax.device_get({name: params() for name, params in models.items()})
        for _ in range(2):
            run.step()
            after = jax.device_get({name: params() for name, params in models.items()})
            assert not any(equal(before[name], after[name]) for name in models)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
            before = after
    rows = read_rows(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert None not in row.values()  # what is not finite has no number in JSON
        assert row["skipped_updates"] == row["empty_updates"] == 0
        assert row["gradient_norm"] > 0 and row["trained_groups"] == 4
        assert ("kl_reference" in row) == config.algorithm.reference
        assert ("explained_variance" in row) == config.algorithm.critic
        assert ("preference_loss" in row) == (preset == "dpo")


@pytest.mark.slow
def test_dpo_comes_to_prefer_the_right_responses_of_its_pairs(tiny_folder, alone, tmp_path):
    config = make_quick_config(tiny_folder, tmp_path, "dpo")
    parts = build(config)
    run, seen = start(parts, 1), []
    for _ in range(4):
        run, values = learn(parts, run, make_groups(config))
        seen.append((values["preference_loss"], values["preference_accuracy"]))
    parts.close()
    losses, accuracies = zip(*seen, strict=True)
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-5)  # policy and reference are one
    assert sorted(losses, reverse=True) == list(losses) and losses[-1] < 0.5
    assert accuracies[-1] == 1


def test_advantages_are_estimated_once_over_the_whole_rollout_batch(
    tiny_folder, alone, tmp_path, monkeypatch
):
    config = make_quick_config(tiny_folder, tmp_path, "reinforce_pp_baseline")
    config.algorithm.old_logprobs = "sampler"
    config.rollout.updates_per_rollout = 2
    parts, seen = build(config), []

    def record(algorithm, feedback):
        seen.append(len(feedback.rewards))
        raise StopIteration

    monkeypatch.setattr(train_module, "estimate", record)
    run = start(parts)
    groups = make_groups(config)
    with pytest.raises(StopIteration):
        learn(parts, run, groups)
    parts.close()
    assert seen == [sum(len(group.completions) for group in groups)]


def test_a_starved_steps_last_minibatch_weighs_its_groups_as_planned(
    tiny_folder, alone, tmp_path, monkeypatch
):
    config = make_quick_config(tiny_folder, tmp_path)  # two minibatches of two groups
    parts, seen, make_batch = build(config), [], minibatches.make_batch

    def record(*args):
        seen.append(make_batch(*args))
        return seen[-1]

    monkeypatch.setattr(minibatches, "make_batch", record)
    run = start(parts)
    learn(parts, run, make_groups(config)[:3])
    parts.close()
    np.testing.assert_allclose([batch.loss_weights.sum() for batch in seen], [1, 0.5], rtol=1e-6)


def test_no_two_presets_are_the_same_algorithm():
    values = {name: dataclasses.astuple(make()) for name, make in algorithms.PRESETS.items()}
    assert len(set(values.values())) == len(values)
