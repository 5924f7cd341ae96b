"""Functions of the user's own, named `module:function` in the config."""

import importlib
from collections.abc import Callable

from dapo_jax.experiment.settings import ConfigError


def resolve(field: str, name: str) -> Callable:
    """The function that `name` names. Raises `ConfigError` that says what is missing.

    Modules are found as by `import`: installed, or in the folder that the command runs in.
    """
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ConfigError(f"config.{field} = {name!r}: must be written module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a user's module may raise while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"config.{field} = {name!r}: {reason}") from None
    if not callable(found):
        raise ConfigError(f"config.{field} = {name!r}: is not a function")
    return found
