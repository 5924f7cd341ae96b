"""Formats of rows, published or a user's own: from a row to a `Problem`.

A format is recognised by the fields of the row, never by the name of the file. `data.fields` maps
fields of other names.
"""

import decimal
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.data.prompts.templates import DAPO
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.structs import Problem
from dapo_jax.verifier.extraction import extract

Row = dict[str, Any]

_CALCULATOR = re.compile(r"<<.*?>>")  # GSM8K notes its calculations between the words
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_DOLLARS = re.compile(r"(?<!\\)\$")
_LAST_PERIOD = re.compile(r"(?<!\.)\.\Z")
BEFORE, AFTER = DAPO.split("{problem}")
ID_FIELDS = ("unique_id", "id", "idx")
FIELDS = ("problem", "answer", "solution", "system", "subject", "level")  # keys of data.fields
ASKING = ("problem", "question", "prompt", "messages")  # the first that a row has is its problem
ANSWERING = {"answer", "solution", "final_answer", "reward_model"}
ROLES = ("user", "assistant")  # besides a first message of the role 'system'
MISSING = object()
SHOWN_COMPLAINTS = 3  # about malformed rows, in a message
KNOWN = (
    "a row has problem, question, prompt or messages, and answer or solution (or prompt and "
    "reward_model, or question and final_answer); config.data.fields names others, as in "
    "problem=FIELD,answer=FIELD; a reward that compares with no answer needs none"
)


class MalformedRow(ValueError):
    """Row that can't be read; the message says why."""


class UnknownFields(MalformedRow):
    """Row without a known field for the problem or the answer; `KNOWN` lists known fields."""


class NoAnswer(Exception):
    """Well-formed row without an answer to compare with."""


def parse_fields(setting: str, text: str, allowed: Sequence[str]) -> dict[str, str]:
    """Fields by key, from 'problem=question,answer=meta.gold'; none from an empty text.

    Args:
        setting: name of the setting, for the error.
        allowed: keys that may occur.

    Raises:
        ConfigError: the text has another form, or another key.
    """
    pairs = [entry.partition("=") for entry in text.split(",")] if text.strip() else []
    fields = {key.strip(): field.strip() for key, _, field in pairs}
    require(
        len(fields) == len(pairs) and all(fields.values()) and fields.keys() <= set(allowed),
        setting,
        text,
        f"KEY=FIELD, comma-separated, each key once; the keys are {', '.join(allowed)}",
    )
    return fields


def look_up(row: Any, path: str) -> Any:
    """Value of a row at a dotted path, or under a name with dots in it; else `MISSING`."""
    if isinstance(row, list) and path.partition(".")[0].isdecimal():
        row = {str(place): value for place, value in enumerate(row)}
    if not isinstance(row, dict):
        return MISSING
    if path in row:
        return row[path]
    first, _, rest = path.partition(".")
    return look_up(row[first], rest) if rest and first in row else MISSING


