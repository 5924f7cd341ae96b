"""Write a config, a prompt and, if no verifier fits, a reward function for a file of problems.

    dapo-jax init my.jsonl
    dapo-jax init my.csv --question=ask --answer=meta.gold --out=mine --model=models/small

reads a jsonl, json, csv, parquet or arrow file, and chooses the fields of the problem and its
answer by their names. If the model has a chat template, prompts have its form. It replaces no file.
"""

import collections
import functools
import itertools
import json
import os
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.commands import command_line
from dapo_jax.config.settings import section, setting
from dapo_jax.types.errors import ConfigError, naming, require
from dapo_jax.types.structs import Problem


@section
class InitConfig:
    """A config for a file of problems (`dapo-jax init`)."""

    data: str = setting("", "File of problems, with or without answers.")
    out: str = setting("", "Output folder; empty: a new folder named after the file.")
    question: str = setting("", "Field of the problem: a text or messages; a.b is a nested field.")
    answer: str = setting("", "Field of the answer, or of a worked solution that ends with it.")
    model: str = setting("models/Qwen2.5-0.5B-Instruct", "Model folder of the policy.")


MODEL = InitConfig().model
TEXTS = pathlib.Path(__file__).parent / "init_files"
MAX_ROWS = 10_000
MIN_FRACTION = 0.9  # of the rows that a choice has to fit
# Field names, the likeliest first, compared in lower case.
QUESTIONS = "problem question prompt instruction query ask task input messages text q".split()
ANSWERS = (
    "answer final_answer gold target ground_truth expected correct_answer label result solution "
    "output response completion a"
).split()
VERIFIABLE = ("number", "number with a unit", "expression", "list", "set", "tuple", "relation")


def read_first_rows(name: str) -> list[dict[str, Any]]:
    """Return the objects among the first rows of file `name`. Raises `ConfigError`."""
    from etils import epath

    from dapo_jax.data.files import find_files, read_rows

    require(bool(name) and not set(name) & set(",="), "data", name, "a file, without , and =")
    files = [read_rows(epath.Path(file)) for file in find_files("data", name, "data", "train")]
    with naming("data", name):
        rows = [row for _, row in itertools.islice(itertools.chain(*files), MAX_ROWS)]
    objects = [row for row in rows if isinstance(row, dict)]
    is_bad = bool(rows) and isinstance(rows[0], Exception)
    reason = f"its first row {rows[0] if is_bad else 'has none'}" if rows else "it has no rows"
    require(bool(objects), "data", name, f"rows with named fields: {reason}")
    return objects


def read_problems(rows: list[dict], fields: Mapping[str, str]) -> tuple[list[Problem], str]:
    """Return the problems of the readable rows (answers may be empty), and the first error."""
    from dapo_jax.data.files import RowLog
    from dapo_jax.data.row_formats import read_row

    log = RowLog(MAX_ROWS)
    read = functools.partial(read_row, source="", number="", fields=fields, needs_answer=False)
    problems = [log.parse(f"row {number}", row, read) for number, row in enumerate(rows, 1)]
    return [p for p in problems if p is not None], "".join(f" ({m})" for m in log.messages[:1])


