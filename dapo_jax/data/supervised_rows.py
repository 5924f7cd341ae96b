"""Tokens of supervised rows: examples, or pairs of answers.

Every answer of an assistant follows exactly the tokens that the sampler would see before it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import OwnData
from dapo_jax.data.prompts.templates import Beside, check_chat, open_template
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.row_formats import (
    MISSING,
    MalformedRow,
    Row,
    check_text,
    look_up,
    parse_fields,
)
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.structs import Problem

Messages = list[dict[str, Any]]
Forms = tuple[tuple[str, ...], ...]

# Fields that make an example or a pair; the first that fit are taken.
EXAMPLES: Forms = (
    ("messages",),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("problem", "solution"),
    ("question", "answer"),
)
PAIRS: Forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
ASSISTANT, SYSTEM = "assistant", "system"


class Turns(NamedTuple):
    """Prompt and the tokens behind it: an answer, or several with the turns between them."""

    prompt: np.ndarray  # [P] int32
    response: np.ndarray  # [n] int32
    trained: np.ndarray  # [n] bool: the tokens that a model is to write

    @classmethod
    def of(cls, prompt: np.ndarray, answer: np.ndarray) -> "Turns":
        """Turns of one answer, all of it trained."""
        return cls(prompt, answer, np.ones(len(answer), bool))


class Example(NamedTuple):
    """Row in tokens.

    Attributes:
        text: the first prompt, as the policy sees it.
        turns: mostly one of an example; the chosen and the rejected answer of a pair.
    """

    text: str
    turns: tuple[Turns, ...]

    @property
    def length(self) -> int:
        """Tokens of the longest turns, prompt included."""
        return max(len(turns.prompt) + len(turns.response) for turns in self.turns)


def read_fields(data: OwnData, forms: Forms) -> dict[str, str]:
    """Fields by key that data.fields names.

    Raises:
        ConfigError: data.fields names none of these forms as a whole, or data.template can't be
            opened, or shows no system message though there is one.
    """
    allowed = [*dict.fromkeys(key for form in forms for key in form), SYSTEM]
    fields = parse_fields("data.fields", data.fields, allowed)
    complete = any(fields.keys() - {SYSTEM} == set(form) for form in forms)
    allowed = f"a form as a whole: {_listed(forms)}"
    require(not fields or complete, "data.fields", data.fields, allowed)
    shown = open_template(data.template).shows_system
    own = data.fields if SYSTEM in fields else ""
    for field, value in ("data.system_prompt", data.system_prompt), ("data.fields", own):
        allowed = f"without a system message with data.template = {data.template!r}: it shows none"
        require(shown or not value, field, value, allowed)
    return fields


def _listed(forms: Forms) -> str:
    return ", ".join("+".join(form) for form in forms)


def _messages(value: Any, field: str, role: str) -> Messages:
    """Messages of a conversation; a text is one message of that role."""
    if isinstance(value, str):
        return [{"role": role, "content": check_text(value, field)}]
    if not isinstance(value, list) or not value:
        raise MalformedRow(f"{field} is {value!r:.40}, neither text nor messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MalformedRow(f"{field} holds {message!r:.40}, no message with role and content")
        check_text(message.get("content"), f"the {message['role']}'s message in {field}")
    return [{k: v for k, v in message.items() if v is not None} for message in value]


class Writer:
    """Writer of rows as tokens.

    Args:
        forms: `EXAMPLES` or `PAIRS`.

    Raises:
        ConfigError: the model folder lacks the chat template that the config asks for.
    """

    def __init__(self, data: OwnData, tokenizer: Tokenizer, forms: Forms):
        self._data, self._tokenizer, self._forms = data, tokenizer, forms
        self._fields = read_fields(data, forms)
        self._template = open_template(data.template)
        check_chat(data.template, tokenizer.chat)

    def write(self, row: Any) -> Example:
        """Example or pair of a row. Raises `MalformedRow`."""
        row, form = self._choose(row)
        return (self._example if self._forms is EXAMPLES else self._pair)(row, form)

    def _choose(self, row: Any) -> tuple[Row, tuple[str, ...]]:
        """Fields that are read, and their form."""
        if not isinstance(row, dict):
            raise MalformedRow(f"is {type(row).__name__}, not an object with named fields")
        if self._fields:
            named = {key: look_up(row, path) for key, path in self._fields.items()}
            if missing := [path for key, path in self._fields.items() if named[key] is MISSING]:
                raise MalformedRow(f"has no {missing[0]}; its fields are: {', '.join(row)}")
            row = named
        else:
            row = {name.lower(): value for name, value in row.items()}
        for form in self._forms:
            if row.keys() >= set(form):
                return row, form
        named, known = ", ".join(row) or "none", _listed(self._forms)
        raise MalformedRow(f"has the fields {named}, not {known}: data.fields can say other names")

    def _render(self, messages: Messages, open_answer: bool) -> str:
        if self._tokenizer.chat is None:
            raise MalformedRow("holds messages, but the model folder has no chat template")
        if self._data.template not in ("none", "chat"):
            raise MalformedRow(f"holds messages, not for data.template = {self._data.template!r}")
        try:
            return self._tokenizer.chat.render(messages, open_answer=open_answer)
        except ConfigError as error:
            raise MalformedRow(str(error)) from None

    def _system(self, row: Row) -> str:
        """System message of the row, else of the config; empty where none is shown."""
        if not self._template.shows_system or not row.get(SYSTEM):
            return self._data.system_prompt
        return check_text(row[SYSTEM], SYSTEM)

    def _with_system(self, row: Row, messages: Messages) -> Messages:
        system = self._system(row)
        if not system or messages[0]["role"] == SYSTEM:
            return messages
        return [{"role": SYSTEM, "content": system}, *messages]

    def _ended(self, text: str, written: str) -> np.ndarray:
        """Ids of an answer up to its end token, which is added where the text has none.

        Args:
            written: the part of it that stands in the row.
        """
        ids, ends = self._tokenizer.encode(text), self._tokenizer.end_ids
        if any(token in ends for token in self._tokenizer.encode(written)[:-1]):
            raise MalformedRow("an answer holds the end token before its end")
        if self._tokenizer.pad_id not in ends and self._tokenizer.pad_id in ids:
            raise MalformedRow("an answer holds letters that the tokenizer has no token for")
        last = next((i for i, token in enumerate(ids) if token in ends), None)
        return np.array([*ids, ends[0]] if last is None else ids[: last + 1], np.int32)

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode_prompt(text), np.int32)

    def _turn(self, messages: Messages, place: int) -> tuple[str, Turns]:
        """Text before a message of the assistant, and the tokens before and in it."""
        asked = self._render(messages[:place], True)
        whole = self._render(messages[: place + 1], False)
        if not whole.startswith(asked):
            raise MalformedRow("the chat template puts the answer elsewhere than behind its prompt")
        answer = self._ended(whole[len(asked) :], messages[place]["content"])
        return asked, Turns.of(self._encode(asked), answer)

    def _conversation(self, messages: Messages, first: int) -> Example:
        """Example of every answer from that message on.

        An answer is put behind the one before it where the tokens before it are the same as
        there; a template that changes earlier turns makes a prompt of its own for each.
        """
        places = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT and i >= first]
        if not places or not places[0]:
            where = "begins with a" if places else "has no"
            raise MalformedRow(f"the conversation {where} message of the role {ASSISTANT!r}")
        texts, turns = [], []
        for place in places:
            text, turn = self._turn(messages, place)
            texts.append(text)
            if turns:
                before = np.concatenate(turns[-1][:2])
                if np.array_equal(turn.prompt[: len(before)], before):
                    gap = turn.prompt[len(before) :]
                    prompt, response, trained = turns.pop()
                    response = np.concatenate([response, gap, turn.response])
                    trained = np.concatenate([trained, np.zeros(len(gap), bool), turn.trained])
                    turn = Turns(prompt, response, trained)
            turns.append(turn)
        return Example(texts[0], tuple(turns))

    def _plain(self, row: Row, prompt: str, answers: Sequence[str]) -> Example:
        """Example of answers behind a problem, as the template shows it."""
        problem = Problem("", prompt.strip(), "", "", system=self._system(row))
        text = self._template.write(problem, Beside(self._tokenizer.chat))
        tokens = self._encode(text)
        return Example(
            text, tuple(Turns.of(tokens, self._ended(answer, answer)) for answer in answers)
        )

    def _example(self, row: Row, form: tuple[str, ...]) -> Example:
        if form == ("messages",):
            messages = self._with_system(row, _messages(row["messages"], "messages", "user"))
            return self._conversation(messages, 0)
        asked, answer = (row[name] for name in form)
        if isinstance(asked, str) and isinstance(answer, str) and self._data.template != "chat":
            return self._plain(row, check_text(asked, form[0]), [check_text(answer, form[1])])
        asked = asked.strip() if isinstance(asked, str) else asked
        before = self._with_system(row, _messages(asked, form[0], "user"))
        return self._conversation([*before, *_messages(answer, form[1], ASSISTANT)], len(before))

    def _pair(self, row: Row, form: tuple[str, ...]) -> Example:
        names, plain = form[-2:], all(isinstance(row[name], str) for name in form)
        if plain and len(form) == 2:
            pair = self._common(*(check_text(row[name], name) for name in names))
        elif plain and self._data.template != "chat":
            asked, *answers = (check_text(row[name], name) for name in form)
            pair = self._plain(row, asked, answers)
        else:
            whole = [self._whole(row, name) for name in names]
            if whole[0][:-1] != whole[1][:-1]:
                raise MalformedRow("chosen and rejected differ before their last message")
            examples = [self._conversation(messages, len(messages) - 1) for messages in whole]
            pair = Example(examples[0].text, tuple(example.turns[0] for example in examples))
        good, bad = pair.turns
        if np.array_equal(good.response, bad.response):
            raise MalformedRow("chosen and rejected are the same")
        return pair

    def _whole(self, row: Row, name: str) -> Messages:
        """Conversation that ends with that answer, with the prompt once."""
        answer = _messages(row[name], name, ASSISTANT)
        if answer[-1]["role"] != ASSISTANT:
            raise MalformedRow(f"{name} ends with no message of the role {ASSISTANT!r}")
        asked = row.get("prompt")
        if asked is None:
            return self._with_system(row, answer)
        before = _messages(asked.strip() if isinstance(asked, str) else asked, "prompt", "user")
        contents = [[(m["role"], m["content"].strip()) for m in part] for part in (answer, before)]
        size = len(before)
        if any(contents[0][i : i + size] == contents[1] for i in range(len(answer))):
            return self._with_system(row, answer)
        if answer[0]["role"] != ASSISTANT:
            raise MalformedRow(f"{name} begins neither with the prompt nor with an answer to it")
        return self._with_system(row, [*before, *answer])

    def _common(self, chosen: str, rejected: str) -> Example:
        """Pair of whole texts; the prompt is their common beginning, in tokens."""
        if self._data.template != "none":
            raise MalformedRow(f"has no prompt for data.template = {self._data.template!r}")
        whole = [self._ended(text, text) for text in (chosen, rejected)]
        size = min(map(len, whole))
        common = int(np.argmin(np.append(whole[0][:size] == whole[1][:size], False)))
        text = self._tokenizer.decode(whole[0][:common].tolist())
        if not text:
            raise MalformedRow("chosen and rejected share no beginning, and there is no prompt")
        beginning = self._encode(chosen)
        beginning = beginning[: len(beginning) - len(self._tokenizer.encode(chosen))]
        prompt = np.append(beginning, whole[0][:common])
        return Example(text, tuple(Turns.of(prompt, ids[common:]) for ids in whole))
