"""Reward functions: the user's own, and ready ones of the same form.

A part is a function `(prompt, response, answer) -> float` of three texts. A worker computes it,
but for a function that the user's program asked to have called in its own process.
"""

import inspect
import math
import re
import sys
from collections.abc import Collection
from typing import Any, Protocol

from dapo_jax.config.user_code import describe_error, resolve
from dapo_jax.runtime.settings import ConfigError, require

GYM = "gym"  # the score of a reasoning-gym problem's own scorer; of others 1 where right, or 0
OF_THE_TRAINER = ("rule", "format", "repetition", "model", GYM)  # read tokens, verdicts, devices


class RewardFunction(Protocol):
    """Function of a reward part, called with these keyword arguments."""

    def __call__(self, *, prompt: str, response: str, answer: str) -> float: ...


HERE = "in_process:"  # before the name of a part that this process computes
_here: dict[str, RewardFunction] = {}

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


def name_of(function: RewardFunction, in_process: bool, taken: Collection[str] = ()) -> str:
    """Name of a Python function as a part: `module:function`, or `in_process:function`.

    Args:
        taken: names of other functions beside it.

    Raises:
        ConfigError: a worker could not import it by a name, and may not be done without.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    if in_process:
        name = first = HERE + re.sub(r"\W+", "_", name).strip("_")
        number = 1
        while name in taken:
            number += 1
            name = f"{first}_{number}"
        _here[name] = function  # in the place of an earlier one: a notebook's cell is run again
        return name
    module = getattr(function, "__module__", None) or "__main__"
    importable = module != "__main__" and name.isidentifier()
    if not (importable and getattr(sys.modules.get(module), name, None) is function):
        raise ConfigError(
            f"config.reward.parts = {function!r}: must be a function that a worker process can "
            "import by its name, so one of a module (mine.py) and not of the program or notebook "
            "itself; or let it run here: in_process=True"
        )
    return f"{module}:{name}"


def _find(name: str) -> RewardFunction:
    if name in READY:
        return READY[name]
    if name.startswith(HERE):
        require(
            name in _here,
            "reward.parts",
            name,
            "given by the program: dapo_jax.train(config, reward=function, in_process=True)",
        )
        return _here[name]
    return resolve("reward.parts", name)


def own_parts(names: list[str]) -> dict[str, RewardFunction]:
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


def compute(functions: dict[str, RewardFunction], job: dict[str, str]) -> dict[str, Any]:
    """Reply to a job: `parts`, rewards by name, and `broken`, the first function that failed."""
    reply: dict[str, Any] = {"parts": {}}
    for name, function in functions.items():
        try:
            value = float(function(**job))
            if not math.isfinite(value):
                raise ValueError(f"returned {value}")
            reply["parts"][name] = value
        except Exception as error:
            reply.setdefault("broken", f"{name}: {describe_error(error)}")
    return reply
