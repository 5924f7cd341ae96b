"""Write a config, a template and, if no verifier fits, a reward function for a file of problems.

    dapo-jax init my.jsonl
    dapo-jax init my.csv --question=ask --answer=gold --out=mine --model=models/small

reads a jsonl, json, csv, parquet or arrow file, chooses the fields of the problem and its answer,
and measures their lengths. It replaces no file. Flags:

    --data=FILE        problems, with or without answers
    --out=FOLDER       output folder; default: a new folder named after the file
    --question=FIELD   field of the problem; a.b selects a nested field
    --answer=FIELD     field of the answer, or of a worked solution that ends with it
    --model=FOLDER     model folder of the policy
"""

import collections
import itertools
import json
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.commands.command_line import FlagParser, check_flag
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.structs import Problem

MODEL = "models/Qwen2.5-0.5B-Instruct"
MAX_ROWS = 10_000
MAX_SHOWN_CHARACTERS = 60
MIN_FRACTION = 0.9  # of the rows that a choice has to fit
# Field names, the likeliest first, compared in lower case.
QUESTIONS = "problem question prompt instruction query ask task input messages text q".split()
ANSWERS = (
    "answer final_answer gold target ground_truth expected correct_answer label result solution "
    "output response completion a"
).split()
VERIFIABLE = ("number", "number with a unit", "expression", "list", "set", "tuple", "relation")
CHARACTERS_PER_TOKEN = 2.5  # of numbers and formulas; prose has four
TOKEN_MULTIPLE = 64  # of token limits
MIN_RESPONSE_TOKENS, MAX_RESPONSE_TOKENS = 512, 2048
MAX_PROMPT_TOKENS = 8192  # longer prompts are dropped

TEMPLATE = """\
{problem}

Think step by step. The last line of your response must have the form
Answer: YOUR ANSWER
"""
REWARD = '''\
"""The reward of a response. It runs in a worker process, which may raise, hang or crash."""


def score(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the text after the last "Answer:" is the answer, ignoring case and blanks."""
    text = response.rpartition("Answer:")[2]
    return float(bool(answer) and text.casefold().split() == answer.casefold().split())
'''
REWARD_WITHOUT_ANSWERS = '''\
"""The reward of a response. It runs in a worker process, which may raise, hang or crash."""


def score(prompt: str, response: str, answer: str) -> float:
    """Return 1 for a response of 20 to 200 words: replace this by your own criterion."""
    return float(20 <= len(response.split()) <= 200)
'''
CONFIG = '''\
"""Reinforcement learning on problems of my own."""

from dapo_jax import Config, Data, Model, Optimizer, Packing, Reward, Rollout, Sampler


def get_config() -> Config:
    return Config(
        run_dir={run_dir},
        total_steps=100,
        model=Model(folder={model}),
        data=Data(
{data}
            max_prompt_tokens={prompt},
        ),
        rollout=Rollout(prompts_per_step={prompts}, samples_per_prompt=8, updates_per_rollout=2),
        sampler=Sampler(max_response_tokens={response}),
        reward=Reward({reward}),
        packing=Packing(row_tokens={row}),
        optimizer=Optimizer(learning_rate=1e-6, warmup_steps=5),
    )
'''


class Selection(NamedTuple):
    """Problems of a file, read by the chosen fields (for `data.fields`; empty: usual names)."""

    problems: list[Problem]
    fields: dict[str, str]
    rows: int

    @property
    def has_answers(self) -> bool:
        answered = sum(bool(problem.answer) for problem in self.problems)
        return answered >= MIN_FRACTION * len(self.problems)

    def kinds(self) -> collections.Counter[str]:
        """Return how the verifier reads the gold answers; empty without any."""
        from dapo_jax.verifier.gold_reading import read_gold

        golds = [problem.answer for problem in self.problems] if self.has_answers else []
        return collections.Counter(read_gold("math_label", gold).kind for gold in golds)


