"""Typed settings: dataclass fields with a default, an explanation and the allowed values.

Errors name the setting, its value and the allowed values.
"""

import dataclasses
import functools
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from dapo_jax.runtime import registry
from dapo_jax.types.errors import ConfigError, check_place, nearest, present_name, require
from dapo_jax.types.rules import TYPE_NAMES, Allowed, Choices, OwnChoices, Range

T = typing.TypeVar("T")

# Magnitudes that float32 arithmetic does not turn into 0 or infinity.
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-30, 1e30


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule of a setting."""

    allowed: Allowed | None = None  # None: all values of its type
    # Whether a resumed run may change the value, or a function of all settings by dotted name.
    may_change: bool | Callable[[Mapping[str, Any]], bool] = False
    auto: int | None = None  # the number that 'auto' means


def setting(default: T, explanation: str, **rule: Any) -> T:
    """Return a dataclass field with an explanation for `--help` and a `Rule`.

    The type of the field defines the allowed values.
    """
    metadata = {"explanation": explanation, "rule": Rule(**rule)}
    return dataclasses.field(default=default, metadata=metadata)


def part(kind: Callable[[], T]) -> T:
    """Return a dataclass field for a section."""
    return dataclasses.field(default_factory=kind)


def check_name(kind: Any, name: str, section: str = "", error: type[Exception] = ConfigError):
    """Raise an error if the section `kind` has no setting `name`."""
    known = kind.__dataclass_fields__
    if name not in known:
        old = f"{kind.__name__.lower()}.{name}".removeprefix("config.")
        hint = f"; it is now config.{present_name(old)}" if present_name(old) != old else ""
        hint = hint or nearest(name, known) or f"; {kind.__name__} has {', '.join(known)}"
        raise error(f"{section or kind.__name__}.{name}: there is no such setting{hint}")


def _read_types(kind: type) -> None:
    """Add to the rule of each setting the allowed values of its type, and its section's rule."""
    for name, annotation in [*vars(kind).get("__annotations__", {}).items()]:
        field = vars(kind).get(name)
        if not isinstance(field, dataclasses.Field) or "rule" not in field.metadata:
            continue  # a section, or no field
        plain, allowed = annotation, None
        if typing.get_origin(annotation) is Annotated:
            plain, allowed = typing.get_args(annotation)
        elif typing.get_origin(annotation) is Literal:
            plain, allowed = str, Choices(typing.get_args(annotation))
        kind.__annotations__[name] = plain
        rule = field.metadata["rule"]
        may_change = rule.may_change or getattr(kind, "may_change", False)
        rule = dataclasses.replace(rule, allowed=allowed, may_change=may_change)
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

    Otherwise assigning to a mistyped name would silently keep a default. With `may_change`, a
    resumed run may change all settings of the section.
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

    def __getattr__(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        check_name(made, name, error=AttributeError)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        check_name(made, name)
        field = made.__dataclass_fields__[name]
        rule = field.metadata.get("rule", Rule())
        if type(value) is dict and field.default_factory is not dataclasses.MISSING:
            value = from_dict(type(field.default_factory()), value, f"{name}.")
        elif isinstance(value, str) and value == "auto":
            value = rule.auto or value
        elif callable(value) and isinstance(rule.allowed, OwnChoices):
            from dapo_jax.runtime.workers.pickled_functions import register_own

            value = register_own(value, name)
        object.__setattr__(self, name, value)

    made.__init__, made.__getattr__, made.__setattr__ = __init__, __getattr__, __setattr__
    return made


@functools.cache
def _extras_kind() -> type:
    kinds = {name: registry.find("settings", name) for name in registry.names("settings")}
    fields = {name: part(kind) for name, kind in kinds.items()}
    text = "Settings of extras, by the name of the extra."
    return section(type("Extras", (), {"__doc__": text, "__annotations__": kinds, **fields}))


def open_extras(changes: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """Return the sections of all plug-ins of the kind `settings`, with changes by dotted name."""
    extras = _extras_kind()()
    for name, value in changes.items():
        assign(extras, name, value)
    return extras


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted name, field, value) for every leaf of a nested dataclass, in order."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, value


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


def with_values(config: T, section: str, **values: Any) -> T:
    """Return a copy of a config with other values in one of its sections."""
    part = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: part})  # type: ignore[type-var]


@functools.cache
def rules(kind: type) -> dict[str, Rule]:
    """Return the rule of every setting of a config by dotted name."""
    return {name: field.metadata["rule"] for name, field, _ in leaves(kind())}


def check_settings(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first value of a wrong type, or that its rule does not allow."""
    usual = type(config)()
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        kind = type(getattr(usual, field.name))
        if dataclasses.is_dataclass(kind):
            require(isinstance(value, kind), name, value, f"{kind.__name__}(...)")
            check_settings(value, f"{name}.")
        else:
            fits = type(value) in ((int, float) if kind is float else (kind,))
            require(fits, name, value, TYPE_NAMES.get(kind, kind.__name__))
            _check_value(name, value, field.metadata["rule"].allowed)


def _check_value(name: str, value: Any, allowed: Allowed | None) -> None:
    if isinstance(value, float):
        require(math.isfinite(value), name, value, "a finite number")
    if allowed is not None:
        require(allowed(value), name, value, str(allowed))
    elif isinstance(value, str):
        check_place(name, value)
    if isinstance(value, float):
        zero = "0, or " * (allowed is None or allowed(0))
        fits = value == 0 or MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE
        limits = f"{zero}from {MIN_MAGNITUDE:g} to {MAX_MAGNITUDE:g} in size"
        require(fits, name, value, limits)


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
