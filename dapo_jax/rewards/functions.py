"""Reward functions: the user's own, and ready ones of the same form.

A part is a function `(prompt, response, answer) -> float` of three texts, `async` where it waits. A
worker computes it, but for a function that the user's program wants called in its own process.
One that names `responses` rewards all responses to a prompt together; one of a single response may
give a reward per token.
"""

import asyncio
import contextlib
import inspect
import math
import operator
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from dapo_jax.config.user_code import describe_error, resolve
from dapo_jax.rewards import pickled_functions
from dapo_jax.runtime.settings import ConfigError, require

GYM = "gym"  # the score of a reasoning-gym problem's own scorer; of others 1 where right, or 0
# They read tokens, verdicts, devices.
TRAINER_PARTS = ("rule", "format", "repetition", "model", "environment", GYM)
# Arguments of functions that see a response, and of those that see a group.
RESPONSE = ("prompt", "response", "answer")
GROUP = ("prompt", "responses", "answer", "lengths", "correct")
TOKENS = "tokens"  # texts of the response's tokens, for a function of a response that names them


class RewardFunction(Protocol):
    """Function of a reward part, called with these keyword arguments."""

    def __call__(self, *, prompt: str, response: str, answer: str) -> float | Awaitable[float]: ...


_THINK = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*\Z", re.DOTALL)


def think_format(prompt: str, response: str, answer: str) -> float:
    """1 where the response is `<think>..</think><answer>..</answer>`, each tag once; else 0.

    DeepSeek-R1, arXiv 2501.12948, section 2.2.2. A template that opens the tag in the prompt
    leaves it out of the response.
    """
    if prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return float(all(response.count(tag) == 1 for tag in tags) and bool(_THINK.match(response)))


READY: dict[str, RewardFunction] = {"think_format": think_format}  # parts to be named as they are


def _find(name: str) -> Callable:
    if name in READY:
        return READY[name]
    if name.startswith((pickled_functions.HERE, pickled_functions.GIVEN)):
        return pickled_functions.find(name)
    return resolve("reward.parts", name)


def own_parts(names: Sequence[str]) -> dict[str, Callable]:
    """Functions of the named parts, without the parts that the trainer computes.

    Raises:
        ConfigError: a name is no part, can't be imported, or can't be called as one.
    """
    ready = (*TRAINER_PARTS, *READY)
    for name in names:
        allowed = ", ".join(ready) + " or module:function"
        require(name in ready or ":" in name, "reward.parts", name, allowed)
    functions = {name: _find(name) for name in names if name not in TRAINER_PARTS}
    for name, function in functions.items():
        try:
            inspect.signature(function).bind(**dict.fromkeys(arguments(function)))
        except (TypeError, ValueError) as error:
            calls = " or ".join(f"({'=, '.join(call)}=)" for call in (RESPONSE, GROUP))
            reason = f"{error}; a reward is called as {calls}"
            raise ConfigError(f"config.reward.parts = {name!r}: {reason}") from None
    return functions


def arguments(function: Callable) -> tuple[str, ...]:
    """Names of the arguments that a reward function is called with.

    Raises:
        TypeError, ValueError: nothing tells its parameters.
    """
    parameters = inspect.signature(function).parameters
    if "responses" in parameters:
        return GROUP
    return (*RESPONSE, TOKENS) if TOKENS in parameters else RESPONSE


def sees_group(function: Callable) -> bool:
    """True if one call rewards all responses to a prompt."""
    return arguments(function) == GROUP


def waits(function: Callable) -> bool:
    """True if a call of the function gives something to wait for: `async def`."""
    call = getattr(function, "__call__", None)  # noqa: B004 (of an object with an async one)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@contextlib.contextmanager
