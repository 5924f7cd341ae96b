"""Write a config, a template and, if no verifier fits, a reward function for a file of problems.

    dapo-jax init my.jsonl
    dapo-jax init my.csv --question=ask --answer=meta.gold --out=mine --model=models/small

reads a jsonl, json, csv, parquet or arrow file, chooses the fields of the problem and its answer,
and measures their lengths. It replaces no file.
"""

import collections
import itertools
import json
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.commands import command_line
from dapo_jax.config.experiment import InitConfig
from dapo_jax.runtime.settings import ConfigError, naming, require
from dapo_jax.structs import Problem

MODEL = InitConfig().model
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
MAX_DEPTH = 4  # of nested fields
MAX_ITEMS = 4  # of a list whose fields are listed

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

from dapo_jax import Config, Data, Model, Packing, Reward, Rollout, Sampler


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

    require(bool(name), "data", name, "a file: dapo-jax init FILE")
    require(not set(name) & set(",="), "data", name, "a name without , and =")
    files = find_files("data", name, Data().folder, "train")
    every_row = itertools.chain.from_iterable(read_rows(epath.Path(file)) for file in files)
    with naming("data", name):
        rows = [row for _, row in itertools.islice(every_row, MAX_ROWS)]
    objects = [row for row in rows if isinstance(row, dict)]
    reason = "it has no rows"
    if rows:
        wrong = rows[0] if isinstance(rows[0], Exception) else f"is {type(rows[0]).__name__}"
        reason = f"its first row {wrong}"
    require(bool(objects), "data", name, f"rows with named fields: {reason}")
    return objects


def read_problems(
    rows: list[dict[str, Any]], fields: Mapping[str, str]
) -> tuple[list[Problem], str]:
    """Return the problems of the readable rows (answers may be empty), and the first error."""
    from dapo_jax.data.files import MalformedRow, NoAnswer
    from dapo_jax.data.row_formats import read_row

    problems, errors = [], []
    for number, row in enumerate(rows, 1):
        try:
            problems.append(read_row(row, "row", number, fields, needs_answer=False))
        except (MalformedRow, NoAnswer) as error:
            errors.append(f"row {number}: {error}")
    return problems, (errors or [""])[0]


def list_fields(row: Any, prefix: str = "", depth: int = 1) -> dict[str, Any]:
    """Return the values of a row by dotted path, without those of messages."""
    items = row.items() if isinstance(row, dict) else enumerate(row[:MAX_ITEMS])
    fields: dict[str, Any] = {}
    for name, value in items:
        first = value[0] if isinstance(value, list) and value else None
        is_messages = isinstance(first, dict) and "role" in first
        is_nested = isinstance(value, dict) and value or isinstance(first, dict)
        if is_nested and not is_messages and depth < MAX_DEPTH:
            fields |= list_fields(value, f"{prefix}{name}.", depth + 1)
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def choose_field(rows: list[dict[str, Any]], names: Sequence[str], taken: str = "") -> str:
    """Return the path of the first of `names` that most rows have a value for.

    A field of the row itself takes precedence over nested fields.
    """
    from dapo_jax.data.row_formats import MISSING, look_up

    paths = dict.fromkeys(path for row in rows for path in list_fields(row) if path != taken)
    last = {path: path.lower().rpartition(".")[2] for path in paths}
    likely = [path for path in paths if last[path] in names]
    for path in sorted(likely, key=lambda path: (path.count("."), names.index(last[path]))):
        values = [look_up(row, path) for row in rows]
        filled = sum(value not in (MISSING, None, "", [], {}) for value in values)
        if filled >= MIN_FRACTION * len(rows):
            return path
    return ""


