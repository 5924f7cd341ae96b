"""Every preset trains: it validates, and two steps of a small run move the policy."""

import dataclasses

import jax
import numpy as np
import pytest
from small_runs import equal, make_quick_config, open_run, read_rows

from dapo_jax import algorithms

QUICK = ("dpo", "grpo", "gspo", "rloo", "vapo")  # between them every branch of an update
RL_PRESETS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(algorithms.PRESETS)
    if name != "sft" and algorithms.preset(name).distillation == "none"  # test_distillation.py
]


@pytest.mark.parametrize("preset", RL_PRESETS)
def test_two_steps_of_a_preset_are_finite_and_change_the_trained_models(
    preset, base, alone, tmp_path
):
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


def test_no_two_presets_are_the_same_algorithm():
    values = {name: dataclasses.astuple(make()) for name, make in algorithms.PRESETS.items()}
    assert len(set(values.values())) == len(values)
