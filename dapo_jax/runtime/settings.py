"""Typed settings: dataclass fields with a default, an explanation and a rule.

Errors name the setting, its value and the allowed values.
"""

import codecs
import collections
import contextlib
import dataclasses
import difflib
import functools
import inspect
import json
import math
import os
import pathlib
import re
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

from dapo_jax.runtime.rules import Choices, OwnChoices, Range, Rule, When

T = typing.TypeVar("T")

TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# Magnitudes that float32 arithmetic does not turn into 0 or infinity.
MIN_MAGNITUDE = 1e-30
MAX_MAGNITUDE = 1e30
MAX_TEXT_BYTES = 64 << 20  # of a file that is read as a whole
HUB_ADDRESS = re.compile(
    r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(datasets/)?([\w.-]+/[\w.-]+)", re.I
)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # start of a pointer file


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


class ConfigError(ValueError):
    """An invalid setting (`field` is its dotted name) or combination of settings."""

    exit_code = 2  # of a command that it ends

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


LATIN = "if it is Latin-1: iconv -f LATIN1 -t UTF-8"  # about text that is not UTF-8


def check_utf8(head: bytes) -> None:
    """Raise ValueError if the first bytes of a text are a UTF-16 byte order mark."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is UTF-16: must be UTF-8 (iconv -f UTF-16 -t UTF-8)")


def check_unique(names: Iterable[Any], what: str) -> None:
    """Raise ValueError if a name occurs twice: one of the values would be lost."""
    name, count = max(collections.Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ValueError(f"the {what} {name!r} occurs twice")


def check_regular(path: Any) -> None:
    """Raise OSError if a local path is not a regular file, or is a Git LFS pointer.

    Reading a pipe or a device may never end.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is a pipe, a device or a folder: must be a file")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise OSError("it is a Git LFS pointer, not the file: run git lfs pull in its checkout")


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise `ConfigError` with the field, its value and what is allowed, unless `condition`."""
    if not condition:
        raise ConfigError(f"config.{field} = {value!r}: must be {allowed}", field)


def check_place(field: str, value: str) -> None:
    """Raise `ConfigError` for an address of anything but a bucket: it would not be downloaded."""
    if not re.match(r"(?!gs://)[a-z][\w+.-]*://[^\s{]*$", value, re.IGNORECASE):
        return
    allowed = "a local path or a gs:// path: nothing else is downloaded"
    if found := HUB_ADDRESS.match(value):
        is_data, name = found.groups()
        folder = f"{'data' if is_data else 'models'}/{name.rpartition('/')[2]}"
        kind = "--repo-type dataset " * bool(is_data)
        allowed += f" unasked. First: hf download {name} {kind}--local-dir {folder}"
    require(False, field, value, allowed)


@contextlib.contextmanager
def naming(field: str, value: Any) -> Iterator[None]:
    """Add the setting that names a file to errors about the file inside the context."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith("config."):
            raise
        raise ConfigError(f"config.{field} = {value!r}: {error}", field) from None


RENAMED = {"lag": "staleness"}  # last parts of the names of earlier versions


def nearest(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Return the suggestion `; did you mean ...?`, or "" if no known name is similar."""
    known = list(known)
    last = {full: full.rpartition(".")[2] for full in (name, *known)}
    initials = [n for n in known if "".join(w[:1] for w in last[n].split("_")) == last[name]]
    renamed = [full for full in known if last[full] == RENAMED.get(last[name])]
    similar = renamed or initials or difflib.get_close_matches(name, known, n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


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


def read_file(path: pathlib.Path, field: str = "") -> str:
    """Read a small text file; raises `ConfigError` with `field`, the setting with the path."""
    named = f"config.{field}: {path}" if field else str(path)
    try:
        check_regular(path)
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {MAX_TEXT_BYTES:,}")
        content = path.read_bytes()
        check_utf8(content)
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} can't be read: {error} ({LATIN})", field) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named} can't be read: {error}", field) from None


def read_json(path: pathlib.Path, field: str, unique_keys: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file; raises `ConfigError` with `field`, the path's setting.

    Args:
        unique_keys: reject an object that has a key twice.
    """
    named = f"config.{field}: {path}" if field else str(path)
    text = read_file(path, field)

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if unique_keys and len(made) < len(pairs):
            ((key, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
            lines = [str(n) for n, line in enumerate(text.splitlines(), 1) if f'"{key}"' in line]
            raise ValueError(f"an object has the key {key!r} twice (see lines {', '.join(lines)})")
        return made

    try:
        content = json.loads(text, object_pairs_hook=make)
    except RecursionError:
        raise ConfigError(f"{named} can't be read: it is nested too deeply", field) from None
    except ValueError as error:
        raise ConfigError(f"{named} can't be read: {error}", field) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{named}: must hold an object", field)
    return content
