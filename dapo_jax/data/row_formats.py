"""Formats of rows, published or custom, by the fields of a row: from a row to a `Problem`."""

import contextlib
import datetime
import decimal
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.data.files import MalformedRow, NoAnswer
from dapo_jax.data.prompts.templates import DAPO
from dapo_jax.runtime.registry import feature
from dapo_jax.runtime.tool_calls import read_message
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Problem, WantedColumns, digest_json

Row = dict[str, Any]

_CALCULATOR = re.compile(r"<<.*?>>")  # GSM8K notes its calculations between the words
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DOLLARS = re.compile(r"(?<!\\)\$")
_LAST_PERIOD = re.compile(r"(?<!\.)\.\Z")
DAPO_BEFORE, DAPO_AFTER = DAPO.split("{problem}")
ID_FIELDS = ("unique_id", "id", "idx")
TOOLS = "tools"
# Keys of data.fields
FIELDS = ("problem", "answer", "solution", "system", "subject", "level", "tests", TOOLS)
PROBLEM_FIELDS = ("problem", "question", "prompt", "messages")  # in this order
ANSWER_FIELDS = {"answer", "solution", "final_answer", "reward_model"}
NO_COLUMNS = WantedColumns()
CALL_ARGUMENTS = {"prompt", "answer"}  # reward functions receive these without asking
MAX_COLUMNS_BYTES = 1 << 20  # of a row, as JSON; each call of a worker receives them
ROLES = ("user", "assistant", "tool")  # after an optional first message of the role 'system'
MAY_BE_EMPTY = ("system", "tool")
MISSING = object()
KNOWN = (
    "a row has problem, question, prompt or messages, and answer or solution (or prompt and "
    "reward_model, or question and final_answer); config.data.fields names others, as in "
    "problem=FIELD,answer=FIELD; a reward that does not compare answers needs none"
)


class UnknownFields(MalformedRow):
    """Row without a known field for the problem or the answer."""

    hint = KNOWN


def parse_fields(setting: str, text: str, allowed: Sequence[str]) -> dict[str, str]:
    """Return fields by key from 'problem=question,answer=meta.gold'; may raise `ConfigError`."""
    pairs = [entry.partition("=") for entry in text.split(",")] if text.strip() else []
    fields = {key.strip(): field.strip() for key, _, field in pairs}
    fits = len(fields) == len(pairs) and all(fields.values()) and fields.keys() <= set(allowed)
    keys = f"each key once; the keys are {', '.join(allowed)}"
    require(fits, setting, text, f"KEY=FIELD, comma-separated, {keys}")
    return fields


def look_up(row: Any, path: str) -> Any:
    """Return the value at a dotted path, or of a name that contains dots; else `MISSING`."""
    if isinstance(row, list) and path.partition(".")[0].isdecimal():
        row = {str(index): value for index, value in enumerate(row)}
    if not isinstance(row, dict):
        return MISSING
    if path in row:
        return row[path]
    first, _, rest = path.partition(".")
    return look_up(row[first], rest) if rest and first in row else MISSING


def take_fields(row: Any, fields: Mapping[str, str]) -> Row:
    """Return the row's values by key of `fields`; raise `MalformedRow` if a path is missing."""
    if not isinstance(row, dict):
        raise MalformedRow(f"is {type(row).__name__}, not an object with named fields")
    values = {key: look_up(row, path) for key, path in fields.items()}
    for key, value in values.items():
        if value is MISSING:
            raise MalformedRow(f"has no field {fields[key]!r}; it has {', '.join(row) or 'none'}")
    return values


