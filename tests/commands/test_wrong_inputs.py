"""Wrong input prints one line with field, value and what is allowed, and exits 2.

Nothing is compiled, and no folder is written.
"""

import pathlib
import shutil
import sys

import pytest
from command_lines import run

ROOT = pathlib.Path(__file__).parents[2]
MAIN = f"--config={ROOT}/configs/arithmetic.py"
MODEL = "--config.model.folder=tiny"
STEPS = "--config.total_steps=1"
CONFIG = "from dapo_jax import *\n\ndef get_config():\n    "

# (command, arguments, words of the error); files are relative to the test's folder.
FLAGS = [
    ("train", [], ["a config is required", "arithmetic, ", "dapo-jax train arithmetic"]),
    ("train", ["--config=notes.txt"], ["notes.txt", ".py file", "config.json"]),
    ("train", ["--config=plain.py:dapo"], ["plain.py", "takes no argument"]),
    ("train", [MAIN, "--config.seeed=1"], ["config.seeed", "did you mean seed"]),
    ("train", [MAIN, "--config.sampler=3"], ["config.sampler", "a section"]),
    ("train", [MAIN, "--config.total_steps=0"], ["total_steps", "0", "above 0"]),
    ("train", [MAIN, "--config.data.template=dap"], ["data.template", "'dap'", "dapo"]),
    ("train", [MAIN, "--config.reward.verifier=maths"], ["verifier", "'maths'", "math_box"]),
    (
        "train",
        [MAIN, "--config.reward.parts=ruel=1"],
        ["reward.parts", "'ruel'", "module:function"],
    ),
    ("train", [MAIN, "--config.reward.parts=nomodule:f=1"], ["nomodule:f", "No module named"]),
    ("train", [MAIN, "--config.reward.parts=broken:f=1"], ["broken.py:2", "1 / 0", "ZeroDivision"]),
    ("train", [MAIN, "--config.reward.parts=mine:number=1"], ["mine:number", "not a function"]),
    (
        "train",
        [MAIN, "--config.reward.parts=in_process:f=1"],
        ["in_process:f", "given by the program"],
    ),
    (
        "train",
        [MAIN, "--config.algorithm.token_weights=mine"],
        ["token_weights", "module:function"],
    ),
    ("train", [MAIN, "--config.model.folder="], ["model.folder"]),
    ("train", [MAIN, "--config.model.folder=nowhere"], ["model.folder", "'nowhere'"]),
    ("train", [MAIN, "--config.model.folder=empty"], ["model.folder", "'empty'", "config.json"]),
    ("train", [MAIN, "--config.data.source=a=0"], ["data.source", "a=0", "above 0"]),
    ("train", [MAIN, MODEL, "--config.data.source=gym:nothing"], ["gym:nothing"]),
    (
        "train",
        [MAIN, MODEL, "--config.lora.rank=2", "--config.lora.folder=full"],
        ["config.lora.folder", "full/adapter_config.json can't be read"],
    ),
    ("train", [MAIN, "--config.run_dir=full"], ["run_dir", "'full'"]),
    ("train", [MAIN, "--config.run_dir=notes.txt"], ["run_dir", "'notes.txt'"]),
    ("train", [MAIN, "--help=smapler"], ["--help=smapler", "sampler"]),
    ("train", [MAIN, "seed=3"], ["unexpected", "seed=3"]),
    ("evaluate", [MAIN, "--temperature=-1"], ["temperature", "-1.0", "from 0.001", "or 0"]),
    ("evaluate", [MAIN, "--model=nowhere"], ["model.folder", "'nowhere'"]),
    ("evaluate", [MAIN, "--out=full"], ["evaluation.out", "'full'"]),
    ("sft", ["--config.total_steps=-1"], ["total_steps", "-1", "at least 0"]),
    ("sft", [STEPS, "--config.architecture.kv_heads=3"], ["kv_heads", "3", "divisor", "heads = 4"]),
    ("sft", [STEPS, "--config.out=full"], ["out", "'full'"]),
    (
        "export",
        ["--run=a", "--out=x", "--weights=adapter", "--dtype=bfloat16"],
        ["config.dtype = 'bfloat16'", "'auto' with weights = 'adapter'", "nothing reads it"],
    ),
    (
        "export",
        ["--run=a", "--out=x", "--private=false"],
        ["config.private = False", "True with push_to_hub = ''", "nothing reads it"],
    ),
    ("export", ["--rum=a"], ["--rum: there is no such flag", "did you mean run"]),
    ("train", [MAIN, "--seed=3"], ["--seed: there is no such flag", "did you mean seed"]),
    ("serve", [], ["dapo-jax serve --model=FOLDER"]),
    ("sft", [], ["dapo-jax sft --config.data.source=FILE --config.start=FOLDER"]),
    ("train", [MAIN, "--config.total_steps"], ["total_steps", "a whole number"]),
    ("train", [MAIN, "x\ny\x1b[31m"], ["unexpected", "x y"]),
    (
        "train",
        [MAIN, "--config.data.template={% if system %}S{% endif %}{problem}"],
        ["data.template", "jinja"],
    ),
    (
        "train",
        [MAIN, "--config.data.template={problem} {system}"],
        ["data.template", "{{ system }}"],
    ),
]