def read_first_rows(name: str) -> list[dict[str, Any]]:
    """Return the objects among the first rows of file `name`. Raises `ConfigError`."""
    from etils import epath

    from dapo_jax.config.experiment import Data
    from dapo_jax.data.files import find_files, read_rows

    check_flag(bool(name), "data", name, "a file: dapo-jax init FILE")
    check_flag(not set(name) & set(",="), "data", name, "a name without , and =")
    try:
        files = find_files("data", name, Data().folder, "train")
    except ConfigError as error:
        raise ConfigError(f"--{str(error).removeprefix('config.')}") from None
    every_row = itertools.chain.from_iterable(read_rows(epath.Path(file)) for file in files)
    try:
        rows = [row for _, row in itertools.islice(every_row, MAX_ROWS)]
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
    """Return the problems of the readable rows; answers may be empty."""
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
    """Return the first of `names` that most rows have a value for, in the file's spelling."""
    spelled: dict[str, str] = {}
    for name in itertools.chain.from_iterable(rows):
        spelled.setdefault(name.lower(), name)
    for name in names:
        field = spelled.get(name, "")
        filled = sum(row.get(field) not in (None, "", [], {}) for row in rows)
        if field and field != taken and filled >= MIN_FRACTION * len(rows):
            return field
    return ""


def choose(rows: list[dict[str, Any]], flags: Any) -> Selection:
    """Select problems by the named fields, else by the usual names, else by likely names.

    Raises:
        ConfigError: no field fits; the message lists the fields.
    """
    from dapo_jax.data.row_formats import MISSING, look_up

    question, answer = flags.question, flags.answer
    described = ", ".join(f"{name} ({_short(str(value))})" for name, value in rows[0].items())
    for flag, field in (("question", question), ("answer", answer)):
        known = not field or any(look_up(row, field) is not MISSING for row in rows)
        check_flag(known, flag, field, f"a field of {flags.data}: {described}")
        plain = not set(field) & set(",=")
        check_flag(plain, flag, field, "a field without , and =")
    if not (question or answer):
        problems = read_problems(rows, {})
        enough = len(problems) >= MIN_FRACTION * len(rows)
        if enough and any(problem.answer for problem in problems):
            return Selection(problems, {}, len(rows))
    question = question or choose_field(rows, QUESTIONS, answer)
    answer = answer or choose_field(rows, ANSWERS, question)
    fields = {"problem": question}
    if answer:
        values = [str(look_up(row, answer)) for row in rows]
        boxed = sum("\\boxed" in value for value in values) >= MIN_FRACTION * len(rows)
        fields["solution" if boxed else "answer"] = answer
    problems = read_problems(rows, fields) if question else []
    if not problems:
        raise ConfigError(
            f"--data = {flags.data!r}: none of its fields is known as a problem: "
            f"{described}; name two: --question=FIELD --answer=FIELD"
        )
    return Selection(problems, fields, len(rows))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def choose_folder(flags: Any, verifiable: bool) -> pathlib.Path:
    """Return the output folder. Raises `ConfigError` if it is unsuitable."""
    name = pathlib.PurePath(flags.data).name.partition(".")[0]
    folder = pathlib.Path(flags.out or re.sub(r"\W", "_", name))
    check_flag(not flags.out.startswith("~"), "out", flags.out, "a path; shells leave ~ there")
    importable = not folder.is_absolute() and all(part.isidentifier() for part in folder.parts)
    check_flag(
        verifiable or importable and bool(folder.parts),
        "out",
        str(folder),
        "a folder below this one, of letters, digits and _: Python imports its reward.py",
    )
    return folder


