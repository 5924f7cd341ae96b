"""Environments of the package openenv, in this process and without a server."""

import functools
import json
import random
import typing
from collections.abc import Callable
from typing import Any

from dapo_jax.extras.environments import import_package, seed_of
from dapo_jax.runtime.user_code import read_options, resolve
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Observation, Problem


class OpenEnv:
    """Adapter of an OpenEnv environment: a turn is an action, and a trajectory is an episode.

    An action with a single required field takes the turn as it is; others are read from JSON.
    """

    def __init__(self, make: Callable[[], Any]):
        self._environment = make()
        self._shown = ""
        self._random_state = random.getstate()
        self._action = typing.get_type_hints(self._environment.step)["action"]

    def reset(self, problem: Problem) -> str | None:
        """Return the first text of an episode, seeded by the problem."""
        seed = seed_of(problem)
        self._random_state = random.Random(seed).getstate()
        return self._text(self._run(self._environment.reset, seed=seed)) or None

    def step(self, text: str) -> Observation:
        """Reply to an action. Raises ValueError if the turn is not an action."""
        required = [name for name, f in self._action.model_fields.items() if f.is_required()]
        fields = {required[0]: text} if len(required) == 1 else json.loads(text)
        reply = self._run(self._environment.step, self._action.model_validate(fields))
        return Observation(self._text(reply), reward=float(reply.reward or 0), done=reply.done)

    def _run(self, call: Callable, *arguments: Any, **options: Any) -> Any:
        random.setstate(self._random_state)  # many environments also use the global generator
        reply = call(*arguments, **options)
        self._random_state = random.getstate()
        return reply

    def _text(self, observation: Any) -> str:
        """Return the contents of its messages, else its only text field, else all as JSON."""
        fields = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"})
        if messages := fields.get("messages"):
            whole = "\n".join(str(message.get("content", "")) for message in messages)
            # Some environments repeat the whole conversation, which the policy has already seen.
            new, self._shown = whole.removeprefix(self._shown), whole
            return (new or whole).strip()
        texts = [value for value in fields.values() if isinstance(value, str) and value]
        return (texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)).strip()


def open_openenv(name: str) -> Callable[[], OpenEnv]:
    """Return the function that makes `openenv:module:Class?argument=value&...`.

    Raises:
        ConfigError: the package is missing, or has no such environment.
    """
    setting = f"config.environment.name = {name!r}"
    base = import_package(setting, "openenv.core.env_server.interfaces", "openenv").Environment
    path, _, query = name.partition(":")[2].partition("?")
    kind = resolve("environment.name", path)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{setting}: must name a subclass of OpenEnv's Environment")
    return functools.partial(OpenEnv, functools.partial(kind, **read_options(query)))
