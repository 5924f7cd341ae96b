"""Reward functions: the built-in ones, the user's, and calls of them.

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
import threading
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dapo_jax.config.experiment import Reward
from dapo_jax.config.user_code import describe_error, resolve
from dapo_jax.rewards.group_rewards import TRAINER_PARTS
from dapo_jax.runtime import registry
from dapo_jax.runtime.workers.pickled_functions import find_registered
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Failure, Outcome, WantedColumns

TOKENS = "tokens"  # optional argument: the text of each token of the response


class ResponseCall(NamedTuple):
    """Arguments of functions that see one response."""

    prompt: str
    response: str
    answer: str
    tokens: list[str] | None = None
    columns: str = ""  # JSON of `Problem.columns`


class GroupCall(NamedTuple):
    """Arguments of functions that see all responses to a prompt."""

    prompt: str
    responses: list[str]
    answer: str
    lengths: list[int]
    correct: list[bool]
    columns: str = ""  # JSON of `Problem.columns`

    def of_trl(self) -> dict[str, Any]:
        """Return the arguments that TRL passes, and the row's columns, as a list each."""
        columns = json.loads(self.columns) if self.columns else {}
        values = {"answer": self.answer} | columns | {"prompts": self.prompt}
        lists = {name: [value] * len(self.responses) for name, value in values.items()}
        return lists | {"completions": list(self.responses)}


RESPONSE_ARGUMENTS = ResponseCall._fields[:3]
GROUP_ARGUMENTS = GroupCall._fields[:-1]
TRL_ARGUMENTS = ("prompts", "completions", "answer")

Call = ResponseCall | GroupCall


def read_call(fields: dict[str, Any]) -> Call:
    """Return the call that `_asdict` made JSON of."""
    return GroupCall(**fields) if "responses" in fields else ResponseCall(**fields)


class PartsReply(NamedTuple):
    """Unweighted rewards of one call.

    A reward of a response is a number, a list of one per token, or a list of spans
    [start, end, number] of the text; a reward of a group is a list of one per response.
    """

    parts: dict[str, Any]
    failure: Failure | None = None  # of the first function that failed

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "PartsReply":
        return cls(fields["parts"], Failure.from_json(fields["failure"]))


# --- functions by name ----------------------------------------------------------------------

_THINK = re.compile(r"<think>(.*?)</think>\s*+<answer>(.*?)</answer>", re.DOTALL)