def _noting(reply: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reply.setdefault("broken", f"{name}: {describe_error(error)}")


def _number(value: Any, allowed: str = "a number") -> float:
    """Finite number of what a function returned. Raises TypeError, ValueError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"returned {value!r:.80}: must be {allowed}") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}: must be finite")
    return number


def _listed(value: Any) -> list | None:
    """Items of a list, a tuple or an array; None for anything else."""
    items = value.tolist() if hasattr(value, "tolist") else value
    return list(items) if isinstance(items, list | tuple) else None


def _of_response(value: Any) -> float | list:
    """Number, list of numbers, or list of spans [start, end, number]. Raises as `_number`."""
    items = _listed(value)
    if items is None:
        return _number(value, "a number, one per token, or spans (start, end, number)")
    if hasattr(value, "tolist") and len(items) == 1 and not isinstance(items[0], list):
        return _number(items[0])  # an array of one, as models return it
    if not any(isinstance(item, list | tuple) for item in items):
        return [_number(item) for item in items]
    try:
        spans = [(operator.index(a), operator.index(b), number) for a, b, number in items]
    except (TypeError, ValueError):
        raise TypeError(
            f"returned {value!r:.80}: spans must be (start, end, number), whole characters"
        ) from None
    return [[start, end, _number(number)] for start, end, number in spans]


def _of_group(value: Any, responses: int) -> list[float]:
    """Numbers, one per response. Raises TypeError, ValueError."""
    items = _listed(value)
    if items is None or len(items) != responses:
        returned = f"{value!r:.80}" if items is None else f"{len(items)} numbers"
        raise ValueError(f"returned {returned}: must be {responses} numbers, one per response")
    return [_number(item) for item in items]


def _rewards(value: Any, job: dict[str, Any]) -> float | list:
    responses = job.get("responses")
    return _of_response(value) if responses is None else _of_group(value, len(responses))


def _call(function: Callable, job: dict[str, Any]) -> Any:
    values = {name: job[name] for name in arguments(function)}
    # A function may change its lists; others get them too.
    return function(**{k: list(v) if isinstance(v, list) else v for k, v in values.items()})


def _asked(functions: dict[str, Callable], job: dict[str, Any]) -> dict[str, Callable]:
    """Functions that a job is for: those of a response or those of a group."""
    of_group = "responses" in job
    return {name: f for name, f in functions.items() if sees_group(f) == of_group}


_loops = threading.local()


def _run(waiting: Coroutine) -> Any:
    """Result of a coroutine. The thread keeps its loop, as clients keep their connections."""
    if not hasattr(_loops, "runner"):
        _loops.runner = asyncio.Runner()
    return _loops.runner.run(waiting)


async def _limited(waiting: Awaitable, seconds: float) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await waiting
    except TimeoutError:
        if not limit.expired():
            raise  # the function's own
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def compute(functions: dict[str, Callable], job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Reply to a job: `parts`, rewards by name, and `broken`, the first function that failed.

    Args:
        job: arguments by name; `responses` among them: for the functions that see a group.
        seconds: limit of a call that waits. Other calls have none here.

    Returns:
        rewards of a response: a number, a list of one per token, or a list of spans
        [start, end, number] of its text; of a group: a list of one per response.
    """
    reply: dict[str, Any] = {"parts": {}}
    for name, function in _asked(functions, job).items():
        with _noting(reply, name):
            value = _call(function, job)
            if inspect.isawaitable(value):
                value = _run(_limited(value, seconds))
            reply["parts"][name] = _rewards(value, job)
    return reply


def compute_together(
    functions: dict[str, Callable], jobs: Sequence[dict[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    """Replies to jobs, as of `compute`, of functions that wait: all calls wait side by side."""

    async def call(reply: dict[str, Any], name: str, job: dict[str, Any]) -> None:
        with _noting(reply, name):
            value = await _limited(_call(functions[name], job), seconds)
            reply["parts"][name] = _rewards(value, job)

    async def call_all() -> None:
        pairs = zip(replies, jobs, strict=True)
        await asyncio.gather(
            *(call(reply, name, job) for reply, job in pairs for name in _asked(functions, job))
        )

    replies: list[dict[str, Any]] = [{"parts": {}} for _ in jobs]
    _run(call_all())
    return replies
