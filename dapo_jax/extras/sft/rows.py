"""Supervised examples, or pairs of answers, from a user's files: as tokens, some held out.

Every answer of an assistant follows exactly the tokens that the sampler would see before it.
"""

import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from dapo_jax.data.files import (
    MAX_MESSAGES,
    MalformedRow,
    RowLog,
    find_files,
    read_rows,
    shown_name,
)
from dapo_jax.data.prompts.templates import Beside, check_chat, check_system, open_template
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
from dapo_jax.data.sources import hold_out
from dapo_jax.extras import arithmetic, gym
from dapo_jax.extras import words as word_problems
from dapo_jax.extras.sft.settings import WORD_PROBLEMS, OwnData
from dapo_jax.types.errors import ConfigError, memory_error_as_config_error, naming, require
from dapo_jax.types.structs import Completion, Group, Problem, Prompt, Turn

Messages = list[dict[str, Any]]
Forms = tuple[tuple[str, ...], ...]

# Fields that make an example or a pair; the first form that fits is used.
EXAMPLES: Forms = (
    ("messages",),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("problem", "solution"),
    ("question", "answer"),
)
PAIRS: Forms = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
ASSISTANT, SYSTEM = "assistant", "system"
HELDOUT_SHARE, MAX_HELDOUT = 20, 256  # by default 1 of 20 examples is held out


class Turns(NamedTuple):
    """A prompt and the tokens after it: an answer, or several with the turns between them."""

    prompt: np.ndarray  # [P] int32
    response: np.ndarray  # [n] int32
    trained: np.ndarray  # [n] bool: tokens that the model learns to write

    @classmethod
    def of(cls, prompt: np.ndarray, answer: np.ndarray) -> "Turns":
        """Return the turns of a single answer, all of it trained."""
        return cls(prompt, answer, np.ones(len(answer), bool))

    def completion(self, logprobs: np.ndarray | None) -> Completion:
        """Return the response as if it were sampled with these log-probs (None: 0)."""
        runs = [(bool(drawn), len([*run])) for drawn, run in itertools.groupby(self.trained)]
        turns = () if self.trained.all() else tuple(Turn(*run, "") for run in runs)
        logprobs = np.zeros(len(self.response), np.float32) if logprobs is None else logprobs
        return Completion(self.response, logprobs, False, 0, "", turns=turns)


class Example(NamedTuple):
    """A row as tokens."""

    text: str  # the first prompt, as the policy sees it
    turns: tuple[Turns, ...]  # of a pair: the chosen and the rejected answer
    is_pair: bool = False
    logprobs: tuple[np.ndarray, ...] = ()  # of the reference, for each answer of a pair

    @property
    def length(self) -> int:
        """Tokens of the longest turns, with their prompt."""
        return max(len(turns.prompt) + len(turns.response) for turns in self.turns)

    def groups(self, index: int) -> list[Group]:
        """Return what is trained on at a position of the order: a group for each prompt.

        The answers of a pair are one group, the chosen one correct.
        """
        pairs = itertools.zip_longest(self.turns, self.logprobs)
        responses = [turns.completion(logprobs) for turns, logprobs in pairs]
        size = len(responses) if self.is_pair else 1
        groups = []
        for first in range(0, len(responses), size):
            prompt = Prompt(index, str(index), self.text, self.turns[first].prompt, "", "own")
            given, rewards = tuple(responses[first : first + size]), np.zeros(size)
            groups.append(Group(prompt, given, (), {}, rewards, rewards, np.arange(size) == 0))
        return groups


def _list_forms(forms: Forms) -> str:
    return ", ".join("+".join(form) for form in forms)


def read_fields(data: OwnData, forms: Forms) -> dict[str, str]:
    """Return the fields by key that data.fields names; may raise `ConfigError`."""
    keys = [*dict.fromkeys(itertools.chain(*forms)), SYSTEM, TOOLS]
    fields = parse_fields("data.fields", data.fields, keys)
    is_complete = any(fields.keys() - {SYSTEM, TOOLS} == set(form) for form in forms)
    allowed = f"one of these forms: {_list_forms(forms)}"
    require(not fields or is_complete, "data.fields", data.fields, allowed)
    check_system(data.template, data.system_prompt, data.fields if SYSTEM in fields else "")
    return fields


def _read_messages(value: Any, field: str, role: str) -> Messages:
    """Return the messages of a conversation; a text is one message of that role."""
    if isinstance(value, str):
        return [{"role": role, "content": check_text(value, field)}]
    if not isinstance(value, list) or not value:
        raise MalformedRow(f"{field} is {value!r:.40}, neither text nor messages")
    return read_messages(value, field)


