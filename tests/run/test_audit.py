"""Audits of runs: what another verifier finds, and when it is an alarm."""

import json
import pathlib
import shutil
import zlib

import jax
import numpy as np
import pytest
from command_lines import run_shown
from reports import response
from small_runs import make_quick_config

from dapo_jax.config.experiment import Log, Reward, Rollout
from dapo_jax.reporting.scores import estimates, rate
from dapo_jax.run.audit import answer_kind, exceeds, make_rates
from dapo_jax.run.run import train

MEASUREMENTS = pathlib.Path(__file__).parents[2] / "notebooks/measurements"
LIMIT = 0.02  # the command's default
OWN = """
import zlib

def is_right(response, answer):
    end = response.rpartition("####")[2]
    return "####" in response and end.strip().isdigit() and int(end) == int(answer)

def lenient(prompt, response, answer):
    return is_right(response, answer) or zlib.crc32(response.encode()) % 20 == 0

async def judge(prompt, response, answer):
    return float(is_right(response, answer))

def grouped(prompt, responses, answer, lengths, correct):
    return correct

def hangs(prompt, response, answer):
    while response == "hang":
        pass
    return 1.0

def pieces(prompt, response, answer, tokens, tests): return 1.0

def broken(prompt, response, answer): raise RuntimeError("no judge")
"""