# (text of a config file, line of the mistake, words of the error)
FILES = [
    ("return Config(seed='x')", 4, ["seed = 'x'", "a whole number"]),
    ("return Config(seed=True)", 4, ["seed = True", "a whole number"]),
    ("return Config(sampler=Sampler(slot=3))", 4, ["Sampler.slot", "did you mean slots"]),
    (
        "c = Config()\n    c.optimizer.lr = 3.0\n    return c",
        5,
        ["lr", "did you mean learning_rate"],
    ),
    (
        "c = Config()\n    c.optimiser = None\n    return c",
        5,
        ["optimiser", "did you mean optimizer"],
    ),
    ("return Config(model='folder')", 4, ["config.model = 'folder'", "Model(...)"]),
    (
        "return Config(\n        seed=0,\n        total_steps=0,\n    )",
        6,
        ["total_steps = 0", "above 0"],
    ),
    ("return Config(reward=Reward(parts=len))", 4, ["reward.parts", "text"]),
    ("return Config(algorithm=preset('gpro'))", 4, ["'gpro'", "grpo"]),
    ("return Config(seed=undefined)", 4, ["NameError", "undefined"]),
    ("return Config(seed=)", 4, ["SyntaxError"]),
    ("import nosuchmodule", 4, ["No module named 'nosuchmodule'"]),
    ("import sys; sys.exit(0)", 4, ["SystemExit"]),
    ("raise ValueError('a' + chr(10) + chr(27) + 'b')", 4, ["ValueError: a \\x1bb"]),
    ("return 3", None, ["get_config() returns int", "Config"]),
    ("return {'seed': 0, 'slots': 3}", None, ["config.slots", "no such setting"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_folder):
    """Return the working folder of the command, with unusable files."""
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "plain.py").write_text(CONFIG + "return Config()")
    (tmp_path / "mine.py").write_text("number = 3\ndef short(text): return 1.0\n")
    (tmp_path / "broken.py").write_text("x = 1\ny = 1 / 0\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("years of work")
    shutil.copytree(tiny_folder, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def assert_rejected(code: int, error: str, words: list[str], before: set, folder) -> None:
    assert code == 2, error
    assert error.startswith("error: ") and len(error.splitlines()) == 1, error
    assert all(word in error for word in words), error
    assert {path for path in folder.rglob("*") if "__pycache__" not in str(path)} == before


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    FLAGS,
    ids=lambda v: v if isinstance(v, str) else " ".join(v)[-40:],
)
def test_wrong_flag_prints_one_line(command, arguments, words, folder, monkeypatch, capsys):
    before = set(folder.rglob("*"))
    code, error = run(command, arguments, monkeypatch, capsys)
    assert_rejected(code, error, words, before, folder)


@pytest.mark.parametrize(("text", "line", "words"), FILES)
def test_wrong_line_of_a_config_file_is_quoted(text, line, words, folder, monkeypatch, capsys):
    (folder / "mine_config.py").write_text(CONFIG + text + "\n")
    before = set(folder.rglob("*"))
    code, error = run("train", ["--config=mine_config.py"], monkeypatch, capsys)
    if line:
        number, shown = line, (CONFIG + text).splitlines()[line - 1].strip()
        words = [f"mine_config.py:{number}: {shown}", *words]
    assert_rejected(code, error, ["mine_config.py", *words], before, folder)


def test_unreadable_config_json_is_rejected(folder, monkeypatch, capsys):
    shutil.copy(folder / "notes.txt", folder / "config.json")
    code, error = run("train", ["--config=config.json"], monkeypatch, capsys)
    assert code == 2 and "config.json can't be read" in error and len(error.splitlines()) == 1
