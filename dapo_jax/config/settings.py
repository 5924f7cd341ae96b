"""Typed settings: dataclass fields with a default, an explanation and the allowed values.

Errors name the setting, its value and the allowed values.
"""

import dataclasses
import functools
import inspect
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dapo_jax.config.foreign_names import ADVICE
from dapo_jax.runtime import registry
from dapo_jax.types.errors import ConfigError, check_place, nearest, present_name, require
from dapo_jax.types.rules import TYPE_NAMES, Allowed, Choices, OwnChoices, Range

T = typing.TypeVar("T")

# Magnitudes that float32 arithmetic does not turn into 0 or infinity.
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-30, 1e30
AUTO = -1  # where a range allows it in addition, 'auto' means it
BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def setting(
    default: T, explanation: str, may_change: bool | Callable[[Mapping[str, Any]], bool] = False
) -> T:
    """Return a dataclass field with an explanation for `--help`; its type has the allowed values.

    Args:
        may_change: whether a resumed run may change the value, or a function of all settings by
            dotted name.
    """
    metadata = {"explanation": explanation, "may_change": may_change}
    return dataclasses.field(default=default, metadata=metadata)


def part(kind: Callable[[], T]) -> T:
    """Return a dataclass field for a section."""
    return dataclasses.field(default_factory=kind)


@functools.cache
def allowed_values(field: dataclasses.Field) -> Allowed | None:
    """Return the allowed values of a setting, or None: all values of its type."""
    if typing.get_origin(field.type) is typing.Literal:
        return Choices(typing.get_args(field.type))
    return getattr(field.type, "__metadata__", [None])[0]


def takes_auto(field: dataclasses.Field) -> bool:
    """Return True if 'auto' is a value of a setting."""
    return getattr(allowed_values(field), "also", None) == AUTO


def explain(field: dataclasses.Field) -> str:
    """Return the explanation of a setting and its allowed values."""
    text, values = field.metadata["explanation"], allowed_values(field)
    if isinstance(values, Range):
        limits = str(values)
        text += f" {limits[0].upper()}{limits[1:]}."
    elif isinstance(values, Choices) and not all(f"'{word}'" in text for word in values):
        text += f" One of: {', '.join(values)}."
    return text


def _describe(field: dataclasses.Field) -> str:
    """Return a line of the docstring of a section: a setting, its type, default, explanation."""
    if field.default is dataclasses.MISSING:
        return f"    {field.name}: a section, see help of {getattr(field.type, '__name__', '')}"
    kind = type(field.default).__name__
    return f"    {field.name} ({kind}, default {field.default!r}): {explain(field)}"


@functools.cache
def _own_fields(kind: Any) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(kind)}


def _find(kind: type, name: str, path: str = "", error: type[Exception] = ConfigError) -> Any:
    """Return the field of a section, or raise an error about `path` if there is none."""
    known = _own_fields(kind)
    if name in known:
        return known[name]
    old = f"{kind.__name__.lower()}.{name}".removeprefix("config.")
    told = ADVICE.get(f"{path}.{name}".removeprefix("config."), "")  # of a setting that went
    hint = f"; it is now config.{present_name(old)}" if present_name(old) != old else ""
    hint = hint or f"; {told}" * bool(told)
    hint = hint or nearest(name, known) or f"; {kind.__name__} has {', '.join(known)}"
    raise error(f"{path or kind.__name__}.{name}: there is no such setting{hint}")


# Type checkers treat the positional argument of `setting` as the default.
@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
class Section:
    """Base class of settings: its subclasses are dataclasses that reject unknown names.

    Otherwise assigning to a mistyped name would silently keep a default.
    """

    may_change: typing.ClassVar = False  # whether a resumed run may change all of its settings
    combinations: typing.ClassVar = ""  # a table, see `checks.py`

    def __init_subclass__(cls) -> None:
        made: Any = dataclasses.dataclass(cls)
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(made):
            field.type = hints[field.name]
            if field.metadata and cls.may_change:
                field.metadata = types.MappingProxyType({**field.metadata, "may_change": True})
        lines = map(_describe, dataclasses.fields(made))
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Settings:", *lines])

    def __new__(cls, *_: Any, **named: Any) -> typing.Self:
        for name in named:
            _find(cls, name)
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _find(type(self), name, error=AttributeError)

    def __setattr__(self, name: str, value: Any) -> None:
        field = _find(type(self), name)
        if field.default is dataclasses.MISSING:
            value = _read_section(field, value, name)
        elif isinstance(value, str) and value == "auto" and takes_auto(field):
            value = AUTO
        elif callable(value) and isinstance(allowed_values(field), OwnChoices):
            from dapo_jax.runtime.workers.pickled_functions import register_own

            value = register_own(value, name)
        super().__setattr__(name, value)


