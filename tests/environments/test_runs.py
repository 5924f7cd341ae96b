"""Whole runs in environments: files, evaluations, the Python API, and what silence changes."""

import dataclasses
import json
import pathlib
import re

import jax
import pytest
from conftest import first_devices
from row_files import read_table
from small_runs import equal, make_quick_config, open_run, read_rollouts, read_rows

from dapo_jax.config.experiment import Data, Environment, Log, Reward, Rollout, Sampler
from dapo_jax.run.evaluate import evaluate
from dapo_jax.run.loop import train
from dapo_jax.types.errors import ConfigError

STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def first_device():
    with first_devices():
        yield


def make_game(base, run_dir, **changes):
    fields = {
        "environment": Environment(name="guessing", max_turns=3, max_observation_tokens=4),
        "reward": Reward(parts="environment=1", correct="spread"),
        "data": Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=8),
        "log": Log(0, tensorboard=False, report=False),
    }
    return dataclasses.replace(make_quick_config(base, run_dir), **fields | changes)


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


def test_a_run_goes_on_in_its_environment_alone(base, played):
    other = make_game(base, played[0], total_steps=STEPS + 1, environment=Environment())
    other = dataclasses.replace(other, reward=Reward())
    with pytest.raises(ConfigError, match="environment.name"):
        train(other)


# --- an environment that says nothing ------------------------------------------------------------

SILENT = """
class Silent:
    def step(self, text):
        return None
"""


def learned(run_dir) -> list[dict]:
    """Rows of metrics without those of turns."""
    rows = read_rows(run_dir)
    return [{k: v for k, v in x.items() if not k.startswith("environment_")} for x in rows]


def responses(run_dir) -> list[dict]:
    """Responses that steps used; in an environment they also say that no step gave a reward."""
    texts = read_rollouts(run_dir).values()
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    lines = [line for line in lines if not line["surplus"]]
    for line in lines:
        assert not any(line.pop("environment_rewards", []) + line.pop("turns", []))
    return lines


def test_silence_changes_no_bit_of_a_run(base, tmp_path, write_module):
    write_module("silence", SILENT)
    states = []
    for run_dir, environment in (
        (tmp_path / "alone", Environment()),
        (tmp_path / "asked", Environment("silence:Silent", workers=1)),
    ):
        config = make_quick_config(
            base,
            run_dir,
            total_steps=2,
            environment=environment,
            rollout=Rollout(4, 4, updates_per_rollout=2, max_sample_rounds=1),
            # Prompts one by one: what is prefilled beside them may round their log-probs otherwise.
            sampler=Sampler(16, max_response_tokens=24, cache="paged", prefill_prompts=1),
            log=Log(0, tensorboard=False, report=False),
        )
        with open_run(config) as run:
            run.begin()
            while run.state.step < config.total_steps:
                run.step()
            run.finish()
            states.append(jax.device_get(run.state.learners.policy))
    assert equal(*states)
    assert learned(tmp_path / "alone") == learned(tmp_path / "asked")
    assert responses(tmp_path / "alone") == responses(tmp_path / "asked")
    rows = read_rows(tmp_path / "asked")
    assert all(row["environment_turns"] > 0 for row in rows)


# --- the program of the page ---------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parents[2]
SMALLER = dict(read_table(__file__, "smaller"))


@pytest.mark.slow
def test_the_program_runs_in_forty_lines(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs/environments.md").read_text()
    (program,) = re.findall(r"```python\n(import re\n.*?)```", text, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 42
    for old, new in SMALLER.items():
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    exec(compile(program, "environments.py", "exec"), scope)
    assert scope["answer"].tokens.size
    assert "step 1/1" in capsys.readouterr().out
