"""Code of the user's own: functions named `module:function` in the config, and their errors."""

import importlib
import pathlib
import sysconfig
import traceback
from collections.abc import Callable

from dapo_jax.runtime.settings import ConfigError

# Beginnings of files that are no user's: libraries, this one, and code without a file.
LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(pathlib.Path(__file__).parent.parent),
    "<",
)


def short_path(file: str | pathlib.Path) -> str:
    """Path relative to the working folder, where it is below that."""
    path, here = pathlib.Path(file), pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def error_message(error: BaseException) -> str:
    """Type and message of an error in one line, which names no file."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(text.split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def describe_error(error: BaseException) -> str:
    """One line of text, as `mine.py:7: return 1 / n: ZeroDivisionError: division by zero`.

    Its beginning is the innermost line in no library; without one the error stands alone.
    """
    message = error_message(error)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        line = f"{short_path(error.filename)}:{error.lineno}: {(error.text or '').strip()}"
        return f"{line}: {message}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(LIBRARIES):
            return f"{short_path(frame.filename)}:{frame.lineno}: {frame.line}: {message}"
    return message


def resolve(field: str, name: str) -> Callable:
    """Function of the name `module:function`. Raises `ConfigError` where it can't be imported.

    Modules are found as by `import`: installed, or in the folder that the command runs in.
    """
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ConfigError(f"config.{field} = {name!r}: must be written module:function")
    try:
        attribute = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a user's module may raise while it is imported
        raise ConfigError(f"config.{field} = {name!r}: {describe_error(error)}") from None
    if not callable(attribute):
        raise ConfigError(f"config.{field} = {name!r}: is not a function")
    return attribute
