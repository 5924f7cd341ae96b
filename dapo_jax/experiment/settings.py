"""One setting: a default and the sentence that explains it, kept together."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any


def setting(default: Any, explanation: str) -> Any:
    """A dataclass field whose explanation `--help` and error messages can show."""
    return dataclasses.field(default=default, metadata={"explanation": explanation})


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yields (dotted name, field, value) of every leaf of a nested dataclass, in order."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, value


class ConfigError(ValueError):
    """A setting, or a combination of settings, that makes no sense."""


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raises `ConfigError` naming the field, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"config.{field} = {value!r}: must be {allowed}")


def read_json(path: pathlib.Path, field: str) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError` naming the setting that led to it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.{field}: {path} can't be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"config.{field}: {path}: must hold an object")
    return found
