"""Whole runs on rewards of several parts: a failing function costs groups, not the run."""

import collections
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

from dapo_jax.config.experiment import Checkpoint, Log, Reward, Rollout
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rollout import dynamic_sampling
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.checkpointing.rollout_journal import FOLDER
from dapo_jax.run.evaluation import check_scored, make_responses, report_on
from dapo_jax.run.run import train
from dapo_jax.run.step_record import trace
from dapo_jax.types.structs import Failure, Group, Outcome

OWN = """
import os, random, time

def picky(prompt, response, answer):
    if response.endswith("7"):
        raise RuntimeError("seven is not for me")
    return len(response)

def broken(prompt, response, answer):
    return {}["no such key"]

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
    judged = [
        line
        for line in lines
        if not (line["index"] in broken or line["surplus"] or line["failure"])
    ]
    for name in names:
        mean = np.mean([line["reward_parts"][name] for line in judged])
        np.testing.assert_allclose(row[f"reward_parts/{name}"], mean)
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


@pytest.mark.slow
def test_a_run_in_which_every_group_fails_is_saved_and_stops_with_the_cause(
    base, write_module, alone, tmp_path
):
    write_module("own", OWN)
    config = make_quick_config(
        base,
        tmp_path,
        reward=Reward(parts="rule=1,own:broken=1"),
        rollout=Rollout(4, 4, updates_per_rollout=1, max_sample_rounds=2),
    )
    with pytest.raises(
        Starved, match="failed in every group, first: user_error: own:broken: .*KeyError.*prompt"
    ):
        train(config)
    checkpoints = Checkpoints(tmp_path, Checkpoint())
    assert checkpoints.latest_step() == 0
    checkpoints.close()


class Killed(BaseException):
    """Stands for a SIGKILL, which leaves no time to save."""


@pytest.mark.slow
def test_rewards_of_groups_and_tokens_train_and_resume_with_the_same_bits_however_long_they_take(
    tiny_folder, score_folder, write_module, alone, tmp_path, monkeypatch
):
    write_module("own", OWN)
    parts = "own:shortest=0.5,own:places=1,own:digits=0.3,repetition=0.1"

    def make(name: str, preset="reinforce_pp"):
        reward = Reward(parts=parts, correct="spread", min_spread=0.01)
        log = Log(tensorboard=False, report=False)
        folders = tiny_folder, score_folder, tmp_path / name
        config = make_kept("plain", *folders, preset=preset, reward=reward, log=log)
        config.rollout.reward_bursts = 0
        return config

    train(make("whole"))
    monkeypatch.setenv("SLOWEST", "0.3")
    read = dynamic_sampling.Collection.read_verdicts

    def stop_or_read(self, judge, wait):
        if len(self._scored) >= 3:
            raise Killed
        read(self, judge, wait)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(dynamic_sampling.Collection, "read_verdicts", stop_or_read)
        train(make("run"))
    assert list((tmp_path / "run" / FOLDER).rglob("*.groups"))
    monkeypatch.setenv("SLOWEST", "0.03")
    train(make("run"))
    assert differing(tmp_path / "run", tmp_path / "whole") == []
    kept = [[row["kept_fraction"] for row in read_rows(tmp_path / n)] for n in ("run", "whole")]
    assert kept[0] == kept[1]
    files = [read_rollouts(tmp_path / name) for name in ("run", "whole")]
    assert len(files[1]) == 2
    for name, text in files[1].items():
        lines, again = (
            [json.loads(line) for line in file.splitlines()] for file in (text, files[0][name])
        )
        trained = [line for line in lines if not line["surplus"]]
        assert trained == [line for line in again if not line["surplus"]]
        for line in trained:
            of_parts, own = line["reward_parts"], line["token_rewards"]
            assert line["failure"] is None and len(own) == line["tokens"]
            of_tokens = of_parts["own:places"] + of_parts["own:digits"]
            np.testing.assert_allclose(sum(own), of_tokens, atol=1e-12)
            np.testing.assert_allclose(line["reward"], sum(of_parts.values()), atol=1e-12)
            digits = [int(c) for c in line["response"] if c.isdigit()]
            np.testing.assert_allclose(of_parts["own:digits"], 0.3 * sum(digits) / 9, atol=1e-12)
        for group in {line["index"] for line in trained}:
            mine = [line for line in trained if line["index"] == group]
            least = min(line["tokens"] for line in mine)
            assert [line["reward_parts"]["own:shortest"] for line in mine] == [
                0.5 * (line["tokens"] == least) for line in mine
            ]
    for row in read_rows(tmp_path / "whole"):
        assert {f"reward_parts/{part.partition('=')[0]}" for part in parts.split(",")} <= set(row)