def think_format(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response is `<think>..</think><answer>..</answer>`, else 0.

    Each tag has to occur once, with text between the tags.

    DeepSeek-R1, arXiv 2501.12948, section 2.2.2. If the prompt ends with `<think>`, the response
    starts after that tag.
    """
    if prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(response.count(tag) != 1 for tag in tags):
        return 0.0
    match = _THINK.fullmatch(response.strip())
    return float(match is not None and all(text.strip() for text in match.groups()))


BUILTIN_FUNCTIONS: dict[str, Callable] = {"think_format": think_format}


def coin(prompt: str, response: str, answer: str) -> float:
    """Return 0 or 1 by a hash of prompt and response: a control without information."""
    return float(zlib.crc32((prompt + response).encode()) & 1)


def find_functions(
    names: Sequence[str], field: str = "reward.parts", reward: Reward | None = None
) -> dict[str, Callable]:
    """Return the functions of the named parts, without the parts that the trainer computes.

    Args:
        field: the setting that names them, for errors.
        reward: settings of the parts that are plug-ins.

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
        if isinstance(function, type):  # it needs settings
            function = function(reward or Reward())
        functions[name] = function or find_registered(field, name) or resolve(field, name)
    for name, function in functions.items():
        try:
            names = (*arguments(function), *column_names(function).required)
            inspect.signature(function).bind(**dict.fromkeys(names))
        except (TypeError, ValueError) as error:
            kinds = RESPONSE_ARGUMENTS, GROUP_ARGUMENTS, TRL_ARGUMENTS
            calls = " or ".join(f"({'=, '.join(call)}=)" for call in kinds)
            reason = f"{error}; a reward is called as {calls}"
            raise ConfigError(f"config.{field} = {name!r}: {reason}") from None
    return functions


def arguments(function: Callable) -> tuple[str, ...]:
    """Return the names of the arguments that a reward function is called with, before columns."""
    parameters = inspect.signature(function).parameters
    if "responses" in parameters:
        return GROUP_ARGUMENTS
    if "completions" in parameters:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return tuple(name for name in TRL_ARGUMENTS if takes_all or name in parameters)
    return (*RESPONSE_ARGUMENTS, TOKENS) if TOKENS in parameters else RESPONSE_ARGUMENTS


def column_names(function: Callable) -> WantedColumns:
    """Return the columns that a reward function takes: its further arguments, or `**columns`."""
    own = arguments(function)
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    further = [p for p in named if p.name not in own]
    required = frozenset(p.name for p in further if p.default is p.empty)
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return WantedColumns(required, frozenset(p.name for p in further) - required, every)


def wanted_columns(functions: Iterable[Callable]) -> WantedColumns:
    """Return the columns that any of the functions takes."""
    wanted = [column_names(function) for function in functions]
    required = frozenset[str]().union(*(own.required for own in wanted))
    optional = frozenset[str]().union(*(own.optional for own in wanted))
    return WantedColumns(required, optional, any(own.every for own in wanted))


def sees_group(function: Callable) -> bool:
    """Return whether one call rewards all responses to a prompt."""
    return not {"responses", "completions"}.isdisjoint(arguments(function))


def is_async(function: Callable) -> bool:
    """Return whether the function, or the `__call__` of the object, is `async def`."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


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
        raise TypeError(
            f"returned {value!r:.80}: spans must be (start, end, number), whole characters"
        ) from None
    return [[start, end, _number(number)] for start, end, number in spans]


def _group_reward(value: Any, responses: int) -> list[float]:
    items = _items(value)
    if items is None or len(items) != responses:
        returned = f"{value!r:.80}" if items is None else f"{len(items)} numbers"
        raise ValueError(f"returned {returned}: must be {responses} numbers, one per response")
    return [_number(item) for item in items]


def place_rewards(
    values: list, text: str, tokens: int, split: Callable[[], Sequence[str]]
) -> Float[np.ndarray, "n"]:
    """Return the reward of each token of a response.

    The number of a span is assigned to the last token with a character of the span.

    Args:
        values: numbers, one per token, or spans [start, end, number] with an exclusive end.
        text: the response.
        tokens: number of its tokens.
        split: returns the text that each token adds.

    Raises:
        ValueError: the count of numbers is wrong, a span exceeds the text, or the texts of the
            tokens do not join to `text`.
    """
    if values and not isinstance(values[0], list):
        if len(values) != tokens:
            raise ValueError(f"returned {len(values)} numbers: must be {tokens}, one per token")
        return np.array(values, np.float64)
    rewards = np.zeros(tokens)
    ends = list(itertools.accumulate(map(len, split())))
    written = ends[-1] if ends else 0
    if written != len(text):
        raise ValueError(f"spans need tokens that decode to {len(text)} characters, not {written}")
    for start, end, number in values:
        if not 0 <= start < end <= len(text):
            raise ValueError(
                f"returned the span ({start}, {end}): must be 0 <= start < end <= {len(text)}, "
                "characters of the response"
            )
        rewards[np.searchsorted(ends, end)] += number
    return rewards


# --- errors ---------------------------------------------------------------------------------

_OF_ERRORS: tuple[tuple[type[BaseException] | tuple, Outcome], ...] = (
    (TimeoutError, Outcome.TIMEOUT),
    (MemoryError, Outcome.MEMORY),
    ((ConnectionError, socket.gaierror), Outcome.JUDGE_UNAVAILABLE),
)


def make_failure(error: BaseException, other: Outcome, text: str = "") -> Failure:
    """Return the failure that an error, or the error behind it, stands for.

    Args:
        other: outcome of all other errors.
        text: of the failure; by default type and message of the error.
    """
    text = text or f"{type(error).__name__}: {error}"
    cause: BaseException | None = error
    while cause is not None:  # clients of services wrap the errors of sockets
        for kind, outcome in _OF_ERRORS:
            if isinstance(cause, kind):
                return Failure(outcome, text)
        cause = cause.__cause__ or cause.__context__
    return Failure(other, text)


# --- calls ----------------------------------------------------------------------------------

_loops = threading.local()


def _run(coroutine: Coroutine) -> Any:
    """Return the result of a coroutine. A thread keeps its loop, and so clients' connections."""
    if not hasattr(_loops, "runner"):
        _loops.runner = asyncio.Runner()
    return _loops.runner.run(coroutine)


async def _limited(awaitable: Awaitable, seconds: float | None) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():
            raise  # raised by the function itself
        raise TimeoutError(f"no answer within {seconds:g} s") from None


async def _await_all(values: Sequence[Any], limits: Sequence[float | None]) -> list[Any]:
    """Return the values, with results or exceptions in the place of awaitables."""

    async def result(value: Any, seconds: float | None) -> Any:
        return await _limited(value, seconds) if inspect.isawaitable(value) else value

    return await asyncio.gather(*map(result, values, limits), return_exceptions=True)


def _select_columns(function: Callable, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that a function takes, and an object that is the answer."""
    wanted = column_names(function)
    names = wanted.required | wanted.optional
    if wanted.every:
        names = columns.keys() - set(arguments(function))
    return {name: value for name, value in columns.items() if name in names or name == "answer"}


def _call(function: Callable, call: Call) -> Any:
    """Return the value of a function, or the exception that it raised."""
    names = arguments(function)
    if isinstance(call, GroupCall) and "completions" in names:
        wanted = column_names(function)
        own = {*names, *wanted.required, *wanted.optional}
        copies = {k: v for k, v in call.of_trl().items() if wanted.every or k in own}
        return _attempt(function, copies)
    values = {name: getattr(call, name) for name in names}
    # Lists are copied, since a function may change its own.
    copies = {k: list(v) if isinstance(v, list) else v for k, v in values.items()}
    if call.columns:
        copies |= _select_columns(function, json.loads(call.columns))
    return _attempt(function, copies)


def _attempt(function: Callable, copies: dict[str, Any]) -> Any:
    try:
        return function(**copies)
    except Exception as error:
        return error


def _check(value: Any, call: Call) -> float | list:
    if isinstance(value, BaseException):
        raise value
    if isinstance(call, GroupCall):
        return _group_reward(value, len(call.responses))
    return _response_reward(value)


def compute(
    functions: dict[str, Callable], calls: Sequence[Call], seconds: float
) -> list[PartsReply]:
    """Return the rewards of calls, each by the functions of its kind; async functions overlap.

    Args:
        seconds: limit of an async call. Other calls have no limit here.
    """
    jobs = [
        (i, name, function)
        for i, call in enumerate(calls)
        for name, function in functions.items()
        if sees_group(function) == isinstance(call, GroupCall)
    ]
    values = [_call(function, calls[i]) for i, _, function in jobs]
    if any(map(inspect.isawaitable, values)):
        limits = [getattr(function, "limit_seconds", seconds) for _, _, function in jobs]
        values = _run(_await_all(values, limits))
    replies = [PartsReply({}) for _ in calls]
    for (i, name, _), value in zip(jobs, values, strict=True):
        try:
            replies[i].parts[name] = _check(value, calls[i])
            replies[i].parts.update(getattr(value, "counts", {}))
        except (Exception, asyncio.CancelledError) as error:
            text = f"{name}: {describe_error(error)}"
            failure = replies[i].failure or make_failure(error, Outcome.USER_ERROR, text)
            replies[i] = replies[i]._replace(failure=failure)
    return replies
