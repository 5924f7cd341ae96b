"""Reward functions: the built-in ones, the user's, and what they may take and return.

A reward function `(prompt, response, answer) -> float` may be `async`, may name `tokens`, and may
return a number per token or spans of the text. If it names `responses`, one call rewards all
responses to a prompt; if it names `completions`, it gets them as TRL passes them, with lists of
equal prompts, answers and columns. Any other argument is a column of the problem's row. Workers
call it unless the user asked for `in_process=True`.
"""

import asyncio
import inspect
import itertools
import json
import math
import operator
import re
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dapo_jax.config.settings import open_extras
from dapo_jax.runtime import registry
from dapo_jax.runtime.user_code import describe_error, resolve
from dapo_jax.runtime.workers.parent import LATE_FACTOR
from dapo_jax.runtime.workers.pickled_functions import find_registered
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Completion, Failure, Outcome, WantedColumns


class ResponseCall(NamedTuple):
    """Arguments of functions that see one response; columns are JSON of `Problem.columns`."""

    prompt: str
    response: str
    answer: str
    tokens: Sequence[str] | None = None
    columns: str = ""


class GroupCall(NamedTuple):
    """Arguments of functions that see all responses to a prompt."""

    prompt: str
    responses: list[str]
    answer: str
    lengths: list[int]
    correct: list[bool]
    columns: str = ""


Call = ResponseCall | GroupCall
GYM = "gym"  # score of a reasoning-gym problem's own scorer; elsewhere 1 if correct, else 0
TESTS = "tests"  # fraction of the tests that a program passes
TRAINER_PARTS = ("rule", "format", "repetition", "model", "environment", GYM, TESTS)
TOKENS = "tokens"  # optional argument: the text of each token of the response
RESPONSE_ARGUMENTS = ResponseCall._fields[:3]
GROUP_ARGUMENTS = GroupCall._fields[:-1]
TRL_ARGUMENTS = ("prompts", "completions", "answer")


def read_call(fields: Sequence[Any]) -> Call:
    """Return the call that JSON made a list of."""
    return ResponseCall(*fields) if isinstance(fields[1], str) else GroupCall(*fields)


class PartsReply(NamedTuple):
    """Unweighted rewards of one call.

    A reward of a response is a number, a list of one per token, or a list of spans
    [start, end, number] of the text; a reward of a group is a list of one per response. Counts,
    such as requests to a judge, are metrics.
    """

    parts: dict[str, Any]
    failure: Failure | None = None
    counts: dict[str, float] = {}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "PartsReply":
        known: dict[str, Any] = fields | {"failure": Failure.from_json(fields["failure"])}
        return cls(**known)


# --- functions by name ----------------------------------------------------------------------

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK = re.compile(r"<think>(.*?)</think>\s*+<answer>(.*?)</answer>", re.DOTALL)