def check_text(value: Any, field: str) -> str:
    """Return the text unchanged; raise `MalformedRow` if it is no text, or empty."""
    if not isinstance(value, str):
        raise MalformedRow(f"{field} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedRow(f"{field} holds half of a surrogate pair") from None
    if not value.strip():
        raise MalformedRow(f"{field} is empty")
    return value


def _jsonable(value: Any) -> Any:
    """Return a date or time as text, a decimal as a float, or as text if that would round it."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        number = float(value)
        return number if decimal.Decimal(repr(number)) == value else str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _select_columns(row: Row, wanted: WantedColumns) -> Row:
    """Return the columns that reward functions take; raise `MalformedRow` if one is missing."""
    for name in sorted(wanted.required):
        if name not in row:
            raise MalformedRow(
                f"has no column {name!r}, which rewards or teachers take; it has {', '.join(row)}"
            )
    names = set(row) - CALL_ARGUMENTS if wanted.every else wanted.required | wanted.optional
    return {name: value for name, value in row.items() if name in names}


def _check_columns(columns: Row, wanted: WantedColumns) -> None:
    try:
        if wanted.check:
            wanted.check(columns)
    except (ValueError, SyntaxError) as error:
        raise MalformedRow(str(error)) from None


def _pack_columns(columns: Row) -> str:
    """Return the JSON of columns; raise `MalformedRow` for other values, or too many bytes."""
    for name, value in columns.items():
        try:
            json.dumps(value, default=_jsonable)
        except (TypeError, ValueError, RecursionError) as error:
            raise MalformedRow(f"the column {name!r}, for a reward function: {error}") from None
    text = json.dumps(columns, default=_jsonable) if columns else ""
    if len(text) > MAX_COLUMNS_BYTES:
        raise MalformedRow(
            f"the columns {', '.join(columns)} have {len(text):,} bytes as JSON; reward functions "
            f"take at most {MAX_COLUMNS_BYTES:,}: let them name fewer, or hold a path to the rest"
        )
    return text


def _holds_object(value: Any) -> bool:
    is_list = isinstance(value, list | tuple)
    return isinstance(value, dict) or is_list and any(map(_holds_object, value))


def _number(value: int | float | decimal.Decimal) -> str:
    """Return a numeral as a person writes it: 27.0 is 27."""
    exact = decimal.Decimal(repr(value) if isinstance(value, float) else value)
    if not exact.is_finite():
        return str(value)
    return str(int(exact)) if exact == int(exact) else f"{exact:f}".rstrip("0")


def _canonical(value: Any, nested: bool = False) -> Any:
    """Return a value that is equal for equal rows of all formats: without what is empty.

    A number in a column of its own is its text, as in CSV; inside of a value it stays a number.
    """
    if isinstance(value, dict):
        items = {key: _canonical(item, nested) for key, item in value.items()}
        return {key: item for key, item in items.items() if item not in (None, "", {})}
    if isinstance(value, list | tuple):
        return [_canonical(item, True) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float | decimal.Decimal):
        return [_number(value)] if nested else _number(value)
    return getattr(value, "isoformat", value.__str__)()


def _canonical_row(row: Row) -> Row:
    nested = {key: _canonical(value, isinstance(value, dict)) for key, value in row.items()}
    return {key: value for key, value in nested.items() if value not in (None, "", {})}


def _answer(value: Any, field: str = "answer") -> str | None:
    """Return a gold answer without dollar signs, several joined by commas; None if it is empty."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        raise MalformedRow(
            f"{field} is an object, which no verifier compares: with a reward function, set "
            "reward.correct to threshold or spread"
        )
    if isinstance(value, list | tuple) and value:
        answers = [_answer(part, field) for part in value]
        return None if None in answers else ", ".join(map(str, answers))
    if isinstance(value, int | float | decimal.Decimal):
        if not decimal.Decimal(value).is_finite():
            raise MalformedRow(f"{field} is {value}, not a finite number")
        return _number(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if not value or isinstance(value, str) and not _DOLLARS.sub("", value).strip():
        return None
    text = _DOLLARS.sub("", check_text(value, field)).strip()
    return _LAST_PERIOD.sub("", text) or text


def _optional(row: Row, *fields: str) -> str:
    """Return the first of these fields that is not blank; join a list as paragraphs."""
    for field in fields:
        value = row.get(field, "")
        value = _number(value) if isinstance(value, float) else value
        text = "\n\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        if value is not None and text.strip():
            return text.encode("utf-8", "replace").decode()
    return ""


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls that Parquet has for keys of other rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def read_messages(value: Sequence[Any], field: str) -> list[Row]:
    """Return the messages of a conversation; raise `MalformedRow` for others, or empty ones."""
    messages = []
    for item in value:
        try:
            message = read_message(_without_nulls(item))
        except ValueError as error:
            raise MalformedRow(f"{field}: {error}") from None
        if message.get("weight", 1) != 1:
            raise MalformedRow(f"{field}: weight = {message['weight']!r}: every answer is trained")
        if "function_call" in message:
            raise MalformedRow(f"{field}: function_call is read as tool_calls alone: rename it")
        role, content = message["role"], message.get("content", "")
        if content or not (role in MAY_BE_EMPTY or "tool_calls" in message):
            check_text(content, f"the {role}'s message in {field}")
        messages.append(message)
    return messages


def read_tools(row: Row, field: str = TOOLS) -> list[Row]:
    """Return the functions that a row offers, from a list or its JSON; may raise `MalformedRow`."""
    value = row.get(field) or []
    with contextlib.suppress(ValueError, RecursionError):
        tools = json.loads(value) if isinstance(value, str) else _without_nulls(value)
        if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
            return tools
    raise MalformedRow(f"{field} is {value!r:.40}: must be a list of functions, as objects")


def _problem(row: Row, field: str) -> dict[str, Any]:
    """Read a problem from a text, or from the last user message of a conversation.

    Calls of tools and their results after it are shown too, unless an answer follows them.
    """
    if not isinstance(row[field], list | tuple):
        return {"text": check_text(row[field], field)}
    messages = read_messages(row[field], field)
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise MalformedRow(f"{field} has no message of the role 'user'")
    if other := set(roles) - set(ROLES):
        raise MalformedRow(f"{field} has messages of the role {min(other)!r}: no template shows it")
    last = len(roles) - 1 - roles[::-1].index("user")
    is_answered = roles[-1] == "assistant"
    shown = messages[: last + 1] if is_answered else messages
    is_plain = roles[-1] != "tool" and all(len(message) == 2 for message in shown)
    return {
        "text": messages[last]["content"],
        "system": system,
        "turns": tuple((m["role"], m.get("content", "")) for m in messages[:last]),
        "solution": messages[-1].get("content", "") if is_answered else "",
        "messages": "" if is_plain else json.dumps(shown, default=_jsonable),
    }


def _dapo(row: Row) -> dict[str, Any]:
    """Read DAPO-Math-17k's schema: a chat prompt, with the gold answer in `reward_model`."""
    gold = row["reward_model"]
    extra = row.get("extra_info")
    if not isinstance(gold, dict):
        raise MalformedRow("reward_model is not an object with a ground_truth")
    problem = _problem(row, "prompt")
    text = problem["text"]
    if text.startswith(DAPO_BEFORE) and text.endswith(DAPO_AFTER):
        problem["text"] = text[len(DAPO_BEFORE) : -len(DAPO_AFTER)]
    return problem | {
        "answer": _answer(gold.get("ground_truth"), "ground_truth"),
        "source": _optional(row, "data_source"),
        "subject": _optional(row, "ability"),
        "id": _optional(extra if isinstance(extra, dict) else {}, "index"),
    }


def _olympiad_bench(row: Row) -> dict[str, Any]:
    """Read OlympiadBench. Units stay out of the answer: a verifier may ignore a missing one."""
    question, context = check_text(row["question"], "question"), _optional(row, "context")
    return {
        "text": f"{context}\n\n{question}" if context else question,
        "answer": _answer(row["final_answer"], "final_answer"),
        "subject": _optional(row, "subfield"),
        "solution": _optional(row, "solution"),
    }


def _answer_of_solution(solution: str) -> str | None:
    """Return the answer in the last box of a worked solution, else after its `####`."""
    box = feature("extraction").extract(solution, "box").text
    if box is not None or "####" not in solution:
        return _answer(box)
    answer = _answer(solution.rpartition("####")[2])
    return answer and _THOUSANDS.sub("", answer)


def _plain(row: Row, fields: Mapping[str, str]) -> dict[str, Any]:
    """Read GSM8K (an answer with `####`), MATH, Minerva, AIME, AMC or a custom row."""

    def optional(key: str, *usual: str) -> str:
        return _optional(row, *([fields[key]] if key in fields else usual or [key]))

    first = fields.get("problem") or next(name for name in PROBLEM_FIELDS if name in row)
    problem = _problem(row, first)
    solution = optional("solution") or problem.get("solution", "")
    name = fields.get("answer", "answer")
    value = row.get(name)
    if isinstance(value, str) and "####" in value:
        answer = _answer_of_solution(value)
        solution = _CALCULATOR.sub("", value.rpartition("####")[0]).removesuffix("\n")
    else:
        answer = _answer(value, name) or _answer_of_solution(solution)
    return problem | {
        "answer": answer,
        "solution": solution,
        "system": optional("system") or problem.get("system", ""),
        "subject": optional("subject", "subject", "type"),
        "level": optional("level").removeprefix("Level "),
    }


def _read(row: Row, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes of `Problem` that a row holds, by lower-case or mapped names."""
    if not fields and row.keys() >= {"prompt", "reward_model"}:
        return _dapo(row)
    if not fields and row.keys() >= {"question", "final_answer"}:
        return _olympiad_bench(row)
    if "problem" not in fields and not row.keys() & set(PROBLEM_FIELDS):
        raise UnknownFields(f"no field is known as the problem: {', '.join(row) or 'it has none'}")
    return _plain(row, fields)


def read_row(
    row: Any,
    source: str,
    number: int | str,
    fields: Mapping[str, str] | None = None,
    needs_answer: bool = True,
    columns: WantedColumns = NO_COLUMNS,
) -> Problem:
    """Return the problem of a row; raise `MalformedRow`, or `NoAnswer` if it needs one.

    An object as answer is kept for the reward functions, unless a verifier needs the answer.

    Args:
        source: name of the data set, for the id.
        number: id of a row that has none.
        fields: names of fields by key; each must exist, and no other format is tried.
        columns: columns that reward functions take.
    """
    fields = fields or {}
    values = take_fields(row, fields)
    by_name = {name.lower(): row[name] for name in sorted(row, key=str.islower)}  # the last wins
    named = by_name | {fields[key]: value for key, value in values.items()}
    taken = _select_columns(row | {k: values[k] for k in values if k == "tests"}, columns)
    _check_columns(taken, columns)
    name = fields.get("answer", "answer")
    if _holds_object(named.get(name)) and not needs_answer:
        taken["answer"] = named.pop(name)
    attributes = _read(named, fields)
    tools = read_tools(named, fields.get(TOOLS, TOOLS))
    attributes["tools"] = json.dumps(tools, default=_jsonable) if tools else ""
    attributes["columns"] = _pack_columns(taken)
    if attributes["answer"] is None and needs_answer:
        if attributes["solution"] or "answer" in fields or by_name.keys() & ANSWER_FIELDS:
            raise NoAnswer
        raise UnknownFields(f"no field is known as the answer: {', '.join(row)}")
    if "answer" in taken:
        attributes["answer"] = json.dumps(taken["answer"], default=_jsonable)
    attributes["answer"] = attributes["answer"] or ""
    name = attributes.pop("id", "") or _optional(by_name, *ID_FIELDS) or number
    source_name = attributes.pop("source", "") or source
    try:
        digest = digest_json(_canonical_row(row))
    except RecursionError:
        raise MalformedRow("is nested too deeply") from None
    return Problem(f"{source}-{name}", source=source_name, row=digest, **attributes)
