"""Config files: Python files with a `get_config`, the config.json of a run, and shipped configs."""

import importlib.util
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

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
    """Runs the file and returns its function `get_config`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"{short_path(path)}: has no function get_config()")
    return get_config


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
        message, file = describe_error(error), short_path(path)
        raise ConfigError(message if file in message else f"{file}: {message}") from None


def shipped_configs(kind: type | None = None) -> dict[str, pathlib.Path]:
    """Files of the configs that ship with the package, by name.

    Args:
        kind: only those whose `get_config` says that it returns this class; None: all.
    """
    package = pathlib.Path(__file__).parents[1]
    installed, checkout = package / "configs", package.parent / "configs"
    files = sorted((installed if installed.is_dir() else checkout).glob("*.py"))
    returns = rf"^def get_config\(.*\) -> {kind.__name__ if kind else '.*'}:$"
    return {path.stem: path for path in files if re.search(returns, path.read_text(), re.M)}


def _find(name: str) -> tuple[pathlib.Path, str | None]:
    """Path and argument of `FILE`, `FILE:ARGUMENT` or a shipped config's name in their place.

    A file or run of that name in the working folder comes first. Raises `ConfigError` where there
    is neither.
    """
    path, argument = pathlib.Path(name), None
    if not path.exists() and ":" in name:
        file, _, argument = name.rpartition(":")
        path = pathlib.Path(file)
    shipped, wanted = shipped_configs(), str(path)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        if wanted in shipped:
            return shipped[wanted], argument
        files = [str(p) for pattern in ("*.py", "*.json") for p in path.parent.glob(pattern)]
        hint = nearest(str(path), [*files, *shipped], 0.7)
        hint = hint or f"; the configs that ship are {', '.join(shipped)}" * (not path.suffix)
        raise ConfigError(f"--config={name}: there is no such file{hint}")
    return path.absolute(), argument


def read_config(kind: type, name: str) -> Any:
    """Config of `FILE.py`, `FILE.py:ARGUMENT`, `NAME:ARGUMENT`, `RUN/config.json` or `RUN`.

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
    config = _run_file(path, argument)
    if type(config).__name__ == "ConfigDict":  # of ml_collections, which is slow to import
        config = config.to_dict()
    if isinstance(config, dict):
        return _of_tables(kind, config, path)
    if not isinstance(config, kind):
        raise ConfigError(
            f"{short_path(path)}: get_config() returns {type(config).__name__}; this command "
            f"takes {kind.__name__}"
        )
    return config


def _of_tables(kind: type, values: dict[str, Any], path: pathlib.Path) -> Any:
    try:
        return from_dict(kind, values)
    except ConfigError as error:
        raise ConfigError(f"{short_path(path)}: {error}", error.field) from None


def locate(error: ConfigError, config: Any, name: str) -> str:
    """Text of an error, after the line of the config file that set the setting at fault."""
    line = origin(config, error.field) if error.field else None
    if line is None:
        return str(error)
    number, text = line
    return f"{short_path(_find(name)[0])}:{number}: {text}: {error}"
