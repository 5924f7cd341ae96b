"""Whole runs in environments: the files that they leave, evaluations, and the Python API."""

import dataclasses
import json

import pytest
from small_runs import make_config, read_rollouts, read_rows

import dapo_jax
from dapo_jax.config.experiment import Environment, Reward
from dapo_jax.data.arithmetic import make_problem
from dapo_jax.environments.builtin import Guessing
from dapo_jax.run.evaluation import evaluate
from dapo_jax.run.run import train
from dapo_jax.runtime.settings import ConfigError

STEPS = 2


def make_game(base, run_dir, **changes):
    config = make_config(base, run_dir)
    fields = {
        "total_steps": STEPS,
        "environment": Environment(name="guessing", max_turns=3, max_observation_tokens=4),
        "reward": Reward(parts="environment=1", correct="spread"),
    }
    return dataclasses.replace(config, **fields | changes)


@pytest.fixture(scope="module")
def played(base, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("played")
    return run_dir, train(make_game(base, run_dir))


def test_a_run_shows_its_trajectories_by_turns(played):
    run_dir, summary = played
    assert list(summary)[1:3] == ["heldout_reward_before", "heldout_reward_after"]
    rows = read_rows(run_dir)
    assert summary["steps"] == STEPS
    assert all(row["environment_turns"] > 0 for row in rows[1:])
    assert sum(row["environment_observation_tokens"] for row in rows[1:]) > 0
    lines = [json.loads(x) for x in read_rollouts(run_dir)["step_000001.jsonl"].splitlines()]
    several = [line for line in lines if line.get("turns")]
    assert several and all(line["prompt"] == "=" for line in lines)
    for line in several:
        speakers = [speaker for speaker, _, _ in line["turns"]]
        assert speakers == ["policy", "environment"] * (len(speakers) // 2) + ["policy"]
        assert line["response"] == line["turns"][-1][2]
        assert {text for who, _, text in line["turns"] if who == "environment"} <= {"+=", ",="}
        drawn = sum(tokens for who, tokens, _ in line["turns"] if who == "policy")
        assert line["tokens"] == drawn
        assert line["reward_parts"]["environment"] == sum(line["environment_rewards"])
    assert any(line["reward"] > 0 for line in lines)


def test_the_report_page_shows_turns(played, tmp_path):
    page = tmp_path / "report.html"
    dapo_jax.report(played[0], out=page)
    assert '"turns":[[' in page.read_text().replace(" ", "")


def test_an_evaluation_plays_whole_trajectories(base, played):
    scores = evaluate(make_game(base, played[0]), from_folder=False)
    assert 0 <= scores["heldout_accuracy"] <= 1
    (path,) = (played[0] / "evaluations").glob("*/responses.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    several = [one for one in found if "turns" in one]
    drawn = [sum(who == "policy" for who, _, _ in one["turns"]) for one in several]
    assert several and min(drawn) > 1
    assert all(one["turns"][-1][2] == one["response"] for one in several)
    turns = sum(drawn) + len(found) - len(several)
    assert scores["heldout_turns"] == pytest.approx(turns / len(found))
    lines = (played[0] / f"evaluations/step_{STEPS:06d}.jsonl").read_text().splitlines()
    assert any("turns" in json.loads(line) for line in lines)  # those of training's evaluation


def find_secret(game: Guessing) -> int:
    return next(number for number in range(10) if game.step(str(number)).done)


def test_numbers_of_the_game_are_alike_in_training_and_held_out():
    def share_even(split):
        games = [Guessing() for _ in range(400)]
        for number, game in enumerate(games):
            game.reset(make_problem(split, 0, number, 2, 8))
        return sum(find_secret(game) % 2 == 0 for game in games) / len(games)

    assert all(0.3 < share_even(split) < 0.7 for split in ("train", "heldout"))


def test_a_run_goes_on_in_its_environment_alone(base, played):
    other = make_game(base, played[0], total_steps=STEPS + 1, environment=Environment())
    other = dataclasses.replace(other, reward=Reward())
    with pytest.raises(ConfigError, match="environment.name"):
        train(other)
