"""Write a config, a prompt and, if no verifier fits, a reward function for a file of problems.

    dapo-jax init my.jsonl

chooses the fields of the problem and its answer by their names. If the model has a chat template,
prompts have its form. It replaces no file.
"""

import collections
import functools
import itertools
import os
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from dapo_jax.config.settings import Section, setting
from dapo_jax.data.files import RowLog, find_files, read_rows
from dapo_jax.data.prompts.templates import read_chat_template
from dapo_jax.data.row_formats import look_up, read_row
from dapo_jax.extras.math.plugin import read_gold
from dapo_jax.run import command_line
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.types.errors import naming, require
from dapo_jax.types.structs import Problem


class InitConfig(Section):
    """A config for a file of problems (`dapo-jax init`)."""

    data: str = setting("", "File of problems, with or without answers.")
    out: str = setting("", "Output folder; empty: a new folder named after the file.")
    question: str = setting("", "Field of the problem: a text or messages; a.b is a nested field.")
    answer: str = setting("", "Field of the answer, or of a worked solution that ends with it.")
    model: str = setting("models/Qwen2.5-0.5B-Instruct", "Model folder of the policy.")


TEXTS = pathlib.Path(__file__).parent / "init_files"
MAX_ROWS = 10_000
MIN_FRACTION = 0.9  # of the rows that a choice has to fit
# Field names, the likeliest first, compared in lower case.
QUESTIONS = "problem question prompt instruction query ask task input messages text q".split()
ANSWERS = (
    "answer final_answer gold target ground_truth expected correct_answer label result".split()
)
ANSWERS += "solution output response completion a".split()
VERIFIABLE = ("number", "number with a unit", "expression", "list", "set", "tuple", "relation")


def read_first_rows(name: str) -> list[dict[str, Any]]:
    """Return the objects among the first rows of file `name`. Raises `ConfigError`."""
    require(bool(name) and not set(name) & set(",="), "data", name, "a file, without , and =")
    files = map(read_rows, map(epath.Path, find_files("data", name, "data", "train")))
    with naming("data", name):
        rows = [row for _, row in itertools.islice(itertools.chain(*files), MAX_ROWS)]
    objects = [row for row in rows if isinstance(row, dict)]
    first = f"; first row: {rows[0]!s:.100}" if rows else "; there is none"
    require(bool(objects), "data", name, f"a file of rows with named fields{first}")
    return objects


def read_problems(rows: list[dict], fields: Mapping[str, str]) -> tuple[list[Problem], str]:
    """Return the problems of the readable rows (answers may be empty), and the first error."""
    log = RowLog(MAX_ROWS)
    read = functools.partial(read_row, source="", number="", fields=fields, needs_answer=False)
    problems = (log.parse(f"row {number}", row, read) for number, row in enumerate(rows, 1))
    return [*filter(None, problems)], "".join(log.messages[:1])


def choose_field(rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the field with the first of `names`, in any case, that most rows fill; else ""."""
    filled = (name for row in rows for name in row if row[name] not in (None, "", [], {}))
    counts = collections.Counter(filled)
    likely = {name.lower(): name for name in counts if counts[name] >= MIN_FRACTION * len(rows)}
    return next((likely[name] for name in names if name in likely), "")


def choose(rows: list[dict[str, Any]], flags: InitConfig) -> tuple[list[Problem], dict[str, str]]:
    """Return the problems and `data.fields`: of the flags, usual or likely; or `ConfigError`."""
    problems, _ = read_problems(rows, {})
    is_usual = len(problems) >= MIN_FRACTION * len(rows) and any(p.answer for p in problems)
    if is_usual and not (flags.question or flags.answer):
        return problems, {}
    question = flags.question or choose_field(rows, QUESTIONS)
    answer = flags.answer or choose_field(rows, ANSWERS)
    boxed = sum("\\boxed" in str(look_up(row, answer)) for row in rows)
    key = "solution" if boxed >= MIN_FRACTION * len(rows) else "answer"
    fields = {"problem": question} | ({key: answer} if answer else {})
    problems, error = read_problems(rows, fields) if question else ([], "no usual name")
    shown = ", ".join(f"{name} ({value!s:.40})" for name, value in rows[0].items())
    allowed = f"rows with a problem ({error}). Name it, --question=FIELD, and its answer, "
    allowed += f"--answer=FIELD: a.b if nested, without , and =. There are {shown}"
    require(bool(problems) and not set(question + answer) & set(",="), "data", flags.data, allowed)
    return problems, fields


def make_files(flags: InitConfig, problems: list[Problem], fields: dict) -> dict[str, str]:
    """Return the contents of the files by path. Raises `ConfigError`."""
    name = pathlib.PurePath(flags.data).name.partition(".")[0]
    folder = pathlib.Path(flags.out or re.sub(r"\W", "_", name))
    kinds = [read_gold("math_label", p.answer).kind if p.answer else "" for p in problems]
    is_verifiable = sum(kind in VERIFIABLE for kind in kinds) >= MIN_FRACTION * len(kinds)
    path = model_path(flags.model, "model")
    is_chat = not path.exists() or read_chat_template(path, "model") is not None
    template = str(folder / "template.txt")
    values = {
        "run_dir": f"runs/{folder.absolute().name}",
        "model": flags.model,
        "source": flags.data,
        "fields": ",".join(f"{key}={field}" for key, field in fields.items()),
        "template": "chat" if is_chat else template,
        "user_template": template if is_chat else "",
        "parts": "rule=1" if is_verifiable else f"{'.'.join(folder.parts)}.reward:score=1",
        "correct": "verifier" if is_verifiable else "threshold",
        "prompts": min(32, max(2, len(problems) // 2 * 2)),
    }
    texts = {path.stem: path.read_text() for path in TEXTS.glob("*.txt")}
    files = {str(folder / "config.py"): texts["config"].format(**values)}
    files[template] = texts["template"] if any(kinds) else "{problem}\n"
    return files if is_verifiable else files | {str(folder / "reward.py"): texts["reward"]}


def init(flags: InitConfig) -> None:
    """Write the files, and print a summary. Raises `ConfigError`."""
    require(not flags.out.startswith("~"), "out", flags.out, "a path; shells leave ~ there")
    rows = read_first_rows(flags.data)
    problems, fields = choose(rows, flags)
    files = make_files(flags, problems, fields)
    existing = " and ".join(path for path in files if os.path.lexists(path))
    require(not existing, "out", flags.out, f"a folder without {existing}, which would be lost")
    try:
        for path, text in files.items():
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        require(False, "out", flags.out, f"a folder that can be written; {error}")
    print(f"{flags.data}: {len(problems):,} problems of the first {len(rows):,} rows; {fields}")
    command = f"dapo-jax train {shlex.quote(min(files))}"
    read = "Read and change reward.py, as no verifier fits. " * (len(files) > 2)
    print(f"wrote {', '.join(files)}. {read}Next:\n  {command} --dry-run\n  {command}")


def main() -> int:
    """Run the command. Exit code 0: the files are written; 2: wrong arguments."""
    return command_line.run(InitConfig, __doc__, init, single_process="dapo-jax init")
