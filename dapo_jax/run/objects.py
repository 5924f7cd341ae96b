"""Python objects as settings: rows, reward functions, environments and tools."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.config.settings import with_values
from dapo_jax.runtime.workers.pickled_functions import register_function
from dapo_jax.types.errors import require

File = str | os.PathLike
RewardFunction = Callable[..., Any]  # any arguments: columns too
Rewards = RewardFunction | Mapping[RewardFunction | str, float]
Environment = Callable[..., Any] | str  # a class, or the name of one
Tools = Sequence[Callable[..., Any]]


def environment_settings(environment: Environment | None, tools: Tools) -> dict[str, Any]:
    """Return the fields of `config.environment` for Python objects. Raises `ConfigError`."""
    name = environment or ""
    if not isinstance(name, str):
        name = register_function(name, False, field="environment.name")
    tool_names: list[str] = []
    for tool in tools:
        require(callable(tool), "environment.tools", tool, "functions")
        tool_names.append(register_function(tool, False, tool_names, "environment.tools"))
    return {"name": name, "tools": ",".join(tool_names)}


def with_objects(
    config: Config,
    data: Any,
    reward: Rewards | None,
    in_process: bool,
    environment: Environment | None,
    tools: Tools,
) -> Config:
    """Return the config with Python objects in place of its source, rewards and environment."""
    if data is not None:
        config = with_values(config, "data", source=source_name(data, "data"))
    if reward is not None:
        allowed = "a function, or weights by function: reward={f: 1.0, g: 0.5}"
        require(not isinstance(reward, list | tuple), "reward.parts", reward, allowed)
        names: dict[str, float] = {}
        for part, weight in (reward if isinstance(reward, Mapping) else {reward: 1.0}).items():
            require(type(weight) in (int, float), "reward.parts", weight, "a number as weight")
            if not isinstance(part, str):
                part = register_function(part, in_process, reserved=names)
            names[part] = float(weight)
        parts = ",".join(f"{name}={weight!r}" for name, weight in names.items())
        config = with_values(config, "reward", parts=parts)
    if environment is not None or tools:
        config = with_values(config, "environment", **environment_settings(environment, tools))
    return config


def source_name(data: Any, name: str) -> str:
    """Return the name of a source of problems, for rows too."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    from dapo_jax.data.files import register_rows

    return register_rows(name, data)
