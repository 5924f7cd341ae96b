"""Reward parts that a worker computes: the user's functions, and ready ones of the same form.

A part is a function `(prompt, response, answer) -> float` of three texts.
"""

import inspect
import re
from collections.abc import Callable

from dapo_jax.experiment.hooks import resolve
from dapo_jax.experiment.settings import ConfigError, require

GYM = "gym"  # the score of a reasoning-gym problem's own scorer; of others 1 where right, or 0
OF_THE_TRAINER = (
    "rule",
    "format",
    "repetition",
    "model",
    GYM,
)  # need tokens, verdicts or the devices

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


READY: dict[str, Callable[[str, str, str], float]] = {"think_format": think_format}


def worker_parts(names: list[str]) -> dict[str, Callable[[str, str, str], float]]:
    """The functions behind those names that a worker computes. Raises `ConfigError`."""
    ready = (*OF_THE_TRAINER, *READY)
    for name in names:
        allowed = ", ".join(ready) + " or module:function"
        require(name in ready or ":" in name, "reward.parts", name, allowed)
    functions = {
        name: READY[name] if name in READY else resolve("reward.parts", name)
        for name in names
        if name not in OF_THE_TRAINER
    }
    for name, function in functions.items():
        try:
            inspect.signature(function).bind(prompt="", response="", answer="")
        except TypeError as error:
            reason = f"{error}; a reward is (prompt, response, answer) -> float"
            raise ConfigError(f"config.reward.parts = {name!r}: {reason}") from None
    return functions
