"""Config files: Python files with a `get_config`, and the config.json of a run."""

import importlib.util
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from dapo_jax.config.user_code import describe_error, short_path
from dapo_jax.runtime.settings import (
    ConfigError,
    from_dict,
    nearest,
    origin,
    read_json,
    remembering_lines,
)


def _get_config(path: pathlib.Path) -> Callable[..., Any]:
    """The function of that name in the file, whose other code has run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, "get_config", None)
    if not callable(found):
        raise ConfigError(f"{short_path(path)}: has no function get_config()")
    return found


def _run_file(path: pathlib.Path, argument: str | None) -> Any:
    try:
        with remembering_lines(str(path)):
            get_config = _get_config(path)
            if argument is None:
                return get_config()
            if not inspect.signature(get_config).parameters:
                raise ConfigError(
                    f"{path}:{argument}: its get_config() takes nothing after a colon"
                )
            return get_config(argument)
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        said, file = describe_error(error), short_path(path)
        raise ConfigError(said if file in said else f"{file}: {said}") from None


def _find(name: str) -> tuple[pathlib.Path, str | None]:
    """The file, and what stands behind its colon. Raises `ConfigError` where there is none."""
    path, argument = pathlib.Path(name), None
    if not path.exists() and ":" in name:
        file, _, argument = name.rpartition(":")
        path = pathlib.Path(file)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        there = [str(p) for pattern in ("*.py", "*.json") for p in path.parent.glob(pattern)]
        raise ConfigError(f"--config={name}: there is no such file{nearest(str(path), there, 0.7)}")
    return path.absolute(), argument


def read_config(kind: type, name: str) -> Any:
    """The experiment that `FILE.py`, `FILE.py:ARGUMENT`, `RUN/config.json` or `RUN` holds.

    A Python file's `get_config` returns a `kind`, or an ml_collections `ConfigDict` (or plain
    dictionaries) of its settings.

    Raises:
        ConfigError: no such file, or a mistake in it, with file and line.
    """
    path, argument = _find(name)
    if path.suffix not in (".py", ".json"):
        raise ConfigError(f"--config={name}: must be a .py file, a run's config.json or its folder")
    if path.suffix == ".json":
        return _of_tables(kind, read_json(path, ""), path)
    found = _run_file(path, argument)
    if isinstance(found, ConfigDict):
        found = found.to_dict()
    if isinstance(found, dict):
        return _of_tables(kind, found, path)
    if not isinstance(found, kind):
        raise ConfigError(
            f"{short_path(path)}: get_config() returns {type(found).__name__}; this command "
            f"takes {kind.__name__}"
        )
    return found


def _of_tables(kind: type, values: dict[str, Any], path: pathlib.Path) -> Any:
    try:
        return from_dict(kind, values)
    except ConfigError as error:
        raise ConfigError(f"{short_path(path)}: {error}", error.field) from None


def locate(error: ConfigError, config: Any, name: str) -> str:
    """The error with the line of the config file that set what it is about, where there is one."""
    line = origin(config, error.field) if error.field else None
    if line is None:
        return str(error)
    number, text = line
    return f"{short_path(_find(name)[0])}:{number}: {text}: {error}"
