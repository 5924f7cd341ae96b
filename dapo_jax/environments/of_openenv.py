"""Environments of the package openenv, in this process and without a server."""

import functools
import importlib
import json
import random
import typing
import urllib.parse
import zlib
from collections.abc import Callable
from typing import Any

from dapo_jax.config.user_code import resolve
from dapo_jax.environments.interface import Observation
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.structs import Problem

PREFIX = "openenv:"


class OpenEnv:
    """One of OpenEnv's environments; a turn is its action, and a trajectory is one episode.

    An action of a single required field takes the turn as it is, any other is read from its JSON.
    """

    def __init__(self, make: Callable[[], Any]):
        self._environment, self._shown, self._draws = make(), "", random.getstate()
        self._action = typing.get_type_hints(self._environment.step)["action"]

    def reset(self, problem: Problem) -> str | None:
        """Text that an episode begins with, its seed drawn by the problem."""
        seed = zlib.crc32(f"{problem.id} {problem.text}".encode())
        self._draws = random.Random(seed).getstate()
        return self._text(self._run(self._environment.reset, seed=seed)) or None

    def step(self, text: str) -> Observation:
        """Reply to an action. Raises ValueError for a turn that is none."""
        required = [name for name, of in self._action.model_fields.items() if of.is_required()]
        fields = {required[0]: text} if len(required) == 1 else json.loads(text)
        reply = self._run(self._environment.step, self._action.model_validate(fields))
        return Observation(self._text(reply), reward=float(reply.reward or 0), done=reply.done)

    def _run(self, call: Callable, *args: Any, **options: Any) -> Any:
        random.setstate(self._draws)  # the module's own draws, which many use beside their seed
        reply = call(*args, **options)
        self._draws = random.getstate()
        return reply

    def _text(self, observation: Any) -> str:
        """Contents of its messages, else its one field of text, else all fields as JSON."""
        fields = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"})
        said = [str(message.get("content", "")) for message in fields.get("messages") or ()]
        texts = said or [value for value in fields.values() if isinstance(value, str) and value]
        alone = "\n".join(texts) if said or len(texts) == 1 else ""
        whole = alone or json.dumps(fields, ensure_ascii=False)
        # Some tell all that was said so far, which the policy has before it.
        new, self._shown = whole.removeprefix(self._shown) if said else whole, whole
        return (new or whole).strip()


def open_openenv(name: str) -> Callable[[], OpenEnv]:
    """Maker of an environment `module:Class?argument=value&...`: true, false, a number or text.

    Raises:
        ConfigError: the package is missing, or has no such environment.
    """
    setting = f"config.environment.name = {PREFIX + name!r}"
    try:
        base = importlib.import_module("openenv.core.env_server.interfaces").Environment
    except ImportError as error:
        told = f"needs openenv: pip install openenv ({error})"
        raise ConfigError(f"{setting}: {told}") from None
    path, _, query = name.partition("?")
    found, given = resolve("environment.name", path), urllib.parse.parse_qsl(query)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{setting}: must name a subclass of OpenEnv's Environment")
    words = {"true": True, "false": False}
    arguments = {k: words.get(v, int(v) if v.isdecimal() else v) for k, v in given}
    return functools.partial(OpenEnv, functools.partial(found, **arguments))
