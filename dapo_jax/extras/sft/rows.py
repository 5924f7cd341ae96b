"""Examples and pairs of answers as given groups: rows become tokens, and some are held out.

Every answer of an assistant follows exactly the tokens that the sampler would see before it. An
example is a group of one response for each prompt; a pair is a group of two, the chosen one
correct.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dapo_jax.config.experiment import Data
from dapo_jax.data import files
from dapo_jax.data.files import MalformedRow
from dapo_jax.data.prompts.templates import (
    Beside,
    Messages,
    check_chat,
    check_system,
    open_template,
)
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.row_formats import (
    TOOLS,
    Row,
    check_text,
    parse_fields,
    read_messages,
    read_tools,
    take_fields,
)
from dapo_jax.data.sources import hold_out, plugin_of
from dapo_jax.extras.sft.settings import OwnData
from dapo_jax.types.errors import ConfigError, memory_error_as_config_error, naming, require
from dapo_jax.types.structs import Completion, Group, Problem, Prompt, Turn

Forms = tuple[tuple[str, ...], ...]
Example = list[Group]  # of a row

# Fields that make an example or a pair; the first form that fits is used.
EXAMPLES: Forms = (
    ("messages",),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("problem", "solution"),
    ("question", "answer"),
)
ANSWERS = ("chosen", "rejected")
PAIRS: Forms = (("prompt", *ANSWERS), ANSWERS)
FORMS = {"examples": EXAMPLES, "pairs": PAIRS}
ASSISTANT, SYSTEM = "assistant", "system"
HELDOUT_SHARE, MAX_HELDOUT = 20, 256  # by default 1 of 20 examples is held out
DIGEST_EXAMPLES = 256  # of a generated source


class Turns(NamedTuple):
    """A prompt and the tokens after it: an answer, or several with the turns between them."""

    text: str  # the prompt, as the policy sees it
    prompt: list[int]
    response: list[int]
    trained: list[bool]  # for each token of the response: the model learns to write it

    def completion(self) -> Completion:
        """Return the response as if it were sampled."""
        runs = [(trained, len([*run])) for trained, run in itertools.groupby(self.trained)]
        turns = () if all(self.trained) else tuple(Turn(*run, "") for run in runs)
        logprobs = np.zeros(len(self.response), np.float32)
        return Completion(np.array(self.response, np.int32), logprobs, False, 0, "", turns=turns)


def make_group(*answers: Turns) -> Group:
    """Return a group of answers to one prompt, the first one correct."""
    text, tokens, *_ = answers[0]
    prompt = Prompt(0, "", text, np.array(tokens, np.int32), "", "own")
    zeros, first = np.zeros(len(answers)), np.arange(len(answers)) == 0
    completions = tuple(answer.completion() for answer in answers)
    return Group(prompt, completions, (), {}, zeros, zeros, first)


def placed(example: Example, index: int) -> Example:
    """Return the groups of an example at a position of the run."""
    prompts = [dataclasses.replace(group.prompt, index=index) for group in example]
    return [dataclasses.replace(g, prompt=p) for g, p in zip(example, prompts, strict=True)]


def read_fields(data: OwnData, kind: str) -> dict[str, str]:
    """Return the fields by key that data.fields names; may raise `ConfigError`."""
    forms = FORMS[kind]
    keys = [*dict.fromkeys(itertools.chain(*forms)), SYSTEM, TOOLS]
    fields = parse_fields("data.fields", data.fields, keys)
    is_complete = any(fields.keys() - {SYSTEM, TOOLS} == set(form) for form in forms)
    allowed = f"one of these forms: {_list_forms(forms)}"
    require(not fields or is_complete, "data.fields", data.fields, allowed)
    check_system(data.template, data.system_prompt, data.fields if SYSTEM in fields else "")
    return fields


def _list_forms(forms: Forms) -> str:
    return ", ".join("+".join(form) for form in forms)


def _read_messages(value: Any, field: str, role: str) -> Messages:
    """Return the messages of a conversation; a text is one message of that role."""
    if isinstance(value, str):
        return [{"role": role, "content": check_text(value, field)}]
    if not isinstance(value, list) or not value:
        raise MalformedRow(f"{field} is {value!r:.40}, neither text nor messages")
    return read_messages(value, field)


def _read_example(row: Row, form: tuple[str, ...]) -> tuple[Messages, int]:
    """Return a conversation, and the first of its messages that is learned."""
    *names, last = form
    before = [m for name in names for m in _read_messages(row[name], name, "user")]
    answers = _read_messages(row[last], last, ASSISTANT if names else "user")
    return [*before, *answers], len(before)


def _read_answer(row: Row, name: str) -> Messages:
    """Return the conversation that ends with the answer `name`, with the prompt once."""
    answer = _read_messages(row[name], name, ASSISTANT)
    if answer[-1]["role"] != ASSISTANT:
        raise MalformedRow(f"{name} ends with no message of the role {ASSISTANT!r}")
    if row.get("prompt") is None:
        if isinstance(row[name], str):
            raise MalformedRow(f"{name} is a text, and there is no prompt before it")
        return answer
    before = _read_messages(row["prompt"], "prompt", "user")
    if answer[0]["role"] == ASSISTANT:
        return [*before, *answer]
    whole, prompt = (
        [(m["role"], m.get("content", "").strip()) for m in talk] for talk in (answer, before)
    )
    if not any(whole[i : i + len(prompt)] == prompt for i in range(len(whole))):
        raise MalformedRow(f"{name} begins neither with the prompt nor with an answer to it")
    return answer


class Writer:
    """Writer of rows as groups of tokens; `kind` is 'examples' or 'pairs'."""

    def __init__(self, data: OwnData, tokenizer: Tokenizer, kind: str):
        self._data = data
        self._tokenizer = tokenizer
        self._forms = FORMS[kind]
        self._fields = read_fields(data, kind)
        self._template = open_template(data.template)
        check_chat(data.template, tokenizer.chat)

    def write(self, row: Any) -> Example:
        """Return the example or pair of a row; raise `MalformedRow` if there is none."""
        named = take_fields(row, self._fields)
        fields = {k.lower(): v for k, v in row.items() if not named or k.lower() == TOOLS} | named
        form = next((form for form in self._forms if fields.keys() >= set(form)), None)
        if form is None:
            names, forms = ", ".join(fields) or "none", _list_forms(self._forms)
            raise MalformedRow(f"has the fields {names}, not {forms}: data.fields names others")
        self._tools = read_tools(fields)
        self._system = self._data.system_prompt
        if self._template.shows_system and fields.get(SYSTEM):
            self._system = check_text(fields[SYSTEM], SYSTEM)
        is_text = all(isinstance(fields[name], str) for name in form)
        self._is_plain = is_text and len(form) > 1 and self._data.template != "chat"
        if self._forms is EXAMPLES:
            return [make_group(turns) for turns in self._converse(*_read_example(fields, form))]
        talks = [_read_answer(fields, name) for name in ANSWERS]
        if talks[0][:-1] != talks[1][:-1]:
            raise MalformedRow("chosen and rejected differ before their last message")
        (chosen,), (rejected,) = (self._converse(talk, len(talk) - 1) for talk in talks)
        if chosen.response == rejected.response:
            raise MalformedRow("chosen and rejected are the same")
        return [make_group(chosen, rejected)]

    def _converse(self, messages: Messages, first: int) -> list[Turns]:
        """Return the turns of every answer from message `first` on.

        A template that changes earlier turns makes a separate prompt for each answer.
        """
        places = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT and i >= first]
        if not places or places[0] == 0 and not self._system:
            verb = "begins with a" if places else "has no"
            raise MalformedRow(f"the conversation {verb} message of the role {ASSISTANT!r}")
        if self._system and not self._is_plain and messages[0]["role"] != SYSTEM:
            messages = [{"role": SYSTEM, "content": self._system}, *messages]
            places = [place + 1 for place in places]
        made: list[Turns] = []
        for place in places:
            text, answer = (self._show if self._is_plain else self._render)(messages, place)
            prompt, response = self._tokenizer.encode_prompt(text), self._encode(answer)
            self._check_end(messages[place])
            trained = [True] * len(response)
            before = [*made[-1].prompt, *made[-1].response] if made else []
            if made and prompt[: len(before)] == before:
                gap, last = prompt[len(before) :], made.pop()
                trained = [*last.trained, *[False] * len(gap), *trained]
                text, prompt, response = *last[:2], [*last.response, *gap, *response]
            made.append(Turns(text, prompt, response, trained))
        return made

    def _show(self, messages: Messages, place: int) -> tuple[str, str]:
        """Return a problem as the template shows it, and the answer."""
        tools = json.dumps(self._tools) if self._tools else ""
        text = messages[0]["content"]
        problem = Problem("", text, "", "", system=self._system, tools=tools)
        if not self._template.shows(problem):
            raise MalformedRow(f"offers tools, not for data.template = {self._data.template!r}")
        text = self._template.write(problem, Beside(self._tokenizer.chat))
        return text, messages[place]["content"]

    def _render(self, messages: Messages, place: int) -> tuple[str, str]:
        """Return the text before a message of the assistant, and that of the message."""
        chat = self._tokenizer.chat
        if chat is None:
            raise MalformedRow("holds messages, but the model folder has no chat template")
        if self._data.template not in ("none", "chat"):
            raise MalformedRow(f"holds messages, not for data.template = {self._data.template!r}")
        try:
            before = chat.render(messages[:place], tools=self._tools)
            text = chat.render(messages[: place + 1], open_answer=False, tools=self._tools)
        except ConfigError as error:
            raise MalformedRow(str(error)) from None
        if not text.startswith(before):
            raise MalformedRow("the chat template does not put the answer right after its prompt")
        return before, text[len(before) :]

    def _encode(self, text: str) -> list[int]:
        """Return the ids of an answer, up to and with its end token."""
        ids, ends = self._tokenizer.encode(text, inside=True), self._tokenizer.end_ids
        if self._tokenizer.pad_id not in ends and self._tokenizer.pad_id in ids:
            raise MalformedRow("an answer holds letters that the tokenizer has no token for")
        last = next((i for i, token in enumerate(ids) if token in ends), None)
        return [*ids, ends[0]] if last is None else ids[: last + 1]

    def _check_end(self, message: Row) -> None:
        calls = message.get("tool_calls")
        content = message.get("content", "") + (json.dumps(calls) if calls else "")
        if not set(self._tokenizer.encode(content)[:-1]).isdisjoint(self._tokenizer.end_ids):
            raise MalformedRow("an answer holds the end token before its end")


@dataclasses.dataclass
class Examples:
    """Examples of a run, in the place of its prompts."""

    name: str
    at: Callable[[int], Example]  # by position in an endless order
    training: list[Example]  # of files
    evaluation: list[Example]
    notes: str  # line about the examples
    messages: Sequence[str] = ()  # about rows that were left out
    start: str = ""  # fingerprint of the policy that begins
    sources = heldout = lengths = ()  # of problems

    def heldout_prompts(self) -> list[Example]:
        return self.evaluation

    def describe(self) -> str:
        return self.notes

    def warnings(self) -> Sequence[str]:
        return self.messages

    @functools.cached_property
    def digests(self) -> dict[str, dict[str, int | str]]:
        """Digest of the policy, and of all examples or the first ones that are generated."""
        digest, count = hashlib.sha256(self.start.encode()), len(self.training)
        examples = self.training or map(self.at, range(DIGEST_EXAMPLES))
        for group in itertools.chain(*examples, *self.evaluation):
            parts = [array for c in group.completions for array in (c.tokens, c.is_sampled)]
            digest.update(b"|".join(part.tobytes() for part in (group.prompt.tokens, *parts)))
        return {self.name: {"problems": count, "digest": digest.hexdigest()[:16]}}


def _split(examples: list[Example], asked: int, name: str) -> tuple[list[Example], list[Example]]:
    """Return examples to train on and held-out ones (smallest hashes of their prompts)."""
    count = min(len(examples) // HELDOUT_SHARE, MAX_HELDOUT) if asked < 0 else asked
    allowed = f"below the {len(examples)} examples of {name!r}, from which they are taken"
    require(count < len(examples), "data.heldout_examples", count, allowed)
    held = hold_out([" ".join(groups[0].prompt.text.split()) for groups in examples], count)
    training = [example for example, is_held in zip(examples, held, strict=True) if not is_held]
    return training, list(itertools.compress(examples, held))


def _rows(data: OwnData, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of data.source; rows of files are read one at a time."""
    plugin, count = plugin_of(data.source), data.generated_examples
    rows: Iterable[Row] = ()
    if hasattr(plugin, "make_rows"):
        rows = plugin.make_rows(data.source, count, seed)
    elif plugin:
        named = "data.source", data.source, Data(train_problems=count), seed, "train"
        problems = itertools.islice(plugin.open_problems(*named), count)
        rows = ({"prompt": p.text, "response": p.answer and f"#### {p.answer}"} for p in problems)
    yield from ((f"example {index}", row) for index, row in enumerate(rows))
    if plugin:
        return
    for path in files.find_files("data.source", data.source, data.folder, "train"):
        for place, row in files.read_rows(epath.Path(path)):
            yield f"{path} {place}", row


