"""Environments of other packages: OpenEnv, verifiers."""

import importlib
import zlib
from typing import Any

from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Problem


def import_package(setting: str, module: str, package: str) -> Any:
    """Import a module of an optional package. Raises ConfigError that begins with `setting`."""
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting}: needs pip install {package!r} ({error})") from None


def seed_of(problem: Problem) -> int:
    """Return the seed of an episode, 32 bits: the same for all responses to a problem."""
    return zlib.crc32(f"{problem.id} {problem.text}".encode())


def refuse_gymnasium(name: str) -> Any:
    """Raise ConfigError for an old config: the adapter of Gymnasium was removed."""
    shown = "must be a class of yours around the game, as in docs/environments.md"
    raise ConfigError(f"config.environment.name = {name!r}: {shown}")
