"""Wrong input prints one line with field, value and what is allowed, and exits 2.

Nothing is compiled, and no file is written. `user_mistakes.txt` has the command lines.
"""

import pathlib
import shlex
import shutil
import socket

import pytest
from command_lines import run
from row_files import read_table

from dapo_jax.run import loop as runs

HERE = pathlib.Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
ROWS = "".join(f'{{"question": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(10))
CONFIG = "from dapo_jax import *\n\ndef get_config():\n    "
FILES = dict(read_table(__file__, "files")) | {
    "mine.jsonl": ROWS,
    "text.jsonl.gz": ROWS,
    "text.parquet": ROWS,
    "deep.json": '[{"a1": 1, "b": {"c": "two", "d": [{"e": 3}]}}]',
    "talk.json": '[{"question": "How many?", "answer": "2"}]',
    "bad.yaml": "seed: [1",
    "numbers.yaml": "1: 2\n",
    "preset.yaml": "algorithm: gpro\n",
    "half.yaml": "total_steps: 3.5\n",
    "list.yaml": "- seed\n",
    "none.yaml": "optimizer:\n",
    "names.yaml": "data:\n  sources: mine.jsonl\n",
    "values.yaml": "model: {folder: tiny}\noptimizer:\n  learning_rate: fast\n",
    "plain.py": f"{CONFIG}return Config()\n",
    "sheet.xlsx": "PK\3\4" + "\0" * 100,
}
UTF16 = {
    "utf16.txt": "{problem}",
    "utf16.jsonl": ROWS,
    "utf16.csv": "question,answer\n1+1=,2\n",
    "utf16.py": "from dapo_jax import *\n",
}
INDEX = '{"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}'


# (text of a config file, line of the mistake, words of the error)
CONFIG_FILES = read_table(__file__, "config_files")


def read_mistakes() -> list[tuple[list[str], list[str]]]:
    """Return command lines with the texts that each error must contain, separated by ` ... `."""
    lines = (HERE / "user_mistakes.txt").read_text().splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [(shlex.split(command), error.strip().split(" ... ")) for command, error in pairs]


def break_models(folder: pathlib.Path, whole: pathlib.Path) -> None:
    """Write copies of a model folder, each broken as downloads and checkouts break them."""
    for name in "tiny pointers weightless pickled half tokenless gpt2 utf16".split():
        shutil.copytree(whole, folder / name)
    weights, config = "model.safetensors", "config.json"
    (folder / "pointers" / weights).write_text(LFS_POINTER)
    (folder / "weightless" / weights).unlink()
    (folder / "pickled" / weights).rename(folder / "pickled/pytorch_model.bin")
    (folder / "half" / weights).rename(folder / "half/model-00001-of-00002.safetensors")
    (folder / "half/model.safetensors.index.json").write_text(INDEX)
    (folder / "tokenless/tokenizer.json").unlink()
    (folder / "gpt2" / config).write_text('{"model_type": "gpt2"}')
    (folder / "utf16" / config).write_text((whole / config).read_text(), encoding="utf-16")


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """Folder in which the commands run."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, text in UTF16.items():
        (folder / name).write_text(text, encoding="utf-16")
    text = (CONFIGS / "arithmetic.py").read_text()
    (folder / "run.py").write_text(text.replace("dapo_jax:arithmetic_base", "tiny"))
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full/thesis.tex").write_text("years of work")
    break_models(folder, tiny_folder)
    return folder


@pytest.fixture(scope="module")
def taken():
    """Port that another program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def assert_rejected(arguments: list[str], words: list[str], place, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delattr(runs, "first_state")  # a run that is not rejected fails here
    before = set(place.rglob("*"))
    code, error = run(arguments[0], arguments[1:], monkeypatch, capsys)
    assert code == 2, error
    assert error.startswith("error: ") and len(error.splitlines()) == 1, error
    assert all(word in error for word in words), error
    written = {path for path in place.rglob("*") if "__pycache__" not in str(path)} - before
    assert not written


@pytest.mark.parametrize(("command", "words"), read_mistakes(), ids=lambda v: str(v)[-60:])
def test_mistake_prints_one_line(command, words, place, taken, monkeypatch, capsys):
    for short, long in {"CONFIGS": str(CONFIGS), "TAKEN": str(taken)}.items():
        command = [argument.replace(short, long) for argument in command]
        words = [word.replace(short, long) for word in words]
    assert_rejected(command, words, place, monkeypatch, capsys)


def test_a_quoted_argument_is_printed_on_one_line(place, monkeypatch, capsys):
    command = ["train", f"--config={CONFIGS}/arithmetic.py", "x\ny\x1b[31m"]
    assert_rejected(command, ["unexpected", "x y"], place, monkeypatch, capsys)


@pytest.mark.parametrize(("text", "line", "words"), CONFIG_FILES)
def test_wrong_line_of_a_config_file_is_quoted(text, line, words, place, monkeypatch, capsys):
    (place / "mine_config.py").write_text(CONFIG + text + "\n")
    if line:
        shown = (CONFIG + text).splitlines()[line - 1].strip()
        words = [f"mine_config.py:{line}: {shown}", *words]
    command = ["train", "--config=mine_config.py"]
    assert_rejected(command, ["mine_config.py", *words], place, monkeypatch, capsys)


def test_unreadable_config_json_is_rejected(place, monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text("hello")
    command = ["train", f"--config={tmp_path / 'config.json'}"]
    assert_rejected(command, ["config.json can't be read"], place, monkeypatch, capsys)