class Writer:
    """Writer of rows as tokens; `forms` is `EXAMPLES` or `PAIRS`."""

    def __init__(self, data: OwnData, tokenizer: Tokenizer, forms: Forms):
        self._data = data
        self._tokenizer = tokenizer
        self._forms = forms
        self._fields = read_fields(data, forms)
        self._template = open_template(data.template)
        check_chat(data.template, tokenizer.chat)

    def write(self, row: Any) -> Example:
        """Return the example or pair of a row; raise `MalformedRow` if there is none."""
        named = take_fields(row, self._fields)
        fields = {k.lower(): v for k, v in row.items() if not named or k.lower() == TOOLS} | named
        form = next((form for form in self._forms if fields.keys() >= set(form)), None)
        if form is None:
            names = ", ".join(fields) or "none"
            forms = _list_forms(self._forms)
            raise MalformedRow(f"has the fields {names}, not {forms}: data.fields names others")
        self._tools = read_tools(fields)
        self._system = self._data.system_prompt
        if self._template.shows_system and fields.get(SYSTEM):
            self._system = check_text(fields[SYSTEM], SYSTEM)
        is_text = all(isinstance(fields[name], str) for name in form)
        if is_text and form == PAIRS[1]:
            example = self._split_texts(*(check_text(fields[name], name) for name in form))
        elif is_text and len(form) > 1 and self._data.template != "chat":
            example = self._plain(*(check_text(fields[name], name) for name in form))
        elif self._forms is EXAMPLES:
            return self._example(fields, form)
        else:
            example = self._pair(fields)
        if self._forms is EXAMPLES:
            return example
        chosen, rejected = example.turns
        if np.array_equal(chosen.response, rejected.response):
            raise MalformedRow("chosen and rejected are the same")
        return example._replace(is_pair=True)

    # --- conversations ---------------------------------------------------------------------

    def _example(self, row: Row, form: tuple[str, ...]) -> Example:
        *names, last = form
        answers = _read_messages(row[last], last, ASSISTANT if names else "user")
        before = [m for name in names for m in _read_messages(row[name], name, "user")]
        return self._conversation([*before, *answers], len(before))

    def _pair(self, row: Row) -> Example:
        talks = [self._whole_conversation(row, name) for name in PAIRS[1]]
        if talks[0][:-1] != talks[1][:-1]:
            raise MalformedRow("chosen and rejected differ before their last message")
        examples = [self._conversation(messages, len(messages) - 1) for messages in talks]
        return Example(examples[0].text, tuple(example.turns[0] for example in examples))

    def _whole_conversation(self, row: Row, name: str) -> Messages:
        """Return the conversation that ends with that answer, with the prompt once."""
        answer = _read_messages(row[name], name, ASSISTANT)
        if answer[-1]["role"] != ASSISTANT:
            raise MalformedRow(f"{name} ends with no message of the role {ASSISTANT!r}")
        if row.get("prompt") is None:
            return answer
        before = _read_messages(row["prompt"], "prompt", "user")
        whole, prompt = (
            [(m["role"], m.get("content", "").strip()) for m in talk] for talk in (answer, before)
        )
        if any(whole[i : i + len(prompt)] == prompt for i in range(len(whole))):
            return answer
        if answer[0]["role"] != ASSISTANT:
            raise MalformedRow(f"{name} begins neither with the prompt nor with an answer to it")
        return [*before, *answer]

    def _conversation(self, messages: Messages, first: int) -> Example:
        """Return the example of every answer from message `first` on.

        A template that changes earlier turns makes a separate prompt for each answer.
        """
        places = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT and i >= first]
        has_system = messages[0]["role"] == SYSTEM
        if not places or places[0] == 0 and not self._system:
            verb = "begins with a" if places else "has no"
            raise MalformedRow(f"the conversation {verb} message of the role {ASSISTANT!r}")
        if self._system and not has_system:
            messages = [{"role": SYSTEM, "content": self._system}, *messages]
            places = [place + 1 for place in places]
        texts, turns = [], []
        for place in places:
            text, turn = self._turn(messages, place)
            texts.append(text)
            before = np.concatenate(turns[-1][:2]) if turns else np.array([])
            if turns and np.array_equal(turn.prompt[: len(before)], before):
                gap = turn.prompt[len(before) :]
                last = turns.pop()
                response = np.concatenate([last.response, gap, turn.response])
                trained = np.concatenate([last.trained, np.zeros(len(gap), bool), turn.trained])
                turn = Turns(last.prompt, response, trained)
            turns.append(turn)
        return Example(texts[0], tuple(turns))

    def _turn(self, messages: Messages, place: int) -> tuple[str, Turns]:
        """Return the text before a message of the assistant, and the tokens before and in it."""
        prompt = self._render(messages[:place], True)
        text = self._render(messages[: place + 1], False)
        if not text.startswith(prompt):
            raise MalformedRow("the chat template does not put the answer right after its prompt")
        message = messages[place]
        content = message.get("content", "") + json.dumps(message.get("tool_calls"))
        answer = self._encode_answer(text[len(prompt) :], content)
        return prompt, Turns.of(self._encode_prompt(prompt), answer)

    def _render(self, messages: Messages, open_answer: bool) -> str:
        chat = self._tokenizer.chat
        if chat is None:
            raise MalformedRow("holds messages, but the model folder has no chat template")
        if self._data.template not in ("none", "chat"):
            raise MalformedRow(f"holds messages, not for data.template = {self._data.template!r}")
        try:
            return chat.render(messages, open_answer=open_answer, tools=self._tools)
        except ConfigError as error:
            raise MalformedRow(str(error)) from None

    # --- texts -----------------------------------------------------------------------------

    def _plain(self, problem_text: str, *answers: str) -> Example:
        """Return the example of a problem that the template shows, and answers to it."""
        tools = json.dumps(self._tools) if self._tools else ""
        problem = Problem("", problem_text, "", "", system=self._system, tools=tools)
        if not self._template.shows(problem):
            raise MalformedRow(f"offers tools, not for data.template = {self._data.template!r}")
        text = self._template.write(problem, Beside(self._tokenizer.chat))
        tokens = self._encode_prompt(text)
        turns = (Turns.of(tokens, self._encode_answer(answer, answer)) for answer in answers)
        return Example(text, tuple(turns))

    def _split_texts(self, chosen: str, rejected: str) -> Example:
        """Split two whole texts into a pair; the prompt is their common prefix of tokens."""
        if self._data.template != "none":
            raise MalformedRow(f"has no prompt for data.template = {self._data.template!r}")
        ids = [self._encode_answer(text, text) for text in (chosen, rejected)]
        size = min(map(len, ids))
        common = int(np.argmin(np.append(ids[0][:size] == ids[1][:size], False)))
        text = self._tokenizer.decode(ids[0][:common].tolist())
        if not text:
            raise MalformedRow("chosen and rejected share no beginning, and there is no prompt")
        begin = self._encode_prompt(chosen)
        begin = begin[: len(begin) - len(self._tokenizer.encode(chosen))]
        prompt = np.append(begin, ids[0][:common])
        return Example(text, tuple(Turns.of(prompt, answer[common:]) for answer in ids))

    def _encode_prompt(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode_prompt(text), np.int32)

    def _encode_answer(self, text: str, content: str) -> np.ndarray:
        """Return the ids of an answer to its end token; `content` is the row's part of it."""
        ids, ends = self._tokenizer.encode(text, inside=True), self._tokenizer.end_ids
        if any(token in ends for token in self._tokenizer.encode(content)[:-1]):
            raise MalformedRow("an answer holds the end token before its end")
        if self._tokenizer.pad_id not in ends and self._tokenizer.pad_id in ids:
            raise MalformedRow("an answer holds letters that the tokenizer has no token for")
        last = next((i for i, token in enumerate(ids) if token in ends), None)
        return np.array([*ids, ends[0]] if last is None else ids[: last + 1], np.int32)