def think_format(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response is `<think>..</think><answer>..</answer>`, else 0.

    Each tag has to occur once, with text between the tags. If the prompt ends with `<think>`, the
    response starts after that tag. DeepSeek-R1, arXiv 2501.12948, section 2.2.2.
    """
    if prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    match = _THINK.fullmatch(response.strip())
    is_once = all(response.count(tag) == 1 for tag in _TAGS)
    return float(match is not None and is_once and all(text.strip() for text in match.groups()))


BUILTIN_FUNCTIONS: dict[str, Callable] = {"think_format": think_format}


def coin(prompt: str, response: str, answer: str) -> float:
    """Return 0 or 1 by a hash of prompt and response: a control without information."""
    return float(zlib.crc32((prompt + response).encode()) & 1)


class RewardFunction:
    """A reward function and what its signature asks for.

    A plug-in with the attribute `concurrency` limits and repeats its requests itself.

    Attributes:
        arguments: names of its arguments, before columns.
        columns: its further arguments, or `**columns`.
        sees_group: whether one call rewards all responses to a prompt.
        is_async: whether the function, or the `__call__` of the object, is `async def`.

    Raises:
        TypeError, ValueError: it can't be called as a reward function.
    """

    def __init__(self, name: str, function: Callable):
        self.name, self._function = name, function
        self.concurrency: int = getattr(function, "concurrency", 0)
        call = getattr(function, "__call__", None)  # noqa: B004
        self.is_async = any(map(inspect.iscoroutinefunction, (function, call)))
        parameters = inspect.signature(function).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._as_trl = "completions" in parameters and "responses" not in parameters
        self.sees_group = self._as_trl or "responses" in parameters
        self.arguments = GROUP_ARGUMENTS if self.sees_group else RESPONSE_ARGUMENTS
        if self._as_trl:
            self.arguments = tuple(name for name in TRL_ARGUMENTS if every or name in parameters)
        elif TOKENS in parameters and not self.sees_group:
            self.arguments += (TOKENS,)
        further = [p for name, p in parameters.items() if name not in self.arguments]
        named = {p for p in further if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        required = frozenset(p.name for p in named if p.default is p.empty)
        self.columns = WantedColumns(required, frozenset(p.name for p in named) - required, every)
        inspect.signature(function).bind(**dict.fromkeys((*self.arguments, *required)))

    def score(self, call: Call, seconds: float) -> PartsReply:
        """Return the reward of a call, which is made once more if it fails.

        It must not run in an event loop, since the function may start one.
        """
        reply = PartsReply({})
        for limit in self._limits(seconds):
            try:
                value = self._call(call)
                if inspect.isawaitable(value):
                    value = asyncio.run(_limited(value, limit))
                return self._read(value, call)
            except (Exception, asyncio.CancelledError) as error:
                reply = self._fail(error)
        return reply

    async def score_async(self, call: Call, seconds: float) -> PartsReply:
        """Return the reward of a call of an async function, as `score` does."""
        reply, task = PartsReply({}), asyncio.current_task()
        for limit in self._limits(seconds):
            try:
                return self._read(await _limited(self._call(call), limit), call)
            except (Exception, asyncio.CancelledError) as error:
                reply = self._fail(error)
                if task and task.cancelling():  # nobody reads it
                    break
        return reply

    def _limits(self, seconds: float) -> tuple[float | None, ...]:
        return (None,) if self.concurrency else (seconds, LATE_FACTOR * seconds)

    def _call(self, call: Call) -> Any:
        columns = json.loads(call.columns) if call.columns else {}
        if self._as_trl and isinstance(call, GroupCall):
            values = {"answer": call.answer} | columns | {"prompts": call.prompt}
            values = {name: [value] * len(call.responses) for name, value in values.items()}
            values["completions"] = list(call.responses)
        else:
            own = {name: getattr(call, name) for name in self.arguments}
            own["answer"] = columns.get("answer", call.answer)  # may be an object
            # Lists are copied, since a function may change its own.
            values = columns | {k: list(v) if isinstance(v, list) else v for k, v in own.items()}
        wanted = {*self.arguments, *self.columns.required, *self.columns.optional}
        every = self.columns.every
        return self._function(**{k: v for k, v in values.items() if every or k in wanted})

    def _read(self, value: Any, call: Call) -> PartsReply:
        is_group = isinstance(call, GroupCall)
        reward = _group_reward(value, len(call.responses)) if is_group else _response_reward(value)
        return PartsReply({self.name: reward}, None, getattr(value, "counts", {}))

    def _fail(self, error: BaseException) -> PartsReply:
        text = f"{self.name}: {describe_error(error)}"
        failure = make_failure(error, Outcome.USER_ERROR, text)
        return PartsReply({}, failure, getattr(error, "counts", {}))


def find_functions(
    names: Iterable[str], field: str = "reward.parts", extras: Any = None
) -> dict[str, RewardFunction]:
    """Return the functions of the named parts, without the parts that the trainer computes.

    Args:
        field: the setting that names them, for errors.
        extras: settings of the parts that are plug-ins.

    Raises:
        ConfigError: a name is no part, can't be imported, or can't be called as one.
    """
    known = (*TRAINER_PARTS, *BUILTIN_FUNCTIONS, *registry.names("parts"))
    allowed = ", ".join(known) + " or module:function"
    functions = {}
    for name in names:
        require(name in known or ":" in name, field, name, allowed)
        if name in TRAINER_PARTS:
            continue
        function = BUILTIN_FUNCTIONS.get(name) or registry.find("parts", name)
        if isinstance(function, type):
            settings = getattr(extras or open_extras(), name, None)
            function = function(settings) if settings else function()
        function = function or find_registered(field, name) or resolve(field, name)
        try:
            functions[name] = RewardFunction(name, function)
        except (TypeError, ValueError) as error:
            kinds = RESPONSE_ARGUMENTS, GROUP_ARGUMENTS, TRL_ARGUMENTS
            calls = " or ".join(f"({'=, '.join(call)}=)" for call in kinds)
            reason = f"{error}; a reward is called as {calls}"
            raise ConfigError(f"config.{field} = {name!r}: {reason}") from None
    return functions


def wanted_columns(functions: Iterable[RewardFunction]) -> WantedColumns:
    """Return the columns that any of the functions takes."""
    wanted = [function.columns for function in functions]
    required = frozenset[str]().union(*(columns.required for columns in wanted))
    optional = frozenset[str]().union(*(columns.optional for columns in wanted))
    return WantedColumns(required, optional, any(columns.every for columns in wanted))


# --- values that functions return -----------------------------------------------------------


def _number(value: Any, allowed: str = "a number") -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"returned {value!r:.80}: must be {allowed}") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}: must be finite")
    return number


def _items(value: Any) -> list | None:
    """Return the items of a list, a tuple or an array; None for anything else."""
    items = value.tolist() if hasattr(value, "tolist") else value
    return list(items) if isinstance(items, list | tuple) else None


def _response_reward(value: Any) -> float | list:
    items = _items(value)
    if items is None:
        return _number(value, "a number, one per token, or spans (start, end, number)")
    if hasattr(value, "tolist") and len(items) == 1 and not isinstance(items[0], list):
        return _number(items[0])  # models return an array of one number
    if not any(isinstance(item, list | tuple) for item in items):
        return [_number(item) for item in items]
    try:
        spans = [(operator.index(a), operator.index(b), number) for a, b, number in items]
    except (TypeError, ValueError):
        allowed = "spans must be (start, end, number), whole characters"
        raise TypeError(f"returned {value!r:.80}: {allowed}") from None
    return [[start, end, _number(number)] for start, end, number in spans]


def _group_reward(value: Any, responses: int) -> list[float]:
    items = _items(value)
    if items is None or len(items) != responses:
        returned = f"{value!r:.80}" if items is None else f"{len(items)} numbers"
        raise ValueError(f"returned {returned}: must be {responses} numbers, one per response")
    return [_number(item) for item in items]


def place_rewards(
    values: list, completion: Completion, split: Callable[[list[int]], Sequence[str]]
) -> Float[np.ndarray, "n"]:
    """Return the reward of each sampled token of a response, on those of its last turn.

    The number of a span is assigned to the last token with a character of the span.

    Args:
        values: numbers, one per token, or spans [start, end, number] with an exclusive end.
        split: returns the text that each token adds.

    Raises:
        ValueError: the count of numbers is wrong, a span exceeds the text, or the texts of the
            tokens do not join to it.
    """
    tokens, length = completion.last_turn.tolist(), len(completion.text)
    rewards, before = np.zeros(len(completion)), len(completion) - len(tokens)
    if values and not isinstance(values[0], list):
        if len(values) != len(tokens):
            allowed = f"must be {len(tokens)}, one per token"
            raise ValueError(f"returned {len(values)} numbers: {allowed}")
        rewards[before:] = values
        return rewards
    ends = [0, *itertools.accumulate(map(len, split(tokens)))]
    if ends[-1] != length:
        raise ValueError(f"spans need tokens that decode to {length} characters, not {ends[-1]}")
    for start, end, number in values:
        if not 0 <= start < end <= length:
            allowed = f"0 <= start < end <= {length}, characters of the response"
            raise ValueError(f"returned the span ({start}, {end}): must be {allowed}")
        rewards[before + np.searchsorted(ends, end) - 1] += number
    return rewards


# --- errors and limits ----------------------------------------------------------------------

_ERROR_OUTCOMES: tuple[tuple[type[BaseException] | tuple, Outcome], ...] = (
    (TimeoutError, Outcome.TIMEOUT),
    (MemoryError, Outcome.MEMORY),
    ((ConnectionError, socket.gaierror), Outcome.JUDGE_UNAVAILABLE),
)


def make_failure(error: BaseException, other: Outcome, text: str = "") -> Failure:
    """Return the kind of failure of an error, or of its cause.

    Args:
        other: outcome of all other errors.
        text: of the failure; by default type and message of the error.
    """
    text = text or f"{type(error).__name__}: {error}"
    cause: BaseException | None = error
    while cause is not None:  # clients of services wrap the errors of sockets
        for kind, outcome in _ERROR_OUTCOMES:
            if isinstance(cause, kind):
                return Failure(outcome, text)
        cause = cause.__cause__ or cause.__context__
    return Failure(other, text)


async def _limited(awaitable: Awaitable, seconds: float | None) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():
            raise  # raised by the function itself
        raise TimeoutError(f"no answer within {seconds:g} s") from None
