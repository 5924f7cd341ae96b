"""Config files: Python files with `get_config`, config.json of a run, and packaged configs."""

import importlib.util
import inspect
import pathlib
import re
from typing import Any

from dapo_jax.config.user_code import describe_error, short_path
from dapo_jax.runtime.settings import ConfigError, from_dict, nearest, read_json


def _run_file(path: pathlib.Path, argument: str | None) -> Any:
    """Run the file and return the result of its function `get_config`."""
    file = short_path(path)
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError(f"{file}: has no function get_config()")
        if argument is None:
            return get_config()
        if not inspect.signature(get_config).parameters:
            raise ConfigError(f"{path}:{argument}: get_config() takes no argument")
        return get_config(argument)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        message = describe_error(error)
        raise ConfigError(message if file in message else f"{file}: {message}") from None


def shipped_configs(kind: type | None = None) -> dict[str, pathlib.Path]:
    """Return the files of packaged configs by name, or only those that return a `kind`."""
    package = pathlib.Path(__file__).parents[1]
    installed, checkout = package / "configs", package.parent / "configs"
    files = sorted((installed if installed.is_dir() else checkout).glob("*.py"))
    returns = rf"^def get_config\(.*\) -> {kind.__name__ if kind else '.*'}:$"
    return {path.stem: path for path in files if re.search(returns, path.read_text(), re.M)}


def _find(name: str) -> tuple[pathlib.Path, str | None]:
    """Return path and argument of `FILE`, `FILE:ARGUMENT`, or the name of a packaged config.

    A file or run in the working folder takes precedence over a packaged config.
    """
    path = pathlib.Path(name)
    argument = None
    if not path.exists() and ":" in name:
        file, _, argument = name.rpartition(":")
        path = pathlib.Path(file)
    shipped = shipped_configs()
    wanted = str(path)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        if wanted in shipped:
            return shipped[wanted], argument
        files = [str(p) for pattern in ("*.py", "*.json") for p in path.parent.glob(pattern)]
        hint = nearest(str(path), [*files, *shipped], 0.7)
        hint = hint or f"; packaged configs are {', '.join(shipped)}" * (not path.suffix)
        raise ConfigError(f"--config={name}: there is no such file{hint}")
    return path.absolute(), argument


def read_config(kind: type, name: str) -> Any:
    """Read the config `FILE.py`, `FILE.py:ARGUMENT`, `NAME:ARGUMENT`, `RUN/config.json` or `RUN`.

    `get_config` of a Python file returns a `kind`, or its settings as an ml_collections
    `ConfigDict` or nested dictionaries. Raises `ConfigError`.
    """
    path, argument = _find(name)
    if path.suffix not in (".py", ".json"):
        raise ConfigError(f"--config={name}: must be a .py file, a run's config.json or its folder")
    file = short_path(path)
    config: Any = read_json(path, "") if path.suffix == ".json" else _run_file(path, argument)
    if type(config).__name__ == "ConfigDict":  # of ml_collections, which is slow to import
        config = config.to_dict()
    if isinstance(config, dict):
        try:
            return from_dict(kind, config)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}", error.field) from None
    if not isinstance(config, kind):
        returned = type(config).__name__
        expected = f"this command takes {kind.__name__}"
        raise ConfigError(f"{file}: get_config() returns {returned}; {expected}")
    return config


def locate(error: ConfigError, name: str) -> str:
    """Return the text of an error, after the only line of the config file that assigns to it."""
    field = error.field.rpartition(".")[2]
    if not (name and field):
        return str(error)
    path, _ = _find(name)
    lines = enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    matches = [item for item in lines if re.search(rf"\b{field}\s*=[^=]", item[1])]
    if len(matches) != 1:
        return str(error)
    number, text = matches[0]
    return f"{short_path(path)}:{number}: {text.strip()}: {error}"