def read_examples(
    data: OwnData, tokenizer: Tokenizer, row_tokens: int, kind: str, seed: int = 0
) -> Examples:
    """Return the examples, or pairs, of data.source; those over `row_tokens` are left out.

    Args:
        kind: 'examples' or 'pairs'.
        seed: of the order, and of generated examples.

    Raises `ConfigError`.
    """
    writer, log = Writer(data, tokenizer, kind), files.RowLog(data.bad_rows_limit)
    examples, lengths = [], [0]
    with naming("data.source", data.source), memory_error_as_config_error(data.source):
        for place, row in _rows(data, seed):
            example = log.parse(place, row, writer.write) or []
            log.check_limit()
            responses = [(group, c) for group in example for c in group.completions]
            length = max((len(g.prompt.tokens) + len(c.tokens) for g, c in responses), default=0)
            lengths += [length] * (length > row_tokens)
            examples += [example] * (0 < length <= row_tokens)
    warnings, rows = log.messages[: files.MAX_MESSAGES], log.counts["rows"]
    if overlong := len(lengths) - 1:
        warnings.append(
            f"{overlong:,} of {rows:,} {kind} exceed packing.row_tokens = {row_tokens} and are "
            f"dropped; the longest has {max(lengths):,} tokens"
        )
    if not examples:
        reason = "; ".join(warnings) or "there are no rows"
        raise ConfigError(f"config.data.source = {data.source!r}: holds no {kind}: {reason}")
    training, heldout = _split(examples, data.heldout_examples, data.source)
    learned = sum(len(c) for example in training for group in example for c in group.completions)
    malformed = f" ({n:,} malformed)" if (n := log.counts["malformed"]) else ""
    notes = (
        f"{files.shown_name(data.source)}: {len(training):,} {kind} of {rows:,} rows{malformed}, "
        f"{learned:,} tokens to learn. Held out: {len(heldout):,}"
    )
    order = endless_order(len(training), seed)
    return Examples(data.source, lambda i: training[order(i)], training, heldout, notes, warnings)


def generated_example(settings: Any, tokenizer: Tokenizer, index: int) -> Example:
    """Return the worked example of a position; it depends on (seed, index) alone.

    Every second turn is observed, the others end in an end token and are trained. An example that
    exceeds the budget is cut, so it has no end token.
    """
    make = plugin_of(settings.data.source).make_worked
    text, *worked = make(settings.data.source, settings.seed, index, settings.examples)
    pieces = [
        (token, is_trained)
        for turn, is_trained in zip(worked, itertools.cycle((True, False)), strict=False)
        for token in [*tokenizer.encode(turn), *tokenizer.end_ids[:1] * is_trained]
    ]
    tokens, trained = zip(*pieces[: settings.max_response_tokens], strict=True)
    return [make_group(Turns(text, tokenizer.encode_prompt(text), [*tokens], [*trained]))]


def endless_order(count: int, seed: int) -> Callable[[int], int]:
    """Return a map from a position of the run to an example; each pass has a new order."""
    key = [seed, zlib.crc32(b"examples")]
    permute = functools.lru_cache(2)(lambda n: np.random.default_rng([*key, n]).permutation(count))
    return lambda place: int(permute(place // count)[place % count])
