"""Typed settings: default, explanation and rule of each in one place.

Errors name the setting, its value and what is allowed.
"""

import codecs
import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import pathlib
import re
import stat
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

from dapo_jax.runtime.rules import Choices, Rule, When
from dapo_jax.runtime.setting_texts import SectionDoc, represent, signature

T = typing.TypeVar("T")

# Attribute of a section with the line of the config file that set a setting: (number, text). It is
# no field, so that comparing, copying and writing sections know nothing of it.
ORIGINS = "_origins"
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# Magnitudes of float32: beyond, a number is 0 or infinite once it is computed with.
SMALLEST, LARGEST = 1e-30, 1e30
LARGEST_TEXT = 64 << 20  # bytes of a file that is read whole
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of such a file
KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}
_file = ""  # the config file that is being read; sections remember its lines


def setting(
    default: T,
    explanation: str,
    *,
    read: When | None = None,
    may_change: bool | When = False,
    auto: int | None = None,
) -> T:
    """A dataclass field with the explanation that `--help` shows and the rest of its `Rule`.

    The allowed values are said by the field's type.
    """
    rule = Rule(read=read, may_change=may_change, auto=auto)
    return dataclasses.field(default=default, metadata={"explanation": explanation, "rule": rule})


def part(kind: Callable[[], T], *, read: When | None = None, may_change: bool = False) -> T:
    """A dataclass field that holds a section, and a rule for settings without one of their own."""
    rule = Rule(read=read, may_change=may_change)
    return dataclasses.field(default_factory=kind, metadata={"rule": rule})


class ConfigError(ValueError):
    """A setting, or a combination of settings, that is refused.

    Attributes:
        field: the setting's dotted name, where the error is about one.
    """

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


def check_utf8(head: bytes) -> None:
    """Raises ValueError where the first bytes of a text say that it is UTF-16."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is UTF-16: must be UTF-8 (iconv -f UTF-16 -t UTF-8)")


def check_regular(path: Any) -> None:
    """Raises OSError where a path is no regular file, or a pointer of Git LFS in place of one.

    A pipe may never begin, a device never end.

    Args:
        path: of this machine.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = next((word for test, word in KINDS.items() if test(mode)), "something else")
        raise OSError(f"it is {kind}: must be a file")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise OSError("it is a pointer of Git LFS, not the file: git lfs pull, in its checkout")


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raises `ConfigError` naming the field, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"config.{field} = {value!r}: must be {allowed}", field)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _initials(name: str) -> str:
    return "".join(word[:1] for word in _last(name).split("_"))


@contextlib.contextmanager
def naming(field: str, value: Any) -> Iterator[None]:
    """Context in which errors about a file name the setting that names the file."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith("config."):
            raise
        raise ConfigError(f"config.{field} = {value!r}: {error}", field) from None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """The suggestion `; did you mean ...?`; empty where no known name is near."""
    known = list(known)
    initials = [full for full in known if _initials(full) == _last(name)]
    near = initials or difflib.get_close_matches(name, known, n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def check_name(kind: type, name: str, section: str = "") -> None:
    """Raises `ConfigError` where the section `kind` has no setting of that name.

    Args:
        section: the section's dotted name, where that is known.
    """
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    if name not in known:
        hint = nearest(name, known) or f"; {kind.__name__} has {', '.join(known)}"
        owner = section or kind.__name__
        raise ConfigError(f"{owner}.{name}: there is no such setting{hint}")


@contextlib.contextmanager
def remembering_lines(file: str) -> Iterator[None]:
    """Context in which sections remember the lines of `file` that set their settings."""
    global _file
    before, _file = _file, file
    try:
        yield
    finally:
        _file = before


def _line(name: str) -> tuple[int, str] | None:
    """Line of the config file that is setting `name` right now: its number and text."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _file:
        frame = frame.f_back
    if frame is None:
        return None
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last = positions[0] or frame.f_lineno, positions[1] or frame.f_lineno
    lines = pathlib.Path(_file).read_text(encoding="utf-8", errors="replace").splitlines()
    named = (n for n in range(first, last + 1) if re.search(rf"\b{name}\s*=", lines[n - 1]))
    number = next(named, first)
    return number, lines[number - 1].strip()


def _remember(section: Any, name: str) -> None:
    if _file and name != ORIGINS and (line := _line(name)):
        vars(section).setdefault(ORIGINS, {})[name] = line
    else:  # set by something else since
        vars(section).get(ORIGINS, {}).pop(name, None)


def _read_type(field: dataclasses.Field) -> None:
    """Moves the allowed values from the field's annotation into its rule."""
    origin, values = typing.get_origin(field.type), typing.get_args(field.type)
    if origin is Annotated:
        field.type, allowed = values
    elif origin is Literal:
        field.type, allowed = str, Choices(values)
    else:
        return
    rule = dataclasses.replace(field.metadata["rule"], allowed=allowed)
    field.metadata = types.MappingProxyType({**field.metadata, "rule": rule})