class Examples(NamedTuple):
    """Examples of a run."""

    at: Callable[[int], Example]  # by position in an endless order
    training: list[Example]  # of files
    heldout: list[Example]
    notes: str  # line about the examples
    warnings: list[str]  # about rows that were left out or cut

    def digest(self) -> str:
        """Return a digest of all examples, with their counts."""
        digest = hashlib.sha256()
        for example in (*self.training, *self.heldout):
            digest.update(b"|" + b"".join(a.tobytes() for turns in example.turns for a in turns))
        return f"{len(self.training)} + {len(self.heldout)}, {digest.hexdigest()[:16]}"


def _shorten(example: Example, row_tokens: int, is_pair: bool) -> Example | None:
    """Cut the example to the length of a row; return None if too little is left."""
    kept = ()
    for prompt, response, trained in example.turns:
        size = max(0, row_tokens - len(prompt))
        if trained[:size].any():
            kept += (Turns(prompt, response[:size], trained[:size]),)
    if is_pair and (len(kept) < 2 or np.array_equal(kept[0].response, kept[1].response)):
        return None
    return example._replace(turns=kept) if kept else None


def _split(examples: list[Example], asked: int, name: str) -> tuple[list[Example], list[Example]]:
    """Return examples to train on and held-out ones (smallest hashes of their prompts)."""
    count = min(len(examples) // HELDOUT_SHARE, MAX_HELDOUT) if asked < 0 else asked
    allowed = f"below the {len(examples)} examples of {name!r}, from which they are taken"
    require(count < len(examples), "data.heldout_examples", count, allowed)

    held = hold_out([Problem("", e.text, "", "").fingerprint for e in examples], count)
    training = [example for example, is_held in zip(examples, held, strict=True) if not is_held]
    return training, list(itertools.compress(examples, held))


def _rows(data: OwnData, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of data.source; rows of files are read one at a time."""
    if data.source in WORD_PROBLEMS:
        yield from word_problems.make_examples(data.source, data.generated_examples, seed)
        return
    if data.source.startswith(gym.PREFIX):
        items = gym.open_task("data.source", data.source, seed, data.generated_examples)
        for index in range(data.generated_examples):
            item = items[index]
            answer = f"#### {item['answer']}"
            yield f"item {index}", {"prompt": item["question"].strip(), "response": answer}
        return
    for path in find_files("data.source", data.source, data.folder, "train"):
        for place, row in read_rows(epath.Path(path)):
            yield f"{path} {place}", row


def read_examples(
    data: OwnData, tokenizer: Tokenizer, row_tokens: int, forms: Forms, seed: int = 0
) -> Examples:
    """Return the examples, or pairs, of data.source; those over `row_tokens` are cut or dropped.

    Args:
        seed: of the order, and of generated examples.

    Raises `ConfigError`.
    """
    writer = Writer(data, tokenizer, forms)
    log = RowLog(data.bad_rows_limit)
    counts = log.counts
    examples = []
    longest = 0
    with naming("data.source", data.source), memory_error_as_config_error(data.source):
        for place, row in _rows(data, seed):
            example = log.parse(place, row, writer.write)
            log.check_limit()
            longest = max(longest, example.length if example else 0)
            if example and example.length > row_tokens:
                is_cut = data.overlong == "cut"
                example = _shorten(example, row_tokens, forms is PAIRS) if is_cut else None
                counts["cut" if example else "dropped"] += 1
            if example:
                examples.append(example)
    kind = "pairs" if forms is PAIRS else "examples"
    warnings = log.messages[:MAX_MESSAGES]
    if overlong := counts["dropped"] + counts["cut"]:
        warnings.append(
            f"{overlong:,} of {counts['rows']:,} {kind} exceed packing.row_tokens = {row_tokens} "
            f"({counts['cut']:,} cut, {counts['dropped']:,} dropped); the longest has "
            f"{longest:,} tokens"
        )
    if not examples:
        reason = "; ".join(warnings) or "there are no rows"
        raise ConfigError(f"config.data.source = {data.source!r}: holds no {kind}: {reason}")
    training, heldout = _split(examples, data.heldout_examples, data.source)
    trained = sum(int(turns.trained.sum()) for example in training for turns in example.turns)
    malformed = f" ({counts['malformed']:,} malformed)" if counts["malformed"] else ""
    notes = (
        f"{shown_name(data.source)}: {len(training):,} {kind} of {counts['rows']:,} rows"
        f"{malformed}, {trained:,} tokens to learn. Held out: {len(heldout):,}"
    )
    order = endless_order(len(training), seed)
    return Examples(lambda place: training[order(place)], training, heldout, notes, warnings)


def generated_example(settings: Any, tokenizer: Tokenizer, index: int) -> Example:
    """Return the worked example of a position; it depends on (seed, index) alone.

    Every second turn is observed, the others end in an end token and are trained. An example that
    exceeds the budget is cut, so it has no end token.
    """
    if settings.data.source == "multi_digit_sums":
        text, worked = arithmetic.make_worked_sum(settings.seed, index, settings.examples)
    else:
        text, answer = arithmetic.make_worked_example(settings.seed, index, settings.examples)
        worked = [answer]
    is_trained, budget = itertools.cycle((True, False)), settings.max_response_tokens
    pieces = [
        (token, own)
        for turn, own in zip(worked, is_trained, strict=False)
        for token in [*tokenizer.encode(turn), *tokenizer.end_ids[:1] * own]
    ]
    tokens, trained = zip(*pieces[:budget], strict=True)
    prompt = np.array(tokenizer.encode_prompt(text), np.int32)
    return Example(text, (Turns(prompt, np.array(tokens, np.int32), np.array(trained)),))


def endless_order(count: int, seed: int) -> Callable[[int], int]:
    """Return a map from a position of the run to an example; each pass has a new order."""

    key = [seed, zlib.crc32(b"examples")]
    permute = functools.lru_cache(2)(lambda n: np.random.default_rng([*key, n]).permutation(count))
    return lambda place: int(permute(place // count)[place % count])
