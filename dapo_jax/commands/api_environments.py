"""Environments and tools that a program gives as Python objects."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dapo_jax.config import sections
from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.workers.pickled_functions import register_function

if TYPE_CHECKING:
    from dapo_jax.data.prompts.tokenizer import Tokenizer
    from dapo_jax.environments.sessions import Environments
    from dapo_jax.structs import Problem

Environment = Callable[..., Any] | str  # a class, or the name of one
Tools = Sequence[Callable[..., Any]]
MAX_TURNS = 8


class Shown(NamedTuple):
    """Changes of prompts by an environment."""

    opening: "Callable[[Problem], Problem]"
    tools: list[dict[str, Any]] | None


def _settings(environment: Environment | None, tools: Tools) -> dict[str, Any]:
    named = environment or ""
    if not isinstance(named, str):
        named = register_function(named, False, field="environment.name")
    taken: list[str] = []
    for tool in tools:
        require(callable(tool), "environment.tools", tool, "functions")
        taken.append(register_function(tool, False, taken, "environment.tools"))
    return {"name": named, "tools": ",".join(taken)}


def with_environment(config: Config, environment: Environment | None, tools: Tools) -> Config:
    """Config with an environment or tools in the place of its own. Raises `ConfigError`."""
    if environment is None and not tools:
        return config
    changed = dataclasses.replace(config.environment, **_settings(environment, tools))
    return dataclasses.replace(config, environment=changed)


@contextlib.contextmanager
def opened(
    tokenizer: "Tokenizer",
    chat: bool,
    environment: Environment | None,
    tools: Tools,
    max_turns: int,
) -> "Iterator[tuple[Environments | None, Shown]]":
    """Environments of some trajectories, and what they change of the prompts; closed at the end.

    Raises:
        ConfigError: there is no such environment, or tools without messages.
    """
    if environment is None and not tools:
        yield None, Shown(lambda problem: problem, None)
        return
    from dapo_jax.environments.registry import tool_schemas
    from dapo_jax.environments.sessions import Environments

    require(chat or not tools, "tools", len(tools), "none, or prompts that are messages")
    require(max_turns > 0, "max_turns", max_turns, "above 0")
    settings = sections.Environment(max_turns=max_turns, **_settings(environment, tools))
    environments = Environments(settings, tokenizer, chat)
    try:
        yield environments, Shown(environments.open, tool_schemas(settings))
    finally:
        environments.close()
