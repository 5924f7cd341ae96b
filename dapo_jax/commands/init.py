"""Writes a config, a template and, where no rule fits, a reward function for a file of problems.

    dapo-jax init --data=my.jsonl
    dapo-jax init --data=my.csv --question=ask --answer=gold --out=mine --model=models/small

looks at the rows of a jsonl, json, csv, parquet or arrow file, says which fields it takes for the
problem and its answer, and measures them. It replaces no file. Flags:

    --data=FILE        problems, with or without answers
    --out=FOLDER       where the files go; by default a new folder of the file's name
    --question=FIELD   which field is the problem; a.b leads into nested objects
    --answer=FIELD     which field is the answer, or a worked solution that ends in it
    --model=FOLDER     the policy's folder
"""

import collections
import itertools
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.commands.command_line import FlagParser
from dapo_jax.commands.starting_files import MODEL, Found, check_flag, make_files, write
from dapo_jax.runtime.settings import ConfigError, nearest
from dapo_jax.structs import Problem

MAX_ROWS, LONGEST_SHOWN = 10_000, 60
# Names of fields, the likeliest first, compared in lower case.
QUESTIONS = "problem question prompt instruction query ask task input messages text q".split()
ANSWERS = (
    "answer final_answer gold target ground_truth expected correct_answer label result solution "
    "output response completion a"
).split()
ENOUGH = 0.9  # share of the rows that a choice has to fit
BY_RULE = ("number", "number with a unit", "expression", "list", "set", "tuple", "relation")


