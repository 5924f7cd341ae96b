"""The whole loop on a policy made on the spot: it learns, stops, is killed, and repeats itself."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import make_completion, make_prompt
from kills import DURING_SAVE_2, assert_same_bits, run_killed
from several import final_states
from small_runs import (
    STEPS,
    learn,
    make_config,
    make_quick_config,
    open_run,
    read_rollouts,
    read_rows,
    start,
)

from dapo_jax.config.experiment import Optimizer, Sampler
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.run.build import build
from dapo_jax.run.evaluate import evaluate
from dapo_jax.run.loop import train
from dapo_jax.types.structs import Verdict


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """An uninterrupted run on eight virtual devices, and its summary."""
    run_dir = tmp_path_factory.mktemp("finished")
    return run_dir, train(make_config(base, run_dir))


def test_a_run_leaves_what_people_look_for(finished):
    run_dir, summary = finished
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert summary["steps"] == STEPS and 0 < summary["heldout_accuracy_before"] < 1
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert all(0 < row["kept_fraction"] <= 1 and row["trained_groups"] == 8 for row in rows[1:])
    assert all(row["gradient_norm"] > 0 and row["entropy"] > 0 for row in rows[1:])
    assert all(abs(row["kl_sampler_trainer"]) < 1e-4 for row in rows[1:])
    assert all(row["sampler_match_fraction"] == 1 for row in rows[1:])
    assert {"heldout_accuracy" in row for row in rows} == {True, False}
    lines = read_rollouts(run_dir)["step_000001.jsonl"].splitlines()
    line = json.loads(lines[0])
    assert line["correct"] == (line["extracted"] == line["answer"]) and line["policy_step"] == 0
    assert len(lines) >= 64
    evaluated = read_rollouts(run_dir, "evaluations")
    assert list(evaluated) == ["step_000000.jsonl", "step_000002.jsonl", "step_000004.jsonl"]
    last = [json.loads(line) for line in evaluated["step_000004.jsonl"].splitlines()]
    assert len(last) == 16 * 2 and last[0]["policy"] == "step 4"
    assert np.mean([line["correct"] for line in last]) == summary["heldout_accuracy_after"]
    assert rows[-1]["heldout_pass_at_k"] >= rows[-1]["heldout_accuracy"] > 0
    assert [name for name in summary if "heldout" in name] == [
        f"heldout_{score}_{when}"
        for score in ("accuracy", "reward")
        for when in ("before", "after")
    ]
    rewards = np.mean([line["reward"] for line in last])
    assert summary["heldout_reward_after"] == pytest.approx(rewards)
    assert summary["heldout_reward_before"] == rows[0]["heldout_reward"]


CHILD = """
from small_runs import make_config
from dapo_jax.run.loop import train
{patch}
train(make_config({base!r}, {run_dir!r}))
"""


def test_a_run_killed_while_it_saves_resumes_bit_for_bit(base, finished, tmp_path, capsys):
    expected_dir, _ = finished
    code = CHILD.format(patch=DURING_SAVE_2, base=str(base), run_dir=str(tmp_path))
    run_killed(code)
    train(make_config(base, tmp_path))
    assert "after step 1" in " ".join(capsys.readouterr().out.split())
    assert_same_bits(tmp_path, expected_dir)
    (state, record), (expected, expected_record) = final_states(base, tmp_path, expected_dir)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert record == expected_record


def test_evaluate_reads_the_newest_checkpoint_or_the_folder(base, finished, tmp_path):
    run_dir, summary = finished
    after = evaluate(make_config(base, run_dir))
    assert after["heldout_accuracy"] == summary["heldout_accuracy_after"]
    before = evaluate(make_config(base, tmp_path), from_folder=True)
    assert before["heldout_accuracy"] == summary["heldout_accuracy_before"]
    assert evaluate(make_config(base, run_dir), from_folder=True) == before


def make_groups(config, truncated, length=4):
    done = tuple(
        make_completion([5] * (length + i if length else 0), truncated=truncated) for i in range(4)
    )
    verdicts = tuple(Verdict(i % 2 == 0, "1") for i in range(4))
    return [reward_group(config, make_prompt(i, [3, 4]), done, verdicts) for i in range(4)]


def test_truncated_filtered_or_empty_responses_take_no_step(base, alone, tmp_path):
    config = make_quick_config(base, tmp_path)
    config.algorithm.overlong_filtering = True
    parts = build(config)
    run = start(parts)
    before = jax.device_get(run.learners.policy)
    cut, whole = make_groups(config, True), make_groups(config, False)
    run, values = learn(parts, run, cut)
    assert values["empty_updates"] == 2 and "loss" not in values
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.learners.policy), before)
    run, values = learn(parts, run, whole)
    assert values["empty_updates"] == 0 and int(run.learners.policy.update_count) == 2
    empty = make_groups(config, True, length=0)
    assert not any(group.correct.any() for group in empty)
    _, values = learn(parts, run, empty)
    assert values["empty_updates"] == 2 and all(np.isfinite(list(values.values())))
    parts.close()


def test_a_starved_run_warns_and_goes_on(base, alone, tmp_path, capsys):
    """No response can end within two tokens, so every answer is wrong."""
    sampler = Sampler(slots=16, burst_tokens=2, max_response_tokens=2)
    config = make_quick_config(base, tmp_path, sampler=sampler, total_steps=1)
    config.rollout.max_sample_rounds = 2
    train(config)
    (row,) = read_rows(tmp_path)
    shown = capsys.readouterr().out
    assert "step 1: too few groups carried signal" in shown
    assert "no answer was found in 100%" in shown and "step 1: all_wrong_fraction is 1, at" in shown
    assert row["all_wrong_fraction"] == 1 and row["trained_groups"] == 0
    assert row["truncated_fraction"] == 1 and row["answer_not_found_rate"] == 1


def test_a_longer_run_keeps_the_rates_that_auto_chose(base, alone, tmp_path, capsys):
    config = make_quick_config(base, tmp_path, optimizer=Optimizer())
    train(config)
    rate = read_rows(tmp_path)[-1]["learning_rate"]
    settings = json.loads((tmp_path / "config.json").read_text())["optimizer"]
    assert settings["learning_rate"] == rate > 1e-4 and settings["warmup_steps"] == 0
    assert f"optimizer.learning_rate = {rate:g} (auto: " in capsys.readouterr().out
    config.total_steps = 40  # for which auto is 4 steps of warm-up
    with open_run(config) as run:
        resumed = run.components.config.optimizer
    assert (resumed.learning_rate, resumed.warmup_steps) == (rate, 0)
    config.total_steps = 2
    assert train(config) is not None  # it is finished
    explicit = dataclasses.replace(config, optimizer=Optimizer(rate, warmup_steps=0))
    assert train(explicit) is not None
