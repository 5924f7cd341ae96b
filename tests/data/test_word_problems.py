"""Generated word problems: right answers, held-out ones apart, and a supervised run on them."""

import re
import subprocess
import sys

import pytest

from dapo_jax.commands import train as train_command
from dapo_jax.config.experiment import Config, Model
from dapo_jax.extras.words import NUMBERS, make_problem, make_word_problem
from dapo_jax.types.errors import ConfigError


@pytest.mark.parametrize("source", NUMBERS)
def test_calculations_are_right_and_lead_to_the_answer(source):
    kinds = set()
    for index in range(400):
        problem = make_word_problem(source, "train", 0, index)
        for text, result in problem.steps:
            assert eval(text.replace("/", "//")) == result >= 0  # of digits and one sign
            kinds.add(text.strip("0123456789"))
        assert problem.answer == str(problem.steps[-1][1])
        assert re.match(r"\d+", problem.steps[0][0])[0] in re.findall(r"\d+", problem.text)
    assert kinds == {"+", "-", "*", "/"}


def test_problems_are_keyed_and_held_out_ones_share_no_text():
    def texts_of(split, seed=1):
        problems = (make_word_problem("word_problems", split, seed, i) for i in range(300))
        return [problem.text for problem in problems]

    texts = {split: texts_of(split) for split in ("train", "heldout", "examples")}
    assert texts["train"] == texts_of("train") != texts_of("train", seed=2)
    assert not {*texts["heldout"]} & {*texts["train"], *texts["examples"]}
    problem = make_problem("word_problems", "heldout", 1, 7)
    assert (problem.text, problem.source) == (texts["heldout"][7], "word_problems")


@pytest.mark.parametrize(("code", "starts"), [(0, True), (130, False)])
def test_a_missing_base_is_made_first_and_its_exit_code_ends_the_command(
    code, starts, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    commands = []
    monkeypatch.setattr(subprocess, "call", lambda command: commands.append(command) or code)
    config = Config(run_dir="runs/new", model=Model(folder="runs/calculator_base"))
    if starts:
        train_command.make_base(config)
    else:
        with pytest.raises(SystemExit) as stopped:
            train_command.make_base(config)
        assert stopped.value.code == code
    assert commands == [[sys.executable, "-m", "dapo_jax", "sft", "calculator_base"]]
    assert "first stage, dapo-jax sft calculator_base" in capsys.readouterr().out
    (tmp_path / "runs/calculator_base").mkdir(parents=True)
    train_command.make_base(config)  # it is there now
    config.model.folder = "runs/other"
    train_command.make_base(config)  # no packaged config makes it
    config.model.folder, config.data.source = "runs/arithmetic_sft", "nowhere"
    with pytest.raises(ConfigError, match="nowhere"):  # before the first stage takes minutes
        train_command.check_run(config)
    assert len(commands) == 1
