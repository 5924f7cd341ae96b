"""Typed settings: dataclass fields with a default, an explanation and a rule.

Errors name the setting, its value and the allowed values.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from dapo_jax.config.rules import Choices, OwnChoices, Range, Rule, When
from dapo_jax.types.errors import ConfigError, check_place, nearest, require

T = typing.TypeVar("T")

TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# Magnitudes that float32 arithmetic does not turn into 0 or infinity.
MIN_MAGNITUDE = 1e-30
MAX_MAGNITUDE = 1e30


def setting(
    default: T,
    explanation: str,
    *,
    read: When | None = None,
    may_change: bool | When = False,
    auto: int | None = None,
) -> T:
    """Return a dataclass field with an explanation for `--help` and a `Rule`.

    The type of the field defines the allowed values.
    """
    rule = Rule(read=read, may_change=may_change, auto=auto)
    return dataclasses.field(default=default, metadata={"explanation": explanation, "rule": rule})


def part(kind: Callable[[], T], *, read: When | None = None, may_change: bool = False) -> T:
    """Return a dataclass field for a section, with the rule of settings that have none."""
    rule = Rule(read=read, may_change=may_change)
    return dataclasses.field(default_factory=kind, metadata={"rule": rule})


def check_name(kind: type, name: str, section: str = "") -> None:
    """Raise `ConfigError` if the section `kind` has no setting `name`."""
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    if name not in known:
        hint = nearest(name, known) or f"; {kind.__name__} has {', '.join(known)}"
        owner = section or kind.__name__
        raise ConfigError(f"{owner}.{name}: there is no such setting{hint}")


def _read_types(kind: type) -> None:
    """Move the allowed values from the annotations of a section into the rules of its fields."""
    for name, annotation in list(vars(kind).get("__annotations__", {}).items()):
        origin, values = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Annotated:
            plain, allowed = values
        elif origin is Literal:
            plain, allowed = str, Choices(values)
        else:
            continue
        kind.__annotations__[name] = plain
        field = vars(kind)[name]
        rule = dataclasses.replace(field.metadata["rule"], allowed=allowed)
        field.metadata = types.MappingProxyType({**field.metadata, "rule": rule})


def explain(field: dataclasses.Field) -> str:
    """Return the explanation of a setting and its allowed values."""
    text = field.metadata["explanation"]
    allowed = field.metadata["rule"].allowed
    if isinstance(allowed, Range):
        limits = str(allowed)
        text += f" {limits[0].upper()}{limits[1:]}."
    elif isinstance(allowed, Choices) and not all(f"'{word}'" in text for word in allowed):
        text += f" One of: {', '.join(allowed)}."
    return text


def _describe(field: dataclasses.Field) -> str:
    """Return a line of the docstring of a section: a setting, its type, default, explanation."""
    kind = getattr(field.type, "__name__", field.type)
    if field.default is dataclasses.MISSING:
        return f"    {field.name}: a section, see help of {kind}"
    return f"    {field.name} ({kind}, default {field.default!r}): {explain(field)}"


# Type checkers treat the positional argument of `setting` as the default.
@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def section(kind: type[T]) -> type[T]:
    """Turn a class into a dataclass of settings that rejects unknown names.

    Otherwise assigning to a mistyped name would silently keep a default.
    """
    _read_types(kind)
    made: Any = dataclasses.dataclass(kind)
    initialise = made.__init__
    lines = map(_describe, dataclasses.fields(made))
    made.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Settings:", *lines])

    @functools.wraps(initialise)
    def __init__(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            check_name(made, name)
        initialise(self, *values, **named)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        check_name(type(self), name)
        rule = made.__dataclass_fields__[name].metadata["rule"]
        if isinstance(value, str) and value == "auto":
            value = rule.auto or value
        elif callable(value) and isinstance(rule.allowed, OwnChoices):
            from dapo_jax.runtime.workers.pickled_functions import register_own

            value = register_own(value, name)
        object.__setattr__(self, name, value)

    made.__init__ = __init__
    made.__setattr__ = __setattr__
    return made


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted name, field, value) for every leaf of a nested dataclass, in order."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, value


def with_values(config: T, section: str, **values: Any) -> T:
    """Return a copy of a config with other values in one of its sections."""
    part = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: part})  # type: ignore[type-var]


@functools.cache
def rules(kind: type) -> dict[str, Rule]:
    """Return the rule of every setting of a config by dotted name."""
    by_name: dict[str, Rule] = {}
    for field in dataclasses.fields(kind):
        own = field.metadata["rule"]
        assert isinstance(field.type, type), field.name
        if not dataclasses.is_dataclass(field.type):
            by_name[field.name] = own
            continue
        for name, rule in rules(field.type).items():
            full_name = f"{field.name}.{name}"
            read = own.read if own.read and full_name not in own.read.names.split() else None
            by_name[full_name] = dataclasses.replace(
                rule, read=rule.read or read, may_change=rule.may_change or own.may_change
            )
    return by_name


def check_types(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first value of a wrong type."""
    for field in dataclasses.fields(config):
        name, value, kind = f"{prefix}{field.name}", getattr(config, field.name), field.type
        assert isinstance(kind, type), name
        if dataclasses.is_dataclass(kind):
            require(isinstance(value, kind), name, value, f"{kind.__name__}(...)")
            check_types(value, f"{name}.")
        else:
            fits = type(value) in ((int, float) if kind is float else (kind,))
            require(fits, name, value, TYPE_NAMES.get(kind, kind.__name__))


def check_values(config: Any) -> None:
    """Raise `ConfigError` for the first value that its rule does not allow."""
    for name, field, value in leaves(config):
        allowed = field.metadata["rule"].allowed
        if isinstance(value, float):
            require(math.isfinite(value), name, value, "a finite number")
        if allowed is not None:
            require(allowed(value), name, value, str(allowed))
        elif isinstance(value, str):
            check_place(name, value)
        if isinstance(value, float):
            zero = "0, or " * (allowed is None or allowed(0))
            fits = value == 0 or MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE
            allowed_text = f"{zero}from {MIN_MAGNITUDE:g} to {MAX_MAGNITUDE:g} in size"
            require(fits, name, value, allowed_text)


def check_read(config: Any) -> None:
    """Raise `ConfigError` for the first changed setting that nothing reads."""
    settings = {name: value for name, _, value in leaves(config)}
    for name, _, default in leaves(type(config)()):
        value, read = settings[name], rules(type(config))[name].read
        if read and value != default and not read(settings):
            reason = " and ".join(f"{other} = {settings[other]!r}" for other in read.names.split())
            allowed = "empty" if default == "" else repr(default)
            require(False, name, value, f"{allowed} with {reason}: nothing reads it")


def from_dict(kind: type[T], values: Any, prefix: str = "") -> T:
    """Return a section with the values of nested dictionaries and defaults for the rest."""
    if not isinstance(values, dict) and not prefix:
        raise ConfigError(f"{values!r}: must be a table of settings")
    require(isinstance(values, dict), prefix.rstrip("."), values, "a table of settings")
    made = kind()
    for name, value in values.items():
        check_name(kind, str(name), f"config.{prefix}".rstrip("."))
        before = getattr(made, name)
        if dataclasses.is_dataclass(before) and not isinstance(value, type(before)):
            value = from_dict(type(before), value, f"{prefix}{name}.")
        setattr(made, name, value)
    return made