def list_fields(row: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a row by dotted path; messages are one value."""
    fields: dict[str, Any] = {}
    for name, value in row.items() if isinstance(row, dict) else enumerate(row[:4]):
        first = value[0] if isinstance(value, list) and value else value
        is_nested = isinstance(first, dict) and first and "role" not in first
        path = f"{prefix}{name}"
        fields |= list_fields(value, f"{path}.") if is_nested else {path: value}
    return fields


def choose_field(rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the path of the first of `names` that most rows fill, nested ones last; else ""."""
    values = (item for row in rows for item in list_fields(row).items())
    counts = collections.Counter(path for path, v in values if v not in (None, "", [], {}))
    ranks = {path: path.lower().rpartition(".")[2] for path in counts}
    ranks = {path: (path.count("."), names.index(n)) for path, n in ranks.items() if n in names}
    likely = [path for path in ranks if counts[path] >= MIN_FRACTION * len(rows)]
    return min(likely, key=ranks.__getitem__, default="")


def choose(rows: list[dict[str, Any]], flags: InitConfig) -> tuple[list[Problem], dict[str, str]]:
    """Return the problems and `data.fields`: of the flags, usual or likely; or `ConfigError`."""
    from dapo_jax.data.row_formats import MISSING, look_up

    question, answer = flags.question, flags.answer
    shown = ", ".join(f"{name} ({value!s:.40})" for name, value in list_fields(rows[0]).items())
    for flag, field in (("question", question), ("answer", answer)):
        known = not field or any(look_up(row, field) is not MISSING for row in rows)
        fits = known and not set(field) & set(",=")
        require(fits, flag, field, f"a field of {flags.data}: {shown} (names without , and =)")
    problems, _ = read_problems(rows, {})
    is_usual = len(problems) >= MIN_FRACTION * len(rows) and any(p.answer for p in problems)
    if is_usual and not (question or answer):
        return problems, {}
    question = question or choose_field(rows, QUESTIONS)
    answer = answer or choose_field(rows, ANSWERS)
    boxed = sum("\\boxed" in str(look_up(row, answer)) for row in rows)
    key = "solution" if boxed >= MIN_FRACTION * len(rows) else "answer"
    fields = {"problem": question} | ({key: answer} if answer else {})
    problems, error = read_problems(rows, fields) if question else ([], "")
    if not problems:
        raise ConfigError(
            f"config.data = {flags.data!r}: none of its fields is known as a problem{error}: "
            f"{shown}; name two: --question=FIELD --answer=FIELD, each a text, a number or a list "
            "of messages with role and content"
        )
    return problems, fields


def make_files(
    flags: InitConfig, problems: list[Problem], fields: Mapping[str, str]
) -> dict[pathlib.Path, str]:
    """Return the contents of the files by path. Raises `ConfigError`."""
    from dapo_jax.data.prompts.templates import read_chat_template
    from dapo_jax.extras.math.plugin import read_gold
    from dapo_jax.runtime.storage.models import model_path

    stem = pathlib.PurePath(flags.data).name.partition(".")[0]
    folder = pathlib.Path(flags.out or re.sub(r"\W", "_", stem))
    kinds = [read_gold("math_label", p.answer).kind if p.answer else "" for p in problems]
    is_verifiable = sum(kind in VERIFIABLE for kind in kinds) >= MIN_FRACTION * len(kinds)
    has_answers = sum(map(bool, kinds)) >= MIN_FRACTION * len(kinds)
    module = ".".join(folder.parts)
    importable = all(map(str.isidentifier, module.split(".")))
    allowed = "a folder below this one, of letters, digits and _: Python imports its reward.py"
    require(is_verifiable or importable, "out", str(folder), allowed)
    path = model_path(flags.model, "model")
    allowed = f"a model folder: hf download OWNER/NAME --local-dir {flags.model}"
    require(path.exists() or flags.model == MODEL, "model", flags.model, allowed)
    is_chat = not path.exists() or read_chat_template(path, "model") is not None
    template = (TEXTS / "template.txt").read_text() if has_answers else "{problem}\n"
    values = {
        "run_dir": f"runs/{folder.absolute().name}",
        "model": flags.model,
        "source": flags.data,
        "fields": ",".join(f"{key}={field}" for key, field in fields.items()),
        "template": "chat" if is_chat else str(folder / "template.txt"),
        "user_template": str(folder / "template.txt") * is_chat,
        "parts": "rule=1" if is_verifiable else f"{module}.reward:score=1",
        "correct": "verifier" if is_verifiable else "threshold",
        "prompts": min(32, max(2, len(problems) // 2 * 2)),
    }
    written = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    config = re.sub(r"<(\w+)>", lambda at: written[at[1]], (TEXTS / "config.txt").read_text())
    files = {folder / "config.py": config, folder / "template.txt": template}
    reward = {} if is_verifiable else {folder / "reward.py": (TEXTS / "reward.txt").read_text()}
    return files | reward


def init(flags: InitConfig) -> None:
    """Write the files, and print a summary. Raises `ConfigError`."""
    require(not flags.out.startswith("~"), "out", flags.out, "a path; shells leave ~ there")
    rows = read_first_rows(flags.data)
    problems, fields = choose(rows, flags)
    files = make_files(flags, problems, fields)
    folder = min(files).parent
    existing = " and ".join(str(path) for path in files if os.path.lexists(path))
    require(not existing, "out", str(folder), f"a folder without {existing}, which would be lost")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config.out = {str(folder)!r}: can't be written: {error}") from None
    print(f"{flags.data}: {len(problems):,} problems of the first {len(rows):,} rows")
    named = ", ".join(f"{key} is {field!r}" for key, field in fields.items())
    print(f"  fields: {named or 'of the usual names'}")
    print(f"  the first: {problems[0].text!r:.60}, answer {problems[0].answer!r:.60}")
    if folder / "reward.py" in files:
        print(f"  no verifier fits, so {folder / 'reward.py'} is the reward: read and change it")
    if not pathlib.Path(flags.model).exists() and flags.model == MODEL:
        name = pathlib.Path(MODEL).name
        print(f"  the model is missing: hf download Qwen/{name} --local-dir {MODEL}")
    command = f"dapo-jax train {shlex.quote(str(folder / 'config.py'))}"
    print(f"wrote {', '.join(map(str, files))}. Next:\n  {command} --dry-run\n  {command}")


def main() -> int:
    """Run the command. Exit code 0: the files are written; 2: wrong arguments."""
    return command_line.run(InitConfig, __doc__, init, single_process="dapo-jax init")