def _read_section(field: dataclasses.Field, value: Any, name: str) -> Any:
    """Return the section that a value is: itself, a dictionary of settings, or a preset's name."""
    kind: Any = field.type
    if isinstance(value, dict):
        return from_dict(field.default_factory, value, f"{name}.")  # type: ignore[arg-type]
    if isinstance(value, str) and hasattr(kind, "preset"):
        return kind.preset(value)
    require(isinstance(value, kind), name, value, f"a table of settings, or {kind.__name__}(...)")
    return value


def from_dict(kind: Callable[[], T], values: Any, prefix: str = "") -> T:
    """Return a config with the values of nested dictionaries, and defaults for the rest."""
    if not isinstance(values, dict):
        raise ConfigError(f"{values!r}: must be a table of settings")
    made = kind()
    for name, value in values.items():
        field = _find(type(made), str(name), f"config.{prefix}".rstrip("."))
        if field.default is dataclasses.MISSING:
            value = _read_section(field, value, f"{prefix}{name}")
        setattr(made, name, value)
    return made


@functools.cache
def _extras_kind() -> type:
    kinds = {name: registry.find("settings", name) for name in registry.names("settings")}
    fields = {name: part(kind) for name, kind in kinds.items()}
    text = "Settings of extras, by the name of the extra."
    return type("Extras", (Section,), {"__doc__": text, "__annotations__": kinds, **fields})


def open_extras(changes: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Return the sections of all plug-ins of the kind `settings`, with changes by dotted name."""
    extras = _extras_kind()()
    for name, value in changes.items():
        assign(extras, name, value)
    return extras


def sections(config: Any, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yield (dotted name, section) for every section in a config, in order."""
    for name, value in vars(config).items():
        if isinstance(value, Section):
            yield f"{prefix}{name}", value
            yield from sections(value, f"{prefix}{name}.")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted name, field, value) for every leaf of a nested dataclass, in order."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, value


@functools.cache
def fields(kind: type) -> dict[str, dataclasses.Field]:
    """Return the field of every setting of a config by dotted name."""
    return {name: field for name, field, _ in leaves(kind())}


@functools.cache
def defaults(kind: type) -> dict[str, Any]:
    """Return the default of every setting by dotted name."""
    return {name: value for name, _, value in leaves(kind())}


def changed(config: Any) -> dict[str, Any]:
    """Return the values that are not defaults, by dotted name."""
    usual = defaults(type(config))
    return {name: value for name, _, value in leaves(config) if value != usual[name]}


def assign(config: Any, name: str, value: Any) -> None:
    """Set a setting by its dotted name."""
    owner, _, last = name.rpartition(".")
    setattr(operator.attrgetter(owner)(config) if owner else config, last, value)


def assign_text(config: Any, name: str, text: str) -> None:
    """Set a setting to what a text says. Raises `ConfigError` if it is of another type."""
    field, kind = fields(type(config))[name], type(defaults(type(config))[name])
    try:
        is_auto = text == "auto" and takes_auto(field)
        value = AUTO if is_auto else BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        require(False, name, text, TYPE_NAMES[kind])
    else:
        assign(config, name, value)


def with_values(config: T, section: str, **values: Any) -> T:
    """Return a copy of a config with other values in one of its sections."""
    part = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: part})  # type: ignore[type-var]


def check_settings(config: Any) -> None:
    """Raise `ConfigError` for the first value of a wrong type, or that is not allowed."""
    for name, field, value in leaves(config):
        kind, values = type(field.default), allowed_values(field)
        fits = type(value) in ((int, float) if kind is float else (kind,))
        require(fits, name, value, TYPE_NAMES[kind])
        if isinstance(value, float):
            fits = value == 0 or MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE
            limits = f"0, or from {MIN_MAGNITUDE:g} to {MAX_MAGNITUDE:g} in size"
            require(fits, name, value, f"a finite number in float32: {limits}")
        if values is not None:
            require(values(value), name, value, str(values))
        elif isinstance(value, str):
            check_place(name, value)
