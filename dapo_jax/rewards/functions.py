"""Reward functions: the user's own, and ready ones of the same form.

A part is a function `(prompt, response, answer) -> float` of three texts, `async` where it waits. A
worker computes it, but for a function that the user's program wants called in its own process.
"""

import asyncio
import contextlib
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from dapo_jax.config.user_code import describe_error, resolve
from dapo_jax.rewards import given
from dapo_jax.runtime.settings import ConfigError, require

GYM = "gym"  # the score of a reasoning-gym problem's own scorer; of others 1 where right, or 0
OF_THE_TRAINER = ("rule", "format", "repetition", "model", GYM)  # read tokens, verdicts, devices


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
    if name.startswith((given.HERE, given.GIVEN)):
        return given.find(name)
    return resolve("reward.parts", name)


def own_parts(names: Sequence[str]) -> dict[str, Callable]:
    """Functions of the named parts, without the parts that the trainer computes.

    Raises:
        ConfigError: a name is no part, can't be imported, or can't be called as one.
    """
    ready = (*OF_THE_TRAINER, *READY)
    for name in names:
        allowed = ", ".join(ready) + " or module:function"
        require(name in ready or ":" in name, "reward.parts", name, allowed)
    functions = {name: _find(name) for name in names if name not in OF_THE_TRAINER}
    for name, function in functions.items():
        try:
            inspect.signature(function).bind(prompt="", response="", answer="")
        except TypeError as error:
            reason = f"{error}; a reward is called as (prompt=, response=, answer=)"
            raise ConfigError(f"config.reward.parts = {name!r}: {reason}") from None
    return functions


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


def _number(value: Any) -> float:
    """Finite number of what a function returned. Raises TypeError, ValueError."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"returned {value!r:.80}: must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {number}: must be finite")
    return number


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


def compute(functions: dict[str, Callable], job: dict[str, str], seconds: float) -> dict[str, Any]:
    """Reply to a job: `parts`, rewards by name, and `broken`, the first function that failed.

    Args:
        seconds: limit of a call that waits. Other calls have none here.
    """
    reply: dict[str, Any] = {"parts": {}}
    for name, function in functions.items():
        with _noting(reply, name):
            value = function(**job)
            if inspect.isawaitable(value):
                value = _run(_limited(value, seconds))
            reply["parts"][name] = _number(value)
    return reply


def compute_together(
    functions: dict[str, Callable], jobs: Sequence[dict[str, str]], seconds: float
) -> list[dict[str, Any]]:
    """Replies to jobs, as of `compute`, of functions that wait: all calls wait side by side."""

    async def call(reply: dict[str, Any], name: str, job: dict[str, str]) -> None:
        with _noting(reply, name):
            reply["parts"][name] = _number(await _limited(functions[name](**job), seconds))

    async def call_all() -> None:
        pairs = zip(replies, jobs, strict=True)
        await asyncio.gather(
            *(call(reply, name, job) for reply, job in pairs for name in functions)
        )

    replies: list[dict[str, Any]] = [{"parts": {}} for _ in jobs]
    _run(call_all())
    return replies