def check_text(value: Any, field: str) -> str:
    """Text of a field as it stands. Raises `MalformedRow` where it is no text, or empty."""
    if not isinstance(value, str):
        raise MalformedRow(f"{field} is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedRow(f"{field} holds half of a surrogate pair") from None
    if not value.strip():
        raise MalformedRow(f"{field} is empty")
    return value


def check_malformed(count: int, limit: int, complaints: Sequence[str]) -> None:
    """Raises `ConfigError`, with the first complaints, for more malformed rows than the limit."""
    if count > limit:
        shown = "; ".join(complaints[:SHOWN_COMPLAINTS])
        raise ConfigError(
            f"config.data.bad_rows_limit = {limit}: more rows are malformed: {shown}"
        ) from None


def _text(row: Row, field: str) -> str:
    return check_text(row[field], field).strip()


def _number(value: int | float | decimal.Decimal) -> str:
    """Numeral as a person writes it: 27.0 is 27."""
    exact = decimal.Decimal(repr(value) if isinstance(value, float) else value)
    if not exact.is_finite():
        raise MalformedRow(f"answer is {value}, not a finite number")
    return str(int(exact)) if exact == int(exact) else f"{exact.normalize():f}"


def _answer(row: Row, field: str) -> str | None:
    """Gold answer as text, without mathematics' dollar signs; several are joined by commas.

    None where there is none.
    """
    value = row.get(field)
    if isinstance(value, bool):  # as JSON writes it
        return str(value).lower()
    if isinstance(value, list | tuple) and value:
        parts = [_answer({field: part}, field) for part in value]
        answers = [part for part in parts if part is not None]
        return ", ".join(answers) if len(answers) == len(parts) else None
    if isinstance(value, int | float | decimal.Decimal):
        return _number(value)
    if not value or isinstance(value, str) and not _DOLLARS.sub("", value).strip():
        return None
    text = _DOLLARS.sub("", _text(row, field)).strip()
    return _LAST_PERIOD.sub("", text) or text


def _optional(row: Row, *fields: str) -> str:
    """First of these fields that is not empty; a list is several paragraphs."""
    for field in fields:
        value = row.get(field)
        if isinstance(value, list | tuple):
            value = "\n\n".join(map(str, value))
        if value is not None and str(value).strip():
            return str(value).strip().encode("utf-8", "replace").decode()
    return ""


def _message(message: Any, field: str) -> tuple[str, str]:
    """(role, text) of a message, whose content may be a list of parts of text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise MalformedRow(f"{field} holds something that is no message with role and content")
    role, content = message["role"], message.get("content")
    if isinstance(content, list | tuple):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if role == "system" and content == "":
        return role, content
    return role, check_text(content, f"{field}: the content of {role!r}").strip()


def _asked(row: Row, field: str) -> dict[str, Any]:
    """Problem of a text, or of a conversation: its last user message, system message and turns."""
    if not isinstance(row[field], list | tuple):
        return {"text": _text(row, field)}
    messages = [_message(message, field) for message in row[field]]
    system = messages.pop(0)[1] if messages and messages[0][0] == "system" else ""
    roles = [role for role, _ in messages]
    if "user" not in roles:
        raise MalformedRow(f"{field} has no message of the role 'user'")
    if other := set(roles) - set(ROLES):
        raise MalformedRow(f"{field} has messages of the role {min(other)!r}, which none can show")
    last = len(roles) - 1 - roles[::-1].index("user")
    solution = messages[-1][1] if last + 1 < len(messages) else ""
    turns = tuple(messages[:last])
    return {"text": messages[last][1], "system": system, "turns": turns, "solution": solution}


def _dapo(row: Row) -> dict[str, Any]:
    """DAPO-Math-17k and its kind: a chat prompt, with the gold answer in `reward_model`."""
    gold, extra = row["reward_model"], row.get("extra_info")
    if not isinstance(gold, dict):
        raise MalformedRow("reward_model is not an object with a ground_truth")
    asked = _asked(row, "prompt")
    if asked["text"].startswith(BEFORE) and asked["text"].endswith(AFTER):
        asked["text"] = asked["text"][len(BEFORE) : -len(AFTER)].strip()
    return asked | {
        "answer": _answer(gold, "ground_truth"),
        "source": _optional(row, "data_source"),
        "subject": _optional(row, "ability"),
        "id": _optional(extra if isinstance(extra, dict) else {}, "index"),
    }


def _olympiad_bench(row: Row) -> dict[str, Any]:
    """OlympiadBench. Units stay out of the answer: a verifier may ignore one that is missing."""
    context = _optional(row, "context")
    return {
        "text": f"{context}\n\n{_text(row, 'question')}".strip(),
        "answer": _answer(row, "final_answer"),
        "subject": _optional(row, "subfield"),
        "solution": _optional(row, "solution"),
    }


def _worked(solution: str) -> str | None:
    """Answer of a worked solution: in its last box, else behind its `####`."""
    box = extract(solution, "box").text
    if box is not None or "####" not in solution:
        return _answer({"answer": box}, "answer")
    answer = _answer({"answer": solution.rpartition("####")[2]}, "answer")
    return answer and _THOUSANDS.sub("", answer)


def _plain(row: Row, fields: Mapping[str, str]) -> dict[str, Any]:
    """GSM8K, MATH, Minerva, AIME, AMC and one's own: a problem, and its answer or its solution.

    An answer with `#### 42` in it is a solution, as in GSM8K.

    Args:
        fields: names that differ from the usual ones, by key.
    """

    def optional(key: str, *usual: str) -> str:
        return _optional(row, *([fields[key]] if key in fields else usual or [key]))

    asked = _asked(row, fields.get("problem") or next(name for name in ASKING if name in row))
    solution = optional("solution") or asked.get("solution", "")
    name = fields.get("answer", "answer")
    if isinstance(row.get(name), str) and "####" in row[name]:
        answer = _worked(row[name])
        solution = _CALCULATOR.sub("", row[name].rpartition("####")[0]).strip()
    else:
        answer = _answer(row, name) or _worked(solution)
    return asked | {
        "answer": answer,
        "solution": solution,
        "system": optional("system") or asked.get("system", ""),
        "subject": optional("subject", "subject", "type"),
        "level": optional("level").removeprefix("Level "),
    }


# The fields that tell a format that is not plain, and its reader.
FORMATS: tuple[tuple[set[str], Callable[[Row], dict[str, Any]]], ...] = (
    ({"prompt", "reward_model"}, _dapo),
    ({"question", "final_answer"}, _olympiad_bench),
)


def _read(row: Row, fields: Mapping[str, str]) -> dict[str, Any]:
    """Attributes of `Problem` that a row holds. Raises `MalformedRow`."""
    named = {path: look_up(row, path) for path in fields.values()}
    for path, value in named.items():
        if value is MISSING:
            raise MalformedRow(f"has no field {path!r}; it has {', '.join(row) or 'none'}")
    row = {name.lower(): value for name, value in row.items()} | named
    if not fields:
        for needed, read in FORMATS:
            if needed <= row.keys():
                return read(row)
    if "problem" not in fields and not row.keys() & set(ASKING):
        raise UnknownFields(
            f"none of its fields says the problem: {', '.join(row) or 'it has none'}"
        )
    return _plain(row, fields)


def read_row(
    row: Any,
    source: str,
    number: int | str,
    fields: Mapping[str, str] | None = None,
    needs_answer: bool = True,
) -> Problem:
    """Problem of a row.

    Args:
        source: name of the data set, for the id.
        number: id of a row that brings none.
        fields: fields of other names, by key. Then no other format is tried, and each of these
            fields must exist.
        needs_answer: without it, a problem without an answer gets an empty one.

    Raises:
        MalformedRow: the row fits no format, or a field holds a wrong value.
        NoAnswer: the row has no answer, as proofs have none.
    """
    if not isinstance(row, dict):
        raise MalformedRow(f"is {type(row).__name__}, not an object with named fields")
    fields, names = fields or {}, {name.lower(): value for name, value in row.items()}
    attributes = _read(row, fields)
    if attributes["answer"] is None and needs_answer:
        if attributes["solution"] or "answer" in fields or names.keys() & ANSWERING:
            raise NoAnswer
        raise UnknownFields(f"none of its fields says the answer: {', '.join(row)}")
    attributes["answer"] = attributes["answer"] or ""
    number = attributes.pop("id", "") or _optional(names, *ID_FIELDS) or number
    return Problem(
        f"{source}-{number}", source=attributes.pop("source", "") or source, **attributes
    )