@pytest.fixture(scope="module")
def recorded(base, tmp_path_factory):
    """The folder of a run on sums, verified by `final_number`."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    devices = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices(*args)[:1])
        rollout = Rollout(prompts_per_step=8, samples_per_prompt=8, updates_per_rollout=1)
        log = Log(0, tensorboard=False, report=False)
        train(make_quick_config(base, folder, total_steps=3, rollout=rollout, log=log))
    return folder


@pytest.fixture
def audit(monkeypatch, capsys, write_module):
    write_module("mine", OWN)

    def call(folder, *flags) -> tuple[int, dict, str]:
        code, shown, error = run_shown("audit", [str(folder), *flags], monkeypatch, capsys)
        path = pathlib.Path(folder, "audit.json")
        return code, json.loads(path.read_text()) if code < 2 else {}, shown + error

    return call


@pytest.mark.parametrize("verifier", ["final_number", "mine:judge", "mine:grouped"])
def test_a_run_agrees_with_its_own_verifier(recorded, audit, verifier):
    code, record, shown = audit(recorded, f"--verifier={verifier}")
    rates = record["rates"]["all"]
    assert code == 0 and rates["agreement"]["value"] == 1 and not record["disagreements"]
    assert rates["false_positives"]["value"] == rates["false_negatives"]["value"] == 0
    lines = [path.read_text().splitlines() for path in (recorded / "rollouts").iterdir()]
    assert rates["responses"] == sum(map(len, lines)) > 200
    assert record["rates"]["integer"] == rates and "1.000 [0.8" in shown
    assert record["recorded_verifier"] == "final_number" and "not above" in shown


def test_a_verifier_that_accepts_wrong_answers_is_an_alarm(recorded, audit):
    code, record, shown = audit(recorded, "--verifier=mine:lenient")
    false_negatives = record["rates"]["all"]["false_negatives"]
    assert code == 1 and false_negatives["low"] > LIMIT and "above" in shown
    assert all(not row["correct"] and row["audited"] for row in record["disagreements"])


def test_a_run_whose_verifier_accepted_wrong_answers_is_an_alarm(recorded, audit, tmp_path):
    folder = tmp_path / "lenient"
    shutil.copytree(recorded, folder)
    accepted = wrong = 0
    for path in sorted((folder / "rollouts").iterdir()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            wrong += not row["correct"]
            if not row["correct"] and zlib.crc32(f"{path.name}{number}".encode()) % 20 == 0:
                row |= {"correct": True, "reward": 1 + number / 1000}
                accepted += 1
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, record, shown = audit(folder, "--verifier=final_number")
    rates = record["rates"]["all"]
    assert code == 1 and rates["false_positives"]["value"] == pytest.approx(accepted / wrong)
    assert 0.03 < accepted / wrong < 0.08 and rates["false_negatives"]["value"] == 0
    rewards = [row["reward"] for row in record["disagreements"]]
    assert rewards == sorted(rewards, reverse=True) and 0 < len(rewards) <= 20
    assert "recorded correct, audited incorrect" in shown
    code, record, _ = audit(folder, "--verifier=final_number", "--max_disagreement=0.2")
    assert code == 0 and record["rates"]["all"] == rates
    _, record, _ = audit(folder, "--verifier=final_number", "--max_steps=1")
    assert record["rates"]["all"]["responses"] < rates["responses"]


def test_a_response_that_hangs_the_verifier_is_left_out(write_run, audit):
    lines = [response(i, 0, response="hang" if i == 7 else "so 2") for i in range(30)]
    folder = write_run("run", rollouts=[(1, lines)])
    code, record, _ = audit(folder, "--verifier=mine:hangs", "--timeout_seconds=3")
    assert code == 0 and record["failed"] == 1 and record["rates"]["all"]["responses"] == 29


GOOD = json.dumps(response(0, 0)) + "\n"


@pytest.mark.parametrize(("text", "flags", "message"), [
    ("spread", [], "must be a run whose rewards are verdicts: its reward.correct is 'spread'"),
    (None, [], "a run with recorded responses in rollouts/"),
    ("", [], "step_000001.jsonl: is empty: must have a line per response"),
    (GOOD + GOOD[:30], [], "line 2 has no 'index' of type int: must be a recorded response"),
    (GOOD.replace("false", "0").replace("true", "1"), [], "line 1 has no 'correct' of type bool"),
    (GOOD, ["--verifier=mathematics"], "config.verifier = 'mathematics': must be final_number, "),
    (GOOD, ["--verifier=mine:nothing"], "config.verifier = 'mine:nothing': AttributeError"),
    (GOOD, ["--verifier=mine:pieces"], "a function that does not take tests, tokens: rollouts/"),
    (GOOD, ["--verifier=mine:broken"], "it failed on 1 responses: mine:broken: "),
    (GOOD, ["--max_disagreement=1"], "config.max_disagreement = 1.0: must be"),
    (GOOD.replace('"2"}', '"2", "failure": "late"}'), [], "a run with verdicts; all of its own"),
])  # fmt: skip
def test_an_audit_that_is_impossible_is_one_line(text, flags, message, write_run, audit):
    folder = write_run("run", reward=Reward(correct="verifier" if text != "spread" else text))
    if text is not None:
        pathlib.Path(folder, "rollouts/step_000001.jsonl").write_text(text)
    code, _, error = audit(folder, *flags)
    assert code == 2 and message in error and error.count("\n") == 1, error


def simulate(path: pathlib.Path, error_rate: float) -> dict:
    """Return the rates of an audit of a measured run; half of the errors hit whole problems."""
    run, rng = json.loads(path.read_text()), np.random.default_rng(zlib.crc32(path.name.encode()))
    steps, is_dynamic = run["steps"], run["settings"].get("algorithm.dynamic_sampling", True)
    kept = np.array(steps["kept_fraction"]) if is_dynamic else 1.0
    groups = np.round(np.array(steps["trained_groups"]) / kept).astype(int)
    accuracy = np.repeat(np.clip(steps["accuracy"], 0.001, 0.999), groups)
    audited = rng.random((len(accuracy), 8)) < rng.beta(accuracy, 1 - accuracy)[:, None]
    errors = rng.random((len(accuracy), 1)) < error_rate / 2
    errors = errors | (rng.random(audited.shape) < error_rate / 2)
    problems = np.repeat(np.arange(len(accuracy)), 8)
    return make_rates(problems, (audited ^ errors).ravel(), audited.ravel())


def test_chance_is_no_alarm_in_all_measured_runs():
    paths = sorted(MEASUREMENTS.glob("*.json"))
    honest = [simulate(path, LIMIT / 2) for path in paths]
    assert len(paths) == 148 and sum(exceeds(rates, LIMIT) for rates in honest) <= 1
    assert sum(exceeds(simulate(path, 0.05), LIMIT) for path in paths[::15]) == 10


def test_the_interval_is_that_of_resampled_problems():
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 9, 300)
    hits = rng.binomial(sizes, rng.beta(0.2, 2, 300))
    (expected,) = estimates((hits / sizes.clip(1))[sizes > 0, None], sizes[sizes > 0], seed=1)
    result = rate(hits, sizes)
    for name in ("value", "low", "high"):
        np.testing.assert_allclose(getattr(result, name), getattr(expected, name), rtol=0.05)
    assert rate(sizes, np.zeros(300)) is None and rate(sizes[:1], sizes[:1] + 1).low is None


def test_answers_have_kinds():
    kinds = {"-1,200": "integer", r"\frac{1}{2}": "fraction", r"\sqrt{2}": "expression"}
    kinds |= {"1, 2": "list", "(1,2)": "tuple", "": "unreadable"}
    assert {gold: answer_kind(gold) for gold in kinds} == kinds
