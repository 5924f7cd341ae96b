"""Environments by name: the built-in ones, a user's class, functions as tools."""

import dataclasses
import functools
import json
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.config.experiment import Config, Environment
from dapo_jax.config.settings import changed
from dapo_jax.rollout.environments.builtin import Calculator, Guessing
from dapo_jax.rollout.environments.tools import ToolUse, tool_schema
from dapo_jax.runtime import registry
from dapo_jax.runtime.user_code import choose
from dapo_jax.types.contracts import Environment as Contract
from dapo_jax.types.errors import require

BUILTIN_ENVIRONMENTS: dict[str, Callable[..., Contract]] = {
    "calculator": Calculator,
    "guessing": Guessing,
}


def _plugin(name: str) -> Any:
    """Return the plug-in of an environment's name, as of `verifiers:ID`, or None."""
    return registry.find("environments", re.split("[:?]", name)[0])


def open_factory(name: str, tools: Sequence[str] = ()) -> Callable[..., Contract]:
    """Return the function that makes an environment for each trajectory.

    Raises:
        ConfigError: the name is unknown, can't be imported or has no `step`; two tools have the
            same name.
    """
    if tools:
        functions = [choose({}, "environment.tools", tool) for tool in tools]
        names = [tool_schema(function)["function"]["name"] for function in functions]
        allowed = f"functions of different names; there are {', '.join(names)}"
        require(len({*names}) == len(names), "environment.tools", ",".join(tools), allowed)
        return functools.partial(ToolUse, functions)
    builtin, _, arguments = name.partition("?")
    plugin: Any = BUILTIN_ENVIRONMENTS.get(builtin) or _plugin(name)
    if plugin and hasattr(plugin, "step"):
        return functools.partial(plugin, **dict(urllib.parse.parse_qsl(arguments)))
    if plugin:  # it makes the factory of a name
        return plugin(name)
    choices = (*BUILTIN_ENVIRONMENTS, *registry.names("environments"))
    allowed = f"{', '.join(choices)}, some with :..., or module:Class"
    require(":" in name, "environment.name", name, allowed)
    factory = choose({}, "environment.name", name)
    allowed = "a class whose instances have the method step(text)"
    require(callable(getattr(factory, "step", None)), "environment.name", name, allowed)
    return factory


def with_reward_settings(config: Config) -> Environment:
    """Make `second_try` accept the same answers as the rewards do."""
    settings = config.environment
    if settings.name != "second_try":
        return settings
    rule = {"verifier": config.reward.verifier, "extras": json.dumps(changed(config.extras))}
    return dataclasses.replace(settings, name=f"second_try?{urllib.parse.urlencode(rule)}")


def tool_names(settings: Environment) -> list[str]:
    """Return the names of the functions in `environment.tools`."""
    return [name.strip() for name in settings.tools.split(",") if name.strip()]


def tool_schemas(settings: Environment) -> list[dict[str, Any]] | None:
    """Return the schemas of the tools for the chat template; None if there are no tools."""
    if schemas := getattr(_plugin(settings.name), "tool_schemas", None):
        return schemas(settings.name) or None
    schemas = [tool_schema(choose({}, "environment.tools", name)) for name in tool_names(settings)]
    return schemas or None
