"""The evaluate command: output, resumption, rejection and stop."""

import json
import signal
import sys
from unittest import mock

import forked
import numpy as np
import pytest
from conftest import first_devices
from small_runs import PROBLEMS, ROOT, SAMPLES, make_evaluation, run_evaluation

from dapo_jax.commands.evaluate import main
from dapo_jax.config.experiment import Data, Environment, Evaluation
from dapo_jax.run.evaluate import ResponseFile
from dapo_jax.types.errors import ConfigError


def out(run_dir, name="responses.jsonl") -> str:
    (path,) = (run_dir / "evaluations").glob(f"*/{name}")
    return path.read_text()


def assert_same(run_dir, found, whole) -> None:
    """The same lines and scores; log-probs up to the rounding of another batch."""
    expected_dir, expected = whole
    lines, expected_lines = (
        [json.loads(line) for line in out(folder).splitlines()]
        for folder in (run_dir, expected_dir)
    )
    logprobs, expected_logprobs = (
        [line.pop("logprob") for line in some] for some in (lines, expected_lines)
    )
    assert lines == expected_lines
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-3)
    entropy = pytest.approx(expected["heldout_entropy"], abs=1e-3)
    assert found == expected | {"heldout_entropy": entropy}


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """An uninterrupted evaluation: its folder and its scores."""
    run_dir = tmp_path_factory.mktemp("whole")
    with first_devices():
        return run_dir, run_evaluation(make_evaluation(base, run_dir))


def test_evaluation_writes_a_line_per_response_and_a_report(whole, base):
    run_dir, found = whole
    lines = [json.loads(line) for line in out(run_dir).splitlines()]
    places = [(line["index"], line["sample"]) for line in lines]
    assert places == [(i, j) for i in range(PROBLEMS) for j in range(SAMPLES)]
    assert np.mean([line["correct"] for line in lines]) == found["heldout_accuracy"]
    first = lines[0]
    assert first["policy"] == str(base) and first["top_p"] == 0.9 and first["seed"] == 0
    assert first["correct"] == (first["extracted"] == first["answer"])
    report = json.loads(out(run_dir, "report.json"))
    assert report["accuracy"]["value"] == found["heldout_accuracy"]
    assert report["accuracy"]["low"] == found["heldout_accuracy_low"] < found["heldout_accuracy"]
    assert list(report["pass_at_k"]) == ["1", "2", "4"]
    reward = np.mean([line["reward"] for line in lines])
    assert report["reward"]["value"] == found["heldout_reward"] == pytest.approx(reward)
    assert found["heldout_reward_low"] < reward < found["heldout_reward_high"]


ENDED = """
import dataclasses, json, os, signal, sys
from conftest import first_devices
from small_runs import make_evaluation
from dapo_jax.commands.evaluate import main
from dapo_jax.run.evaluate import ResponseFile
append = ResponseFile.append
def append_and_end(self, response):
    append(self, response)
    if len(self.responses) == 40:
        if NAME == "SIGKILL":
            self.path.open('a').write('{"problem": "cut o')
        os.kill(os.getpid(), getattr(signal, NAME))
ResponseFile.append = append_and_end
BASE, RUN_DIR, NAME = sys.argv[1:]
with open(RUN_DIR + "_config.json", "w") as file:
    json.dump(dataclasses.asdict(make_evaluation(BASE, RUN_DIR)), file)
sys.argv = ["dapo-jax evaluate", RUN_DIR + "_config.json", "--model=" + BASE]
with first_devices():
    sys.exit(main())
"""


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_an_evaluation_that_was_ended_goes_on_to_what_an_uninterrupted_one_gives(
    name, whole, base, tmp_path, alone, capsys
):
    ended = forked.run(ENDED, base, tmp_path, name)
    if name == "SIGKILL":
        assert ended.returncode == -signal.SIGKILL
        count = len(out(tmp_path).splitlines()) - 1
        assert count == 40
    else:
        assert ended.returncode == 128 + signal.SIGINT
        assert "stopped by SIGINT" in ended.stdout
        assert "The same command resumes" in ended.stdout
        count = len(out(tmp_path).splitlines())
        assert 40 <= count < PROBLEMS * SAMPLES
    assert_same(tmp_path, run_evaluation(make_evaluation(base, tmp_path)), whole)
    text = f"{count} of {PROBLEMS * SAMPLES} responses are there already"
    assert text in capsys.readouterr().out


def test_a_larger_k_samples_only_what_is_missing(whole, base, tmp_path, alone, monkeypatch):
    run_evaluation(make_evaluation(base, tmp_path, samples=2))
    new, append = [], ResponseFile.append
    monkeypatch.setattr(
        ResponseFile,
        "append",
        lambda self, response: (new.append(response.sample), append(self, response)),
    )
    assert_same(tmp_path, run_evaluation(make_evaluation(base, tmp_path)), whole)
    assert sorted(new) == sorted([2, 3, 4, 5] * PROBLEMS)
    fewer = run_evaluation(make_evaluation(base, tmp_path, samples=3))
    assert fewer["samples_per_problem"] == 3 and len(new) == 4 * PROBLEMS


def test_other_settings_are_rejected_and_nothing_is_lost(whole, base, tiny_folder, tmp_path, alone):
    folder = next((whole[0] / "evaluations").iterdir())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    into = Evaluation(samples_per_problem=SAMPLES, top_p=0.8, out=str(folder))
    with pytest.raises(ConfigError, match="(?s)--out.*evaluation.top_p: 0.8.* begun with 0.9"):
        run_evaluation(make_evaluation(base, tmp_path, evaluation=into))
    into = Evaluation(samples_per_problem=SAMPLES, top_p=0.9, out=str(folder))
    with pytest.raises(ConfigError, match="policy_digest"):
        run_evaluation(make_evaluation(tiny_folder, tmp_path, evaluation=into))
    tool = Environment(name="calculator", max_turns=3, max_observation_tokens=4)
    with pytest.raises(ConfigError, match="environment.name: 'calculator'.* begun with ''"):
        run_evaluation(make_evaluation(base, tmp_path, evaluation=into, environment=tool))
    problems = Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=PROBLEMS - 1)
    with pytest.raises(ConfigError, match="problems: 11.* begun with 12"):
        run_evaluation(make_evaluation(base, tmp_path, evaluation=into, data=problems))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def run_command(*arguments) -> int:
    with mock.patch.object(sys, "argv", ["evaluate", *map(str, arguments)]):
        return main()


def test_a_run_folder_without_a_checkpoint_is_an_error(base, tmp_path, capsys):
    flags = f"--config.run_dir={tmp_path}", f"--config.model.folder={base}"
    assert run_command(f"--config={ROOT}/configs/arithmetic.py", *flags) == 2
    output = f"config.run_dir = '{tmp_path}': holds no checkpoint to evaluate; --model=FOLDER"
    assert output in capsys.readouterr().err and not list(tmp_path.iterdir())
