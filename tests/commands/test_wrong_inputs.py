"""What a person gets wrong: one line with field, value and what is allowed, and exit code 2.

Files that a case needs are written before it; nothing is compiled, and no folder is made.
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

# (command, arguments, what the line must say); `=FILE` arguments are relative to the test's folder.
FLAGS = [
    ("train", [], ["a config is required", "arithmetic, ", "dapo-jax train arithmetic"]),
    ("train", ["--config=nowhere.py"], ["--config=nowhere.py", "no such file"]),
    ("train", ["--config=notes.txt"], ["notes.txt", ".py file", "config.json"]),
    ("train", [f"{MAIN}:dapoo"], ["'dapoo'", "dapo, dr_grpo"]),
    ("train", ["--config=plain.py:dapo"], ["plain.py", "takes nothing after a colon"]),
    ("train", [MAIN, "--config.seeed=1"], ["config.seeed", "did you mean seed"]),
    ("train", [MAIN, "--config.sampler=3"], ["config.sampler", "a section"]),
    ("train", [MAIN, "--config.seed=one"], ["seed", "one"]),
    ("train", [MAIN, "--config.sampler.slots=1e3"], ["slots", "'1e3'", "a whole number"]),
    ("train", [MAIN, "--config.log.tensorboard=maybe"], ["tensorboard", "maybe", "true or false"]),
    ("train", [MAIN, "--config.total_steps=0"], ["total_steps", "0", "above 0"]),
    ("train", [MAIN, "--config.optimizer.learning_rate=inf"], ["learning_rate", "inf", "finite"]),
    ("train", [MAIN, "--config.optimizer.schedule=cosin"], ["schedule", "'cosin'", "cosine"]),
    ("train", [MAIN, "--config.data.template=dap"], ["data.template", "'dap'", "dapo"]),
    ("train", [MAIN, "--config.reward.verifier=maths"], ["verifier", "'maths'", "math_box"]),
    ("train", [MAIN, "--config.reward.parts=rule"], ["reward.parts", "'rule'", "name=weight"]),
    ("train", [MAIN, "--config.reward.parts=rule=1,rule=2"], ["reward.parts", "each name once"]),
    (
        "train",
        [MAIN, "--config.reward.parts=ruel=1"],
        ["reward.parts", "'ruel'", "module:function"],
    ),
    ("train", [MAIN, "--config.reward.parts=nomodule:f=1"], ["nomodule:f", "No module named"]),
    ("train", [MAIN, "--config.reward.parts=broken:f=1"], ["broken.py:2", "1 / 0", "ZeroDivision"]),
    ("train", [MAIN, "--config.reward.parts=mine:nothing=1"], ["mine:nothing", "no attribute"]),
    ("train", [MAIN, "--config.reward.parts=mine:number=1"], ["mine:number", "not a function"]),
    (
        "train",
        [MAIN, "--config.reward.parts=mine:short=1"],
        ["mine:short", "(prompt=, response=, answer=)"],
    ),
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
    ("train", [MAIN, "--config.mesh.data=0"], ["mesh.data", "0", "above 0"]),
    ("train", [MAIN, "--config.model.folder="], ["model.folder"]),
    ("train", [MAIN, "--config.model.folder=nowhere"], ["model.folder", "'nowhere'"]),
    ("train", [MAIN, "--config.model.folder=empty"], ["model.folder", "'empty'", "config.json"]),
    (
        "train",
        [MAIN, MODEL, "--config.data.source=nowhere.jsonl"],
        ["data.source", "'nowhere.jsonl'"],
    ),
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
    ("evaluate", [MAIN, "--k=0"], ["samples_per_problem", "0", "above 0"]),
    ("evaluate", [MAIN, "--temperature=-1"], ["temperature", "-1.0", "from 0.001", "or 0"]),
    ("evaluate", [MAIN, "--top_p=1.1"], ["top_p", "1.1", "at most 1"]),
    ("evaluate", [MAIN, "--model=nowhere"], ["model.folder", "'nowhere'"]),
    ("evaluate", [MAIN, "--config.run_dir=untrained"], ["run_dir", "no checkpoint", "--model"]),
    ("evaluate", [MAIN, "--out=full"], ["evaluation.out", "'full'"]),
    ("sft", ["--config.total_steps=-1"], ["total_steps", "-1", "at least 0"]),
    ("sft", [STEPS, "--config.architecture.kv_heads=3"], ["kv_heads", "3", "divisor", "heads = 4"]),
    ("sft", [STEPS, "--config.out=full"], ["out", "'full'"]),
    ("export", ["--run=nowhere", "--out=x"], ["run", "'nowhere'"]),
    ("export", ["--run=", "--out=x"], ["config.run = ''"]),
    ("export", ["--run=a", "--out=x", "--dtype=int8"], ["dtype", "'int8'", "bfloat16"]),
    (
        "export",
        ["--run=a", "--out=x", "--weights=adapter", "--dtype=bfloat16"],
        ["config.dtype = 'bfloat16'", "'auto' with weights = 'adapter'", "nothing reads it"],
    ),
    ("export", ["--run=a", "--out=x", "--push_to_hub=a/b/c"], ["push_to_hub", "'a/b/c'", "OWNER"]),
    (
        "export",
        ["--run=a", "--out=x", "--private=false"],
        ["config.private = False", "True with push_to_hub = ''", "nothing reads it"],
    ),
    ("export", ["--rum=a"], ["--rum: there is no such flag", "did you mean run"]),
    ("train", [MAIN, "--seed=3"], ["--seed: there is no such flag", "did you mean seed"]),
    ("serve", [], ["dapo-jax serve --model=FOLDER"]),
    ("serve", ["--model="], ["config.model = ''", "--model=FOLDER"]),
    ("sft", [], ["dapo-jax sft --config.data.source=FILE --config.start=FOLDER"]),
    ("dpo", [], ["dapo-jax dpo --config.data.source=FILE"]),
    (
        "train",
        [MAIN, "--config.optimizer=3"],
        ["config.optimizer", "a section", "--help=optimizer"],
    ),
    ("train", [MAIN, "--config.total_steps"], ["total_steps", "a whole number"]),
    ("train", [MAIN, "--config.total_steps="], ["total_steps", "a whole number"]),
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
    ("serve", ["--model=nowhere"], ["config.model", "'nowhere'"]),
    ("serve", ["--model=m", "--port=-1"], ["config.port", "-1", "65535"]),
    ("serve", ["--model=m", "--slots=none"], ["slots", "none"]),
]

# (text of a config file, line of the mistake, what the message must say)
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
    """Where the command runs: files that are not what they are taken for."""
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


def assert_refused(code: int, said: str, words: list[str], before: set, folder) -> None:
    assert code == 2, said
    assert said.startswith("error: ") and len(said.splitlines()) == 1, said
    assert all(word in said for word in words), said
    assert (
        set(folder.rglob("*")) - {p for p in folder.rglob("*") if "__pycache__" in str(p)} == before
    )


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    FLAGS,
    ids=lambda v: v if isinstance(v, str) else " ".join(v)[-40:],
)
def test_a_wrong_flag_is_one_line(command, arguments, words, folder, monkeypatch, capsys):
    before = set(folder.rglob("*"))
    code, said = run(command, arguments, monkeypatch, capsys)
    assert_refused(code, said, words, before, folder)


@pytest.mark.parametrize(("text", "line", "words"), FILES)
def test_a_wrong_line_of_a_config_file_is_shown(text, line, words, folder, monkeypatch, capsys):
    (folder / "mine_config.py").write_text(CONFIG + text + "\n")
    before = set(folder.rglob("*"))
    code, said = run("train", ["--config=mine_config.py"], monkeypatch, capsys)
    if line:
        number, shown = line, (CONFIG + text).splitlines()[line - 1].strip()
        words = [f"mine_config.py:{number}: {shown}", *words]
    assert_refused(code, said, ["mine_config.py", *words], before, folder)


def test_there_are_sixty():
    assert len(FLAGS) + len(FILES) >= 60


def test_a_run_that_ended_is_repeated_by_its_settings_alone(folder, monkeypatch, capsys):
    shutil.copy(folder / "notes.txt", folder / "config.json")
    code, said = run("train", ["--config=config.json"], monkeypatch, capsys)
    assert code == 2 and "config.json can't be read" in said and len(said.splitlines()) == 1
