"""Whole runs on rewards of several parts: a failing function costs groups, not the run."""

import collections
import contextlib
import dataclasses
import json
import re

import numpy as np
import pytest
from kept_groups import differing, make_kept
from small_runs import (
    equal,
    make_groups,
    make_quick_config,
    open_run,
    read_rollouts,
    read_rows,
    start,
    step_on,
)

from dapo_jax.config.experiment import Log, Reward
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rollout import dynamic_sampling
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.run.heldout import check_scored, report_on
from dapo_jax.run.loop import train
from dapo_jax.run.metrics import trace
from dapo_jax.run.sinks import make_responses
from dapo_jax.run.store import JOURNAL
from dapo_jax.types.structs import Failure, Group, Outcome

OWN = """
import os, random, time

def picky(prompt, response, answer):
    if response.endswith("7"):
        raise RuntimeError("seven is not for me")
    return len(response)

def shortest(prompt, responses, answer, lengths, correct):
    return [float(n == min(lengths)) for n in lengths]

def places(prompt, response, answer, tokens):
    time.sleep(random.random() * float(os.environ.get("SLOWEST", 0)))
    return [len(token) * (-1) ** i / 7 for i, token in enumerate(tokens)]

def digits(prompt, response, answer):
    return [(i, i + 1, int(c) / 9) for i, c in enumerate(response) if c.isdigit()]
"""


def test_a_run_goes_on_without_the_responses_whose_reward_failed(
    base, score_folder, write_module, alone, tmp_path, capsys
):
    write_module("own", OWN)
    parts = "rule=1,own:picky=0.1,model=0.2,repetition=1"
    config = make_quick_config(
        base,
        tmp_path,
        updates=1,
        total_steps=1,
        reward=Reward(parts=parts, model_folder=str(score_folder), workers=2),
        log=Log(tensorboard=False),
    )
    with open_run(config) as run:
        run.step()
    row = read_rows(tmp_path)[-1]
    assert row["outcomes/user_error"] > 0 and row["trained_groups"] == 4 and not row["starved"]
    assert None not in row.values()
    lines = [json.loads(line) for line in read_rollouts(tmp_path)["step_000001.jsonl"].splitlines()]
    failed = [line for line in lines if line["failure"]]
    assert len(failed) == row["outcomes/user_error"] == row["failed_rewards"] * len(lines)
    names = ["rule", "own:picky", "model", "repetition", "overlong"]
    for line in lines:
        sevens = line["response"].endswith("7")
        assert (line["reward"] is None) == sevens == (line["failure"] is not None)
        assert sevens == (line["outcome"] == "user_error") == (line["correct"] is None)
        if not sevens:
            assert list(line["reward_parts"]) == names
            np.testing.assert_allclose(
                line["reward_parts"]["own:picky"], len(line["response"]) / 10
            )
            np.testing.assert_allclose(line["reward"], sum(line["reward_parts"].values()))
    sizes = collections.Counter(line["index"] for line in lines if not line["failure"])
    broken = {line["index"] for line in lines if sizes[line["index"]] < 2}
    assert len(broken) == row["broken_groups"]
    shown = capsys.readouterr().out
    assert re.search(r"step 1: a (reward failed|group was dropped): user_error: own:picky: ", shown)
    assert f"step 1: responses had no reward: outcomes/user_error {len(failed)}" in shown
    assert 'raise RuntimeError("seven is not for me"): RuntimeError: seven is not for me' in shown
    assert f"prompt {next(line['prompt_id'] for line in lines if line['failure'])}" in shown


LOST = Failure(Outcome.CRASH, "the worker died")


def without_last(config, group: Group, count: int) -> tuple[Group, Group]:
    """The group with failed rewards of its last responses, and without these responses."""
    verdicts = [
        dataclasses.replace(verdict, failure=LOST if i >= count else None)
        for i, verdict in enumerate(group.verdicts)
    ]
    failed = reward_group(config, group.prompt, group.completions, tuple(verdicts))
    alone = reward_group(config, group.prompt, group.completions[:count], group.verdicts[:count])
    return failed, alone


