"""`dapo-jax init`: a file of problems becomes a config; no file is lost."""

import json
import shutil

import pytest
from command_lines import run, run_shown
from row_files import CHATML, read_table

from dapo_jax.config.experiment import Config
from dapo_jax.config.files import read_config

WORKED = {"question": "What is 3 + 4?", "answer": "3 + 4 = <<3+4=7>>7.\n#### 7"}
# name of the file, its content, flags, fields of the config, verifier or the reward's part
FILES = dict(read_table(__file__, "files"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(path, content) -> None:
    if path.suffix == ".jsonl":
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("case", FILES)
def test_a_file_becomes_a_config_that_a_dry_run_takes(case, here, byte_folder, monkeypatch, capsys):
    name, content, flags, fields, judged = FILES[case]
    write(here / name, content)
    flags = [f"--data={name}", "--out=mine", f"--model={byte_folder}", *flags]
    code, output, error = run_shown("init", flags, monkeypatch, capsys)
    assert code == 0, error
    assert "dapo-jax train mine/config.py --dry-run" in output
    config = read_config(Config, "mine/config.py")
    assert config.data.fields == fields
    assert judged in ("", config.reward.verifier, config.reward.parts)
    written = {path.name for path in (here / "mine").iterdir()} - {"__pycache__"}
    assert ("reward.py" in written) == (config.reward.correct == "threshold")
    dry = ["--config=mine/config.py", "--dry-run"]
    code, output, error = run_shown("train", dry, monkeypatch, capsys)
    assert code == 0, error
    assert "prompt a-1" in output
    assert not (here / "runs").exists()


def test_written_reward_function_scores_golds_of_words(here, monkeypatch, capsys):
    write(here / "a.jsonl", FILES["words"][1])
    assert run("init", ["--data=a.jsonl", "--out=words"], monkeypatch, capsys)[0] == 0
    namespace: dict = {}
    exec((here / "words/reward.py").read_text(), namespace)
    score = namespace["score"]
    assert score(prompt="", response="So.\nAnswer:  paris\n", answer="Paris") == 1
    assert score(prompt="", response="Paris", answer="Lyon") == 0
    assert score(prompt="", response="", answer="") == 0


def test_existing_files_are_kept_and_nothing_is_written(here, monkeypatch, capsys):
    write(here / "a.jsonl", [WORKED])
    (here / "a").mkdir()
    (here / "a/template.txt").write_text("years of work")
    code, output = run("init", ["--data=a.jsonl"], monkeypatch, capsys)
    assert code == 2 and "a/template.txt" in output and len(output.splitlines()) == 1
    assert [path.name for path in (here / "a").iterdir()] == ["template.txt"]
    assert (here / "a/template.txt").read_text() == "years of work"


def test_special_characters_are_quoted_in_the_config(here, monkeypatch, capsys):
    name = 'a"""\'\\ {x}.jsonl'
    write(here / name, [{'ask"': "1+1=?", "go'ld": "2"}])
    fields = ['--question=ask"', "--answer=go'ld"]
    flags = [f"--data={name}", "--out=mine", *fields]
    code, output = run("init", flags, monkeypatch, capsys)
    assert code == 0, output
    config = read_config(Config, "mine/config.py")
    assert config.data.source == name
    assert config.data.fields == "problem=ask\",answer=go'ld"


def test_a_model_with_a_chat_template_is_trained_in_its_form(
    here, byte_folder, monkeypatch, capsys
):
    chat = shutil.copytree(byte_folder, here / "chat")
    (chat / "chat_template.jinja").write_text(CHATML)
    write(here / "a.jsonl", [{"question": "1+1=?", "answer": "2"}] * 4)
    flags = ["a.jsonl", "--model=chat", "--out=mine"]
    assert run("init", flags, monkeypatch, capsys)[0] == 0
    dry = ["mine/config.py", "--dry-run"]
    code, output, error = run_shown("train", dry, monkeypatch, capsys)
    assert code == 0, error
    shown = "\n".join(line.removeprefix("  | ") for line in output.splitlines())
    # The wording is inside the user's turn, and the answer of the assistant is opened.
    assert "<|im_start|>user\n1+1=?\n\nThink step by step. The last line of your" in shown
    assert "\nAnswer: YOUR ANSWER<|im_end|>\n<|im_start|>assistant\n" in shown
    assert "special tokens of the first prompt: none; a response ends at <|end|>" in shown
    assert "which data.template=chat would use" not in shown
    dry += ["--config.data.template=none", "--config.data.user_template="]
    code, output, _ = run_shown("train", dry, monkeypatch, capsys)
    assert code == 0 and "has a chat template, which data.template=chat would use" in output