def _round_limit(lengths: list[int]) -> int:
    """Return a round token limit that 99 % of the lengths fit."""
    percentile = sorted(lengths)[-1 - len(lengths) // 100]
    return min(-(-percentile // TOKEN_MULTIPLE) * TOKEN_MULTIPLE, MAX_PROMPT_TOKENS)


def _count_tokens(model: str, texts: list[str]) -> list[int]:
    """Return token counts by the model's tokenizer; estimates if it is not downloaded yet."""
    from dapo_jax.data.prompts.tokenizer import Tokenizer

    if model == MODEL and not pathlib.Path(MODEL).exists():
        return [int(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
    tokenizer = Tokenizer.from_folder(model, "model")
    return [len(tokenizer.encode_prompt(text)) for text in texts]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def make_files(
    flags: Any, selection: Selection, folder: pathlib.Path, verifiable: bool
) -> dict[str, str]:
    """Return the contents of the files by name."""
    problems = selection.problems
    template = TEMPLATE if selection.has_answers else "{problem}\n"
    prompts = [template.replace("{problem}", problem.text) for problem in problems]
    lengths = _count_tokens(flags.model, prompts)
    prompt_tokens = _round_limit(lengths)
    solutions = _count_tokens(flags.model, [problem.solution for problem in problems])
    wanted = max(MIN_RESPONSE_TOKENS, 2 * _round_limit(solutions))
    response_tokens = min(wanted, MAX_RESPONSE_TOKENS)
    parts = _quote(f"{'.'.join(folder.parts)}.reward:score=1")
    data = {"source": flags.data, "template": str(folder / "template.txt")}
    if selection.fields:
        data["fields"] = ",".join(f"{key}={field}" for key, field in selection.fields.items())
    if max(lengths) > prompt_tokens:
        data["overlong_prompts"] = "drop"
    config = CONFIG.format(
        run_dir=_quote(f"runs/{folder.absolute().name}"),
        model=_quote(flags.model),
        data="\n".join(f"{' ' * 12}{name}={_quote(value)}," for name, value in data.items()),
        prompt=prompt_tokens,
        response=response_tokens,
        row=prompt_tokens + response_tokens,
        prompts=min(32, max(2, len(problems) // 2 * 2)),
        reward='verifier="math_label"' if verifiable else f'parts={parts}, correct="threshold"',
    )
    files = {"config.py": config, "template.txt": template}
    if not verifiable:
        files["reward.py"] = REWARD if selection.has_answers else REWARD_WITHOUT_ANSWERS
    return files


def write(folder: pathlib.Path, files: Mapping[str, str]) -> None:
    """Write new files. Raises `ConfigError` if one exists already."""
    existing = [str(folder / name) for name in files if os.path.lexists(folder / name)]
    allowed = f"a folder without {' and '.join(existing)}, which would be lost"
    check_flag(not existing, "out", str(folder), allowed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out = {str(folder)!r}: can't be written: {error}") from None


def init(flags: Any) -> int:
    """Write the files, print a summary, and return 0. Raises `ConfigError`."""
    selection = choose(read_first_rows(flags.data), flags)
    problems, kinds = selection.problems, selection.kinds()
    verifiable = sum(kinds[kind] for kind in VERIFIABLE) >= MIN_FRACTION * len(problems)
    folder = choose_folder(flags, verifiable)
    files = make_files(flags, selection, folder, verifiable)
    write(folder, files)
    first = problems[0]
    more = " and more" if selection.rows == MAX_ROWS else ""
    fields = ", ".join(f"{key} is {field!r}" for key, field in selection.fields.items())
    print(f"{flags.data}: {len(problems):,} problems of {selection.rows:,} rows{more}")
    print(f"  fields: {fields or 'of the usual names'}")
    print(f"  the first: {_short(first.text)!r}, answer {_short(first.answer)!r}")
    if kinds:
        print(f"  answers: {', '.join(f'{n:,} {kind}' for kind, n in kinds.most_common())}")
    if not verifiable:
        print(f"  no verifier fits, so {folder / 'reward.py'} is the reward: read and change it")
    print(f"wrote {', '.join(str(folder / name) for name in files)}. Next:")
    if flags.model == MODEL and not pathlib.Path(MODEL).exists():
        print(f"  hf download Qwen/{pathlib.Path(MODEL).name} --local-dir {MODEL}")
    command = f"dapo-jax train {shlex.quote(str(folder / 'config.py'))}"
    print(f"  {command} --dry-run\n  {command}")
    return 0


def main() -> int:
    """Run the command. Exit code 0: the files are written; 2: wrong arguments."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print((__doc__ or "").strip())
        return 0
    from dapo_jax.commands.checks import guarded

    parser = FlagParser(prog="dapo-jax init", add_help=False, allow_abbrev=False)
    for name in ("data", "out", "question", "answer"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("file", nargs="?", default="")
    flags = parser.parse_args()
    flags.data = flags.data or flags.file
    return guarded(lambda: init(flags))