def test_a_step_updates_parameters_as_without_the_failed_responses(tiny_folder, alone, tmp_path):
    config = make_quick_config(tiny_folder, tmp_path, updates=2)
    pairs = [without_last(config, g, 4 - i % 3) for i, g in enumerate(make_groups(config))]
    failed, rest = zip(*pairs, strict=True)
    assert [len(group.failed) for group in failed] == [0, 1, 2, 0]
    with open_run(config) as run:
        parts = run.components
        after, record = step_on(parts, start(parts), list(failed))
        expected, _ = step_on(parts, start(parts), list(rest))
        whole, _ = step_on(parts, start(parts), make_groups(config))
    policy = after.learners.policy.params
    assert equal(policy, expected.learners.policy.params)
    assert not equal(policy, whole.learners.policy.params)
    traces = trace(config, record)
    assert [len(traces[group.prompt.index]) for group in failed] == [4, 3, 2, 4]


def test_an_evaluation_leaves_failed_rewards_out_and_stops_if_all_failed(tiny_folder, tmp_path):
    config = make_quick_config(tiny_folder, tmp_path)
    first, second, *_ = make_groups(config)
    groups = without_last(config, first, 1)[0], without_last(config, second, 4)[0]
    responses = [response for group in groups for response in make_responses(group)]
    assert [response.outcome for response in responses[:4]] == ["right", *["crash"] * 3]
    report = report_on(responses, config)
    assert report.failed_rewards == {"crash": 3} and report.responses == 5
    assert report.accuracy.value == 3 / 5
    check_scored(responses)
    with pytest.raises(Starved, match="every held-out response, first: the worker died"):
        check_scored(responses[1:4])


class Killed(BaseException):
    """Stands for a SIGKILL, which leaves no time to save."""


@pytest.mark.slow
@pytest.mark.parametrize("carry_over", ["none", "unfinished"])
def test_rewards_train_and_resume_with_the_same_bits_however_long_they_take(
    carry_over, tiny_folder, score_folder, write_module, alone, tmp_path, monkeypatch
):
    write_module("own", OWN)
    parts = "own:shortest=0.5,own:places=1,own:digits=0.3,repetition=0.1"

    def run(name: str, slowest: float, burst: int = 0) -> None:
        """Train with rewards of up to so many seconds; be killed after a number of groups."""
        monkeypatch.setenv("SLOWEST", str(slowest))
        read = dynamic_sampling.Collection.read_verdicts

        def read_or_die(self, judge, wait):
            if burst and len(self._scored) >= burst:
                raise Killed
            return read(self, judge, wait)

        monkeypatch.setattr(dynamic_sampling.Collection, "read_verdicts", read_or_die)
        reward = Reward(parts=parts, correct="spread", min_spread=0.01, workers=8)
        log = Log(tensorboard=False, report=False)
        folders = tiny_folder, score_folder, tmp_path / name
        config = make_kept("plain", *folders, preset="reinforce_pp", reward=reward, log=log)
        config.rollout.carry_over = carry_over
        config.checkpoint.keep_groups = carry_over == "none"
        config.total_steps = 2
        with contextlib.suppress(Killed):
            train(config)
        monkeypatch.setattr(dynamic_sampling.Collection, "read_verdicts", read)

    run("whole", 0.0)
    for i, slowest in enumerate((0.3, 3.0)):
        run(f"run{i}", slowest, burst=3)
        if carry_over == "none":
            assert list((tmp_path / f"run{i}" / JOURNAL).rglob("*.groups"))
        run(f"run{i}", slowest)
        assert differing(tmp_path / f"run{i}", tmp_path / "whole") == []
        names = f"run{i}", "whole"
        kept = [[row["kept_fraction"] for row in read_rows(tmp_path / name)] for name in names]
        assert kept[0] == kept[1]
        files = [read_rollouts(tmp_path / name) for name in names]
        lines = [[json.loads(x) for own in f.values() for x in own.splitlines()] for f in files]
        trained, others = ([line for line in own if not line["surplus"]] for own in lines)
        assert trained == others
    for line in trained:
        rewards, own = line["reward_parts"], line["token_rewards"]
        assert line["failure"] is None and len(own) == line["tokens"]
        np.testing.assert_allclose(sum(own), rewards["own:places"] + rewards["own:digits"])
        np.testing.assert_allclose(line["reward"], sum(rewards.values()), atol=1e-12)
