"""Environments by name: the ready ones, a user's class, functions as tools."""

import dataclasses
import functools
import importlib
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.config.sections import Environment, Reward
from dapo_jax.config.user_code import resolve
from dapo_jax.environments.tools import ToolUse, describe_tool
from dapo_jax.rewards import pickled_functions
from dapo_jax.runtime.settings import require

READY = {  # module and class of a name; a worker imports the one that it runs
    "calculator": ("games", "Calculator"),
    "guessing": ("games", "Guessing"),
    "second_try": ("second_try", "SecondTry"),
}
OPENENV = "openenv:"  # before the class of an environment of that library


def _find(field: str, name: str) -> Callable:
    return (
        pickled_functions.find(name)
        if name.startswith(pickled_functions.GIVEN)
        else resolve(field, name)
    )


def open_factory(name: str, tools: Sequence[str] = ()) -> Callable[..., Any]:
    """Maker of an environment for each trajectory.

    Raises:
        ConfigError: the name is none, can't be imported, or has no `step`; two tools of a name.
    """
    if tools:
        functions = [_find("environment.tools", tool) for tool in tools]
        names = [describe_tool(function)["function"]["name"] for function in functions]
        allowed = f"functions of different names; there are {', '.join(names)}"
        require(len({*names}) == len(names), "environment.tools", ",".join(tools), allowed)
        return functools.partial(ToolUse, functions)
    if name.startswith(OPENENV):
        from dapo_jax.environments.of_openenv import open_openenv

        return open_openenv(name.removeprefix(OPENENV))
    ready, _, arguments = name.partition("?")
    if ready in READY:
        module, attribute = READY[ready]
        found = getattr(importlib.import_module(f"dapo_jax.environments.{module}"), attribute)
        return functools.partial(found, **dict(urllib.parse.parse_qsl(arguments)))
    allowed = f"{', '.join(READY)}, {OPENENV}module:Class or module:Class"
    require(":" in name, "environment.name", name, allowed)
    factory = _find("environment.name", name)
    allowed = "a class whose instances have the method step(text)"
    require(callable(getattr(factory, "step", None)), "environment.name", name, allowed)
    return factory


def judged_by(settings: Environment, reward: Reward) -> Environment:
    """Settings by which `second_try` calls the same answers right as the rewards do."""
    if settings.name != "second_try":
        return settings
    rule = {name: getattr(reward, name) for name in ("verifier", "percent", "unfinished")}
    return dataclasses.replace(settings, name=f"second_try?{urllib.parse.urlencode(rule)}")


def tool_names(settings: Environment) -> list[str]:
    """Names of the functions in `environment.tools`."""
    return [name.strip() for name in settings.tools.split(",") if name.strip()]


def described_tools(settings: Environment) -> list[dict[str, Any]] | None:
    """Descriptions of the tools for the chat template; None where there are none."""
    found = [describe_tool(_find("environment.tools", name)) for name in tool_names(settings)]
    return found or None
