"""User code named in the config as `module:function`, its arguments and its errors."""

import contextlib
import importlib
import json
import pathlib
import sysconfig
import traceback
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from dapo_jax.runtime.workers.pickled_functions import find_registered
from dapo_jax.types.errors import ConfigError

# Prefixes of files that are not the user's: libraries, this package, and code without a file.
LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(pathlib.Path(__file__).parent.parent),
    "<",
)


def read_options(query: str) -> dict[str, Any]:
    """Return the arguments in `argument=value&...`.

    A value is true, false, a whole number, a JSON list or text. Raises ConfigError.
    """
    constants = {"true": True, "false": False}
    options: dict[str, Any] = {}
    for key, value in urllib.parse.parse_qsl(query):
        if key in options:
            raise ConfigError(f"?{query}: the argument {key!r} is given twice")
        options[key] = constants.get(value, int(value) if value.isdecimal() else value)
        if value.startswith("["):
            with contextlib.suppress(ValueError):
                options[key] = json.loads(value)
    return options


def short_path(file: str | pathlib.Path) -> str:
    """Return the path relative to the working folder if it is below that."""
    path = pathlib.Path(file)
    folder = pathlib.Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def error_message(error: BaseException) -> str:
    """Return type and message of an error in one line, without files."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(text.split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def describe_error(error: BaseException) -> str:
    """Return one line, as `mine.py:7: return 1 / n: ZeroDivisionError: division by zero`.

    It begins with the innermost line of user code, if there is one.
    """
    message = error_message(error)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        line = f"{short_path(error.filename)}:{error.lineno}: {(error.text or '').strip()}"
        return f"{line}: {message}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(LIBRARIES):
            return f"{short_path(frame.filename)}:{frame.lineno}: {frame.line}: {message}"
    return message


def choose(table: Mapping[str, Callable], field: str, name: str) -> Callable:
    """Return the function of a table, or a user's own."""
    return table.get(name) or find_registered(field, name) or resolve(field, name)


def resolve(field: str, name: str) -> Callable:
    """Import the function `module:function`, installed or in the working folder."""
    named = f"config.{field} = {name!r}"
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ConfigError(f"{named}: must be written module:function")
    try:
        attribute = getattr(importlib.import_module(module), function)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{named}: {describe_error(error)}") from None
    if not callable(attribute):
        raise ConfigError(f"{named}: is not a function or class, but a {type(attribute).__name__}")
    return attribute