def read_flags() -> Any:
    """The command line. Ends the program with a line where it is wrong."""
    parser = FlagParser(prog="dapo-jax init", add_help=False, allow_abbrev=False)
    for name in ("data", "out", "question", "answer"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--model", default=MODEL)
    return parser.parse_args()


def read_first_rows(name: str) -> list[dict[str, Any]]:
    """First rows of the file `name`, those that are objects. Raises `ConfigError`."""
    from etils import epath

    from dapo_jax.data.files import READERS, read_rows, split_suffix

    allowed = f"a file that ends in {', '.join(READERS)}"
    check_flag(bool(name), "data", name, f"{allowed}: dapo-jax init --data=FILE")
    remote = "://" in name
    allowed_place = "a path of this machine or on gs://"
    check_flag(not remote or name.startswith("gs://"), "data", name, allowed_place)
    path = epath.Path(name)
    beside = [str(p) for p in pathlib.Path(name).parent.glob("*")] if not remote else []
    exists = path.exists()
    check_flag(exists, "data", name, f"{allowed} (no such file{nearest(name, beside, 0.7)})")
    check_flag(not path.is_dir(), "data", name, f"{allowed}, not a folder")
    check_flag(bool(split_suffix(path.name)[1]), "data", name, allowed)
    check_flag(not set(name) & set(",=*?["), "data", name, "a name without , = * ? and [")
    try:
        rows = [row for _, row in itertools.islice(read_rows(path), MAX_ROWS)]
    except ConfigError as error:
        raise ConfigError(f"--data = {name!r}: {error}") from None
    objects = [row for row in rows if isinstance(row, dict)]
    reason = "it has no rows"
    if rows:
        wrong = rows[0] if isinstance(rows[0], Exception) else f"is {type(rows[0]).__name__}"
        reason = f"its first row {wrong}"
    check_flag(bool(objects), "data", name, f"rows with named fields: {reason}")
    return objects


def read_problems(rows: list[dict[str, Any]], fields: Mapping[str, str]) -> list[Problem]:
    """Problems of the rows that can be read by these fields; answers may be empty."""
    from dapo_jax.data.files import MalformedRow, NoAnswer
    from dapo_jax.data.row_formats import read_row

    problems = []
    for number, row in enumerate(rows, 1):
        try:
            problems.append(read_row(row, "row", number, fields, needs_answer=False))
        except (MalformedRow, NoAnswer):
            continue
    return problems


def choose_field(rows: list[dict[str, Any]], names: Sequence[str], taken: str = "") -> str:
    """The first of `names` that most rows have a value for, in the file's own spelling."""
    spelled: dict[str, str] = {}
    for name in itertools.chain.from_iterable(rows):
        spelled.setdefault(name.lower(), name)
    for name in names:
        field = spelled.get(name, "")
        filled = sum(row.get(field) not in (None, "", [], {}) for row in rows)
        if field and field != taken and filled >= ENOUGH * len(rows):
            return field
    return ""


def choose(rows: list[dict[str, Any]], question: str, answer: str, name: str) -> Found:
    """Problems by the named fields, else by the usual ones, else by likely names.

    Raises:
        ConfigError: no field fits; names the fields that there are.
    """
    from dapo_jax.data.row_formats import MISSING, look_up

    for flag, field in (("question", question), ("answer", answer)):
        known = not field or any(look_up(row, field) is not MISSING for row in rows)
        check_flag(known, flag, field, f"a field of {name}: {describe_fields(rows)}")
    if not (question or answer):
        problems = read_problems(rows, {})
        if len(problems) >= ENOUGH * len(rows) and any(problem.answer for problem in problems):
            return Found(problems, {}, len(rows), True)
    question = question or choose_field(rows, QUESTIONS, answer)
    if not question:
        raise ConfigError(
            f"--data = {name!r}: none of its fields is known as a problem: "
            f"{describe_fields(rows)}; name two: --question=FIELD --answer=FIELD"
        )
    answer = answer or choose_field(rows, ANSWERS, question)
    fields = {"problem": question}
    if answer:
        values = [str(look_up(row, answer)) for row in rows]
        boxed = sum("\\boxed" in value for value in values) >= ENOUGH * len(rows)
        fields["solution" if boxed else "answer"] = answer
    parts = [part for field in fields.values() for part in re.split("[,=]", field)]
    check_flag(
        len(parts) == len(fields),
        "question",
        question,
        "a field without , and =, and so the answer's",
    )
    problems = read_problems(rows, fields)
    if not problems:
        raise ConfigError(
            f"--data = {name!r}: no row has a text as {question!r}: {describe_fields(rows)}; "
            "name another: --question=FIELD"
        )
    answered = sum(bool(problem.answer) for problem in problems)
    return Found(problems, fields, len(rows), answered >= ENOUGH * len(problems))


def describe_fields(rows: list[dict[str, Any]]) -> str:
    """Fields of the first row, each with the beginning of its value."""
    return ", ".join(f"{name} ({_short(str(value))})" for name, value in rows[0].items())


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def kinds_of(problems: list[Problem]) -> collections.Counter[str]:
    """Counts of how the verifier reads the golds."""
    from dapo_jax.verifier.gold_reading import read_gold

    return collections.Counter(read_gold("math_label", problem.answer).kind for problem in problems)


def choose_folder(flags: Any, by_rule: bool) -> pathlib.Path:
    """Folder of the files. Raises `ConfigError` where it is no place for them."""
    name = pathlib.PurePath(flags.data).name.partition(".")[0]
    folder = pathlib.Path(flags.out or re.sub(r"\W", "_", name))
    check_flag(not flags.out.startswith("~"), "out", flags.out, "a path; shells leave ~ there")
    importable = not folder.is_absolute() and all(part.isidentifier() for part in folder.parts)
    check_flag(
        by_rule or importable and bool(folder.parts),
        "out",
        str(folder),
        "a folder below this one, of letters, digits and _: Python imports its reward.py",
    )
    return folder


def init(flags: Any) -> int:
    """Does what the command is for, and returns 0. Raises `ConfigError`."""
    rows = read_first_rows(flags.data)
    found = choose(rows, flags.question, flags.answer, flags.data)
    kinds = kinds_of(found.problems) if found.has_answers else collections.Counter()
    by_rule = sum(kinds[kind] for kind in BY_RULE) >= ENOUGH * len(found.problems)
    folder = choose_folder(flags, by_rule)
    files = make_files(flags, found, folder, by_rule)
    write(folder, files)
    first, more = found.problems[0], " and more" * (found.rows == MAX_ROWS)
    taken = ", ".join(f"{key} is {field!r}" for key, field in found.fields.items())
    print(f"{flags.data}: {len(found.problems):,} problems of {found.rows:,} rows{more}")
    print(f"  fields: {taken or 'of the usual names'}")
    print(f"  the first: {_short(first.text)!r}, answer {_short(first.answer)!r}")
    if kinds:
        print(f"  answers: {', '.join(f'{n:,} {kind}' for kind, n in kinds.most_common())}")
    if not by_rule:
        print(f"  no rule fits, so {folder / 'reward.py'} is the reward: read and change it")
    print(f"wrote {', '.join(str(folder / name) for name in files)}. Next:")
    if flags.model == MODEL and not pathlib.Path(MODEL).exists():
        print(f"  hf download Qwen/{pathlib.Path(MODEL).name} --local-dir {MODEL}")
    command = f"dapo-jax train {shlex.quote(str(folder / 'config.py'))}"
    print(f"  {command} --dry-run\n  {command}")
    return 0


def main() -> int:
    """Exit code 0: the files are there; 2: wrong arguments."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print((__doc__ or "").strip())
        return 0
    from dapo_jax.commands.checks import guarded

    flags = read_flags()
    return guarded(lambda: init(flags))
