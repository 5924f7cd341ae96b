"""Environments of the package gymnasium with discrete actions, as text."""

import functools
import importlib
import re
import zlib
from collections.abc import Callable
from typing import Any

from dapo_jax.runtime.user_code import read_options, resolve
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Observation, Problem

MAX_SEED = 1 << 31
_HIGHLIGHTED = re.compile(r"\x1b\[4\dm(.)\x1b\[0m")  # how text renders mark a place
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = re.compile(r"-?\d+")


class Gymnasium:
    """Adapter of a Gymnasium environment: a trajectory is an episode, seeded by the problem.

    The action of a turn is its last number; with `wrap` its remainder by the number of actions, so
    that every number is one. The policy reads the environment's text render, or the
    text of a formatter `(observation, info) -> str`.
    """

    def __init__(
        self, make: Callable[[], Any], formatter: Callable | None = None, wrap: bool = False
    ):
        self._environment = make()
        self._formatter = formatter
        self._wrap = wrap
        space = self._environment.action_space
        self._actions = range(int(space.start), int(space.start + space.n))
        self._shown = ""

    def reset(self, problem: Problem) -> str:
        """Return the first text of an episode, after a line about the actions."""
        seed = zlib.crc32(f"{problem.id} {problem.text}".encode()) % MAX_SEED
        observation, info = self._environment.reset(seed=seed)
        first, last = self._actions[0], self._actions[-1]
        hint = (
            "" if self._formatter else f"Reply with an action, a number from {first} to {last}.\n"
        )
        return hint + self._show(observation, info)

    def step(self, text: str) -> Observation:
        """Reply to an action. A turn without one changes nothing, and is a failed step."""
        numbers = _NUMBER.findall(text)
        action = int(numbers[-1][:9]) if numbers else None
        if action is not None and self._wrap:
            action = self._actions[action % len(self._actions)]
        if action not in self._actions:
            return Observation(self._shown, failure=f"no action in {text[-40:]!r}")
        observation, reward, terminated, truncated, info = self._environment.step(action)
        shown = self._show(observation, info)
        return Observation(shown, reward=float(reward), done=bool(terminated or truncated))

    def _show(self, observation: Any, info: dict[str, Any]) -> str:
        if self._formatter:
            self._shown = str(self._formatter(observation, info))
        elif self._environment.render_mode == "ansi":
            marked = _HIGHLIGHTED.sub(r"[\1]", str(self._environment.render()))
            self._shown = _ESCAPE.sub("", marked).strip()
        else:
            self._shown = str(observation)
        return self._shown


def blackjack(observation: Any, info: dict[str, Any]) -> str:
    """Return the hands of Blackjack-v1 as a sum for the embedded policy, such as `14+10=`."""
    own, dealer, _ = observation
    return f"{own}+{dealer}="


def frozen_lake(observation: Any, info: dict[str, Any]) -> str:
    """Return a place on a map of nine fields as a sum that the embedded policy often gets wrong.

    Without errors it would try no other steps.
    """
    return f"9+{observation}="


def open_gymnasium(name: str) -> Callable[[], Gymnasium]:
    """Return the function that makes `gymnasium:ID?argument=value&...`.

    The arguments `formatter` (`module:function`) and `wrap` are the adapter's own.

    Raises:
        ConfigError: the package is missing, has no such environment, or its actions are not
            discrete.
    """
    setting = f"config.environment.name = {name!r}"
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ConfigError(f"{setting}: needs gymnasium: pip install gymnasium ({error})") from None
    identity, _, query = name.partition(":")[2].partition("?")
    options = read_options(query)
    path, wrap = options.pop("formatter", ""), bool(options.pop("wrap", False))
    formatter = resolve("environment.name", path) if path else None
    try:
        metadata = gymnasium.make(identity, **options).metadata
        if "ansi" in metadata.get("render_modes", ()):
            options["render_mode"] = "ansi"
        make = functools.partial(gymnasium.make, identity, **options)
        space = make().action_space
    except Exception as error:  # the package's own, and whatever an environment raises
        raise ConfigError(f"{setting}: {type(error).__name__}: {error}") from None
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(f"{setting}: its actions must be discrete, not {space}")
    return functools.partial(Gymnasium, make, formatter, wrap)
