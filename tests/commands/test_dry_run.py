"""`dapo-jax train --dry-run`: what a run would see, without weights, compilation or files."""

import json
import re

import pytest
from command_lines import ROOT, run_shown
from row_files import read_table

from dapo_jax.extras.math.plugin import FORMS, in_form, read_gold
from dapo_jax.extras.math.verifier import VERIFIERS, Settings, make_verifier
from dapo_jax.model import load_huggingface

ROWS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]
REWARDS = """\
import os, pathlib

def long(prompt, response, answer):
    return len(response) / 100

def elsewhere(prompt, response, answer):
    return float(os.getpid() == int(pathlib.Path("pid").read_text()))

def fails(prompt, response, answer):
    return 1 / 0

def fails_on_nothing(prompt, response, answer):
    return float(response[0] == "#")

class Hints:
    def step(self, text):
        from dapo_jax import Observation
        if text[0] == "#":
            return Observation(reward=2.0, done=True)
        return Observation(f"{len(text)} without its mark", reward=-0.5)

class Broken:
    def step(self, text):
        return {}["missing"]
"""


@pytest.fixture
def dry_run(tmp_path, byte_folder, alone, monkeypatch, capsys, write_module):
    """Return a function of rows and flags: exit code, output and error of a dry run."""
    monkeypatch.chdir(tmp_path)

    def no_weights(*args, **options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(load_huggingface, "load_params", no_weights)
    write_module("dry_rewards", REWARDS)
    flags = f"""from dapo_jax import *
def get_config():
    return Config(model=Model(folder={str(byte_folder)!r}), data=Data(source="mine.jsonl"),
        rollout=Rollout(prompts_per_step=8))
"""

    def run(rows, *arguments):
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "config.py").write_text(flags)
        before = {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)}
        shown = run_shown(
            "train", ["--config=config.py", "--dry-run", *arguments], monkeypatch, capsys
        )
        after = {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)}
        assert after == before, after - before
        return shown

    return run


def row(output: str, name: str) -> str:
    """Return the line of a table that begins with `name`."""
    (line,) = (line for line in output.splitlines() if line.lstrip().startswith(f"{name} "))
    return line


def test_prompts_golds_rewards_and_lengths_are_shown(dry_run):
    code, output, error = dry_run(ROWS, "--config.data.template=<|end|>{problem}\n")
    assert code == 0, error
    assert output.count("\nprompt mine-") == 3
    # Trailing newlines and special tokens are visible.
    assert output.count("=\n  | \n  gold '") == 3 and "  | <|end|>" in output
    assert "special tokens of the first prompt: <|end|>; a response ends at <|end|>" in output
    assert "golds of 32 problems, by final_number: 32 integer" in output
    assert row(output, "gold in its form").split("  ")[-1].startswith("right: rule +1.00")
    for name in ("gold alone", "a wrong number", "the problem again"):
        assert "wrong (" in row(output, name)
    # least, median, 95 %, most, limit; a token per byte and the special one
    assert row(output, "prompts").split()[1:6] == ["6", "8", "8", "8", "32"]
    assert "20 steps of 8 prompts ask for every one of 32 problems 5.0 times" in output
    assert output.endswith("without --dry-run this trains\n")


def test_unreadable_golds_are_counted(dry_run):
    rows = [*ROWS, {"question": "half of 1=", "answer": "1/2"}]
    code, output, _ = dry_run(rows, "--config.data.heldout_problems=0")
    assert code == 0
    assert "golds of 41 problems, by final_number: 40 integer, 1 unreadable" in output
    assert "warning: 1 golds are unreadable" in output and "'1/2'" in output
    code, output, _ = dry_run(
        rows, "--config.data.heldout_problems=0", "--config.reward.verifier=math"
    )
    assert "by math: 41 number" in output and "warning" not in output
    assert "wrong (unfinished)" in row(output, "gold, not worked out")


def test_failing_reward_function_is_named(dry_run):
    code, _, error = dry_run(ROWS, "--config.reward.parts=rule=1,dry_rewards:fails=1")
    assert code == 2 and "dry_rewards.py:10: return 1 / 0: ZeroDivisionError" in error
    assert (
        "fails on all of 6 answers" in error
    )  # it does not wait for a hanging function at every prompt
    assert error.startswith("error: config.reward.parts") and len(error.splitlines()) == 1
    code, output, _ = dry_run(ROWS, "--config.reward.parts=rule=1,dry_rewards:fails_on_nothing=1")
    assert code == 0 and "warning: rewards fail on 3 of these" in output


def test_an_environment_is_played_for_a_turn(dry_run):
    flags = ["--config.environment.name=dry_rewards:Hints", "--config.reward.correct=spread"]
    flags += ["--config.reward.parts=environment=3", "--config.environment.workers=1"]
    code, output, error = dry_run(ROWS, *flags)
    assert code == 0, error
    rewards, replies = output.split("\nreplies of the environment ")
    assert "environment +6.00" in row(rewards, "gold in its form")
    assert "environment -1.50" in row(rewards, "the problem again")
    assert row(replies, "gold in its form").endswith("+2.00  the end")
    assert re.search(r"-0.50  \d+ tokens: \d without its mark$", row(replies, "gold alone"))
    assert re.search(r"  nothing +\+0.00  failed, so there is no reward: .*\wError\b", replies)


def test_docs_show_the_output_of_the_command(alone, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, output, error = run_shown("train", ["arithmetic", "--dry-run"], monkeypatch, capsys)
    assert code == 0, error
    page = (ROOT / "docs/own_data.md").read_text()
    (shown,) = re.findall(r"^```\n(data: .*?)^```", page, re.M | re.S)
    assert set(shown.splitlines()) <= set(output.splitlines())
    assert not list(tmp_path.iterdir())


def test_errors_of_a_run_follow_the_report(dry_run):
    code, output, error = dry_run(ROWS, "--config.data.max_prompt_tokens=4")
    assert code == 2 and "config.data.max_prompt_tokens = 4: must be larger" in error
    assert "of 32 are cut at their beginning" in row(output, "prompts")


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_verifier_finds_an_answer_in_its_form(verifier):
    assert FORMS.keys() == {*VERIFIERS}
    verify = make_verifier(Settings(verifier))
    result = verify(in_form(verifier, "42"), "42", "")
    assert result.correct and result.extracted == "42"


@pytest.mark.parametrize(("verifier", "gold", "kind", "shown"), read_table(__file__, "golds"))
def test_a_gold_is_read_as_its_verifier_reads_it(verifier, gold, kind, shown):
    reading = read_gold(verifier, gold)
    assert reading.kind == kind and shown in reading.shown