# A type checker takes what `setting` returns for the default, because it is passed by position.
@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def section(kind: type[T]) -> type[T]:
    """A dataclass of settings that refuses unknown names, in its constructor and as attributes.

    A mistyped name would otherwise leave a default in place, in silence.
    """
    made: Any = dataclasses.dataclass(repr=False)(kind)
    for field in dataclasses.fields(made):
        _read_type(field)
    initialise = made.__init__

    @functools.wraps(initialise)
    def __init__(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            check_name(made, name)
        initialise(self, *values, **named)
        vars(self).pop(ORIGINS, None)  # no line set the defaults
        for name in named:
            _remember(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        check_name(type(self), name)
        object.__setattr__(self, name, value)
        _remember(self, name)

    constructor: Any = __init__
    constructor.__signature__ = signature(made, initialise)
    made.__init__, made.__setattr__, made.__repr__ = constructor, __setattr__, represent
    made.__doc__ = SectionDoc(made.__doc__)
    return made


def origin(config: Any, name: str) -> tuple[int, str] | None:
    """Number and text of the config file's line that set the setting of that dotted name."""
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part, None)
    return vars(config).get(ORIGINS, {}).get(last) if dataclasses.is_dataclass(config) else None


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yields (dotted name, field, value) of every leaf of a nested dataclass, in order."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, value


@functools.cache
def rules(kind: type) -> dict[str, Rule]:
    """Rule of every setting of a config, by dotted name."""
    found: dict[str, Rule] = {}
    for field in dataclasses.fields(kind):
        own = field.metadata["rule"]
        assert isinstance(field.type, type), field.name
        if not dataclasses.is_dataclass(field.type):
            found[field.name] = own
            continue
        for name, rule in rules(field.type).items():
            full_name = f"{field.name}.{name}"
            read = own.read if own.read and full_name not in own.read.names.split() else None
            found[full_name] = dataclasses.replace(
                rule, read=rule.read or read, may_change=rule.may_change or own.may_change
            )
    return found


def check_types(config: Any, prefix: str = "") -> None:
    """Raises `ConfigError` for the first value that is not of its setting's type."""
    for field in dataclasses.fields(config):
        name, value, kind = f"{prefix}{field.name}", getattr(config, field.name), field.type
        assert isinstance(kind, type), name
        if dataclasses.is_dataclass(kind):
            require(isinstance(value, kind), name, value, f"{kind.__name__}(...)")
            check_types(value, f"{name}.")
        else:
            fits = type(value) in ((int, float) if kind is float else (kind,))
            require(fits, name, value, WORDS.get(kind, kind.__name__))


def check_values(config: Any) -> None:
    """Raises `ConfigError` for the first value that its setting's rule does not allow."""
    for name, field, value in leaves(config):
        allowed = field.metadata["rule"].allowed
        if isinstance(value, float):
            require(math.isfinite(value), name, value, "a finite number")
        if allowed is not None:
            require(allowed(value), name, value, str(allowed))
        if isinstance(value, float):
            zero = "0, or " * (allowed is None or allowed(0))
            fits = value == 0 or SMALLEST <= abs(value) <= LARGEST
            require(fits, name, value, f"{zero}from {SMALLEST:g} to {LARGEST:g} in size")


def check_read(config: Any) -> None:
    """Raises `ConfigError` for the first setting that was changed and that nothing reads."""
    settings = {name: value for name, _, value in leaves(config)}
    for name, _, default in leaves(type(config)()):
        value, read = settings[name], rules(type(config))[name].read
        if read and value != default and not read(settings):
            reason = " and ".join(f"{other} = {settings[other]!r}" for other in read.names.split())
            allowed = "empty" if default == "" else repr(default)
            require(False, name, value, f"{allowed} with {reason}: nothing reads it")


def from_dict(kind: type[T], values: Any, prefix: str = "") -> T:
    """A section of the values in nested dictionaries, and of defaults for the rest.

    Raises `ConfigError` for unknown names, and where a table of settings is no dictionary.
    """
    require(isinstance(values, dict), prefix.rstrip(".") or "(all)", values, "a table of settings")
    made = kind()
    for name, value in values.items():
        check_name(kind, name, f"config.{prefix}".rstrip("."))
        before = getattr(made, name)
        if dataclasses.is_dataclass(before):
            value = from_dict(type(before), value, f"{prefix}{name}.")
        setattr(made, name, value)
    return made


def read_file(path: pathlib.Path, field: str = "") -> str:
    """Text of a small file. Raises `ConfigError` naming `field`, the setting with its path."""
    named = f"config.{field}: {path}" if field else str(path)
    try:
        check_regular(path)
        size = path.stat().st_size
        if size > LARGEST_TEXT:
            raise ValueError(f"it has {size:,} bytes, more than {LARGEST_TEXT:,}")
        content = path.read_bytes()
        check_utf8(content)
        return content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{named} can't be read: {error}", field) from None


def read_json(path: pathlib.Path, field: str) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError` naming `field`, the setting with its path."""
    text, named = read_file(path, field), f"{f'config.{field}: ' * bool(field)}{path}"
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{named} can't be read: {error}", field) from None
    except RecursionError:
        raise ConfigError(f"{named} can't be read: it is nested too deeply", field) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{named}: must hold an object", field)
    return found