def choose(rows: list[dict[str, Any]], flags: InitConfig) -> Selection:
    """Select problems by the named fields, else by the usual names, else by likely names.

    Raises:
        ConfigError: no field fits; the message lists the fields.
    """
    from dapo_jax.data.row_formats import MISSING, look_up

    question, answer = flags.question, flags.answer
    fields = list_fields(rows[0])
    described = ", ".join(f"{name} ({_short(str(value))})" for name, value in fields.items())
    for flag, field in (("question", question), ("answer", answer)):
        known = not field or any(look_up(row, field) is not MISSING for row in rows)
        require(known, flag, field, f"a field of {flags.data}: {described}")
        require(not set(field) & set(",="), flag, field, "a field without , and =")
    if not (question or answer):
        problems, _ = read_problems(rows, {})
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
    problems, error = read_problems(rows, fields) if question else ([], "")
    if not problems:
        reason = f" ({error})" * bool(error)
        raise ConfigError(
            f"config.data = {flags.data!r}: none of its fields is known as a problem{reason}: "
            f"{described}; name two: --question=FIELD --answer=FIELD, each a text, a number or a "
            "list of messages with role and content"
        )
    return Selection(problems, fields, len(rows))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."


def choose_folder(flags: InitConfig, verifiable: bool) -> pathlib.Path:
    """Return the output folder. Raises `ConfigError` if it is unsuitable."""
    name = pathlib.PurePath(flags.data).name.partition(".")[0]
    folder = pathlib.Path(flags.out or re.sub(r"\W", "_", name))
    require(not flags.out.startswith("~"), "out", flags.out, "a path; shells leave ~ there")
    importable = not folder.is_absolute() and all(part.isidentifier() for part in folder.parts)
    allowed = "a folder below this one, of letters, digits and _: Python imports its reward.py"
    require(verifiable or importable and bool(folder.parts), "out", str(folder), allowed)
    return folder


def _round_limit(lengths: list[int]) -> int:
    """Return a round token limit that 99 % of the lengths fit."""
    percentile = sorted(lengths)[-1 - len(lengths) // 100]
    return min(-(-percentile // TOKEN_MULTIPLE) * TOKEN_MULTIPLE, MAX_PROMPT_TOKENS)


def token_counter(folder: str) -> Callable[[list[str]], list[int]]:
    """Return a function that counts the tokens of texts: estimates without the default model.

    Raises `ConfigError` if there is no other model.
    """
    from dapo_jax.data.policies import model_path
    from dapo_jax.data.prompts.tokenizer import Tokenizer
    from dapo_jax.model.load_huggingface import check_weights

    if folder == MODEL and not pathlib.Path(MODEL).exists():
        return lambda texts: [int(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
    allowed = f"a model folder: hf download OWNER/NAME --local-dir {folder}"
    require(model_path(folder, "model").exists(), "model", folder, allowed)
    tokenizer = Tokenizer.from_folder(folder, "model")
    check_weights(folder, "model")
    return lambda texts: [len(tokenizer.encode_prompt(text)) for text in texts]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def make_files(
    flags: InitConfig, selection: Selection, folder: pathlib.Path, verifiable: bool
) -> dict[str, str]:
    """Return the contents of the files by name."""
    problems, count_tokens = selection.problems, token_counter(flags.model)
    template = TEMPLATE if selection.has_answers else "{problem}\n"
    prompts = [template.replace("{problem}", problem.text) for problem in problems]
    lengths = count_tokens(prompts)
    prompt_tokens = _round_limit(lengths)
    solutions = count_tokens([problem.solution for problem in problems])
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
    require(not existing, "out", str(folder), allowed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config.out = {str(folder)!r}: can't be written: {error}") from None


def init(flags: InitConfig) -> None:
    """Write the files, and print a summary. Raises `ConfigError`."""
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
    if flags.model == MODEL and not pathlib.Path(MODEL).exists():
        print(
            f"  {MODEL} does not exist yet, so the token limits are estimates. Download it first:"
        )
        print(f"    hf download Qwen/{pathlib.Path(MODEL).name} --local-dir {MODEL}")
    print(f"wrote {', '.join(str(folder / name) for name in files)}. Next:")
    command = f"dapo-jax train {shlex.quote(str(folder / 'config.py'))}"
    print(f"  {command} --dry-run\n  {command}")


def main() -> int:
    """Run the command. Exit code 0: the files are written; 2: wrong arguments."""
    return command_line.run(InitConfig, __doc__, init, single_process="dapo-jax init")
