"""One row of a published data set, in any of its known formats, as a problem.

A format is recognised by the fields of the row, never by the name of the file.
"""

import decimal
import re
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.experiment.settings import require
from dapo_jax.prompts.templates import DAPO
from dapo_jax.structs import Problem
from dapo_jax.verifier.extraction import extract

Row = dict[str, Any]

_CALCULATOR = re.compile(r"<<.*?>>")  # GSM8K notes its calculations between the words
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DOLLARS = re.compile(r"(?<!\\)\$")
_LAST_PERIOD = re.compile(r"(?<!\.)\.\Z")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED = re.compile(r"[^\s${}]+")
BEFORE, AFTER = DAPO.split("{problem}")
ID_FIELDS = ("unique_id", "id", "idx")


class MalformedRow(ValueError):
    """A row that can't be read; the message says why."""


class NoAnswer(Exception):
    """A well-formed row whose data set gives no answer to compare with."""


def parse_fields(setting: str, text: str, allowed: Sequence[str]) -> dict[str, str]:
    """Which field of a row is what: {'answer': 'meta.gold'} of 'answer=meta.gold', {} of nothing.

    Args:
        setting: that says so, for the error.
        allowed: what a field may be.

    Raises `ConfigError` for text that is something else.
    """
    entries = [entry.partition("=") for entry in text.split(",")] if text else []
    found = {key.strip(): field.strip() for key, _, field in entries}
    require(
        len(found) == len(entries) and all(found.values()) and found.keys() <= set(allowed),
        setting,
        text,
        f"KEY=FIELD, comma-separated, each key once: {', '.join(allowed)}",
    )
    return found


def _text(row: Row, field: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise MalformedRow(f"{field} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedRow(f"{field} holds half of a surrogate pair") from None
    if not value.strip():
        raise MalformedRow(f"{field} is empty")
    return value.strip()


def _number(value: int | float | decimal.Decimal) -> str:
    """As a person writes it: 27.0 is 27."""
    exact = decimal.Decimal(repr(value) if isinstance(value, float) else value)
    if not exact.is_finite():
        raise MalformedRow(f"answer is {value}, not a finite number")
    return str(int(exact)) if exact == int(exact) else f"{exact.normalize():f}"


def _answer(row: Row, field: str) -> str:
    """The gold answer as text, without mathematics' dollar signs. Several are a comma's list."""
    value = row.get(field)
    if isinstance(value, list | tuple) and value:
        return ", ".join(_answer({field: part}, field) for part in value)
    if isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool):
        return _number(value)
    if not value:
        raise NoAnswer
    text = _DOLLARS.sub("", _text(row, field)).strip()
    if not text:
        raise NoAnswer
    return _LAST_PERIOD.sub("", text) or text


def _optional(row: Row, *fields: str) -> str:
    """The first of these fields that says something; a list is several paragraphs."""
    for field in fields:
        value = row.get(field)
        if isinstance(value, list | tuple):
            value = "\n\n".join(map(str, value))
        if value is not None and str(value).strip():
            return str(value).strip().encode("utf-8", "replace").decode()
    return ""


def _dapo(row: Row) -> dict[str, str]:
    """DAPO-Math-17k and its kind: a chat prompt, with the gold answer in `reward_model`."""
    messages = row["prompt"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    asked = [m for m in messages or () if isinstance(m, dict) and m.get("role") == "user"]
    if not asked:
        raise MalformedRow("prompt has no message of the role 'user'")
    gold, extra = row["reward_model"], row.get("extra_info")
    if not isinstance(gold, dict):
        raise MalformedRow("reward_model is not an object with a ground_truth")
    text = _text({"prompt": asked[-1].get("content")}, "prompt")
    if text.startswith(BEFORE) and text.endswith(AFTER):
        text = text[len(BEFORE) : -len(AFTER)].strip()
    return {
        "text": text,
        "answer": _answer(gold, "ground_truth"),
        "source": _optional(row, "data_source"),
        "subject": _optional(row, "ability"),
        "id": _optional(extra if isinstance(extra, dict) else {}, "index"),
    }


def _olympiad_bench(row: Row) -> dict[str, str]:
    """OlympiadBench. Units stay out of the answer: a verifier may ignore one that is missing."""
    context = _optional(row, "context")
    return {
        "text": f"{context}\n\n{_text(row, 'question')}".strip(),
        "answer": _answer(row, "final_answer"),
        "subject": _optional(row, "subfield"),
        "solution": _optional(row, "solution"),
    }


def _math(row: Row) -> dict[str, str]:
    """MATH, Minerva, AIME, AMC and plain rows: `answer`, else the last box of `solution`."""
    solution = _optional(row, "solution")
    try:
        answer = _answer(row, "answer")
    except NoAnswer:
        answer = _answer({"answer": extract(solution, "box").text}, "answer")
    return {
        "text": _text(row, "problem"),
        "answer": answer,
        "subject": _optional(row, "subject", "type"),
        "level": _optional(row, "level").removeprefix("Level "),
        "solution": solution,
    }


def _question(row: Row) -> dict[str, str]:
    """GSM8K, whose answer is a worked solution that ends in `#### 42`; or a plain answer."""
    text, answer = _text(row, "question"), _answer(row, "answer")
    if "####" not in answer:
        return {"text": text, "answer": answer}
    solution, _, final = row["answer"].rpartition("####")
    return {
        "text": text,
        "answer": _THOUSANDS.sub("", _answer({"answer": final}, "answer")),
        "solution": _CALCULATOR.sub("", solution).strip(),
    }


# The fields that tell a format, and its reader. The first that fits is taken.
FORMATS: tuple[tuple[set[str], Callable[[Row], dict[str, str]]], ...] = (
    ({"prompt", "reward_model"}, _dapo),
    ({"question", "final_answer"}, _olympiad_bench),
    ({"problem", "answer"}, _math),
    ({"problem", "solution"}, _math),
    ({"question", "answer"}, _question),
)


def read_row(row: Any, source: str, number: int | str) -> Problem:
    """The problem of a row.

    Args:
        number: makes the id of a row that brings none.

    Raises:
        MalformedRow: it fits no format, or a field holds what it must not.
        NoAnswer: it has no answer, as proofs have none.
    """
    if not isinstance(row, dict):
        raise MalformedRow(f"is {type(row).__name__}, not an object with named fields")
    row = {name.lower(): value for name, value in row.items()}
    for needed, read in FORMATS:
        if needed <= row.keys():
            found = read(row)
            number = found.pop("id", "") or _optional(row, *ID_FIELDS) or number
            return Problem(f"{source}-{number}", source=found.pop("source", "") or source, **found)
    raise MalformedRow(f"its fields fit no known format: {', '.join(row) or 'none'}")
