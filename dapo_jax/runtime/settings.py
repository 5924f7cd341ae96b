"""One setting: a default and the sentence that explains it, kept together."""

import contextlib
import dataclasses
import difflib
import json
import pathlib
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

T = typing.TypeVar("T")

# Where a setting got its value: (line of the config file, what stands there). Kept on the section,
# outside its fields, so that comparing, copying and writing sections know nothing of it.
ORIGINS = "_origins"
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_file = ""  # the config file that is being read; sections remember its lines


def setting(default: T, explanation: str) -> T:
    """A dataclass field whose explanation `--help` and error messages can show."""
    return dataclasses.field(default=default, metadata={"explanation": explanation})


class ConfigError(ValueError):
    """A setting, or a combination of settings, that makes no sense.

    Attributes:
        field: the setting's dotted name, where the error is about one.
    """

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raises `ConfigError` naming the field, its value and what is allowed."""
    if not condition:
        raise ConfigError(f"config.{field} = {value!r}: must be {allowed}", field)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """`; did you mean ...?`, or nothing where no known name is near."""
    known = list(known)
    initials = [one for one in known if "".join(word[0] for word in one.split("_")) == name]
    near = initials or difflib.get_close_matches(name, known, n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def check_name(kind: type, name: str, section: str = "") -> None:
    """Raises `ConfigError` where `kind` has no setting of that name.

    Args:
        section: what it is called, where that is known.
    """
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]
    if name not in known:
        hint = nearest(name, known) or f"; {kind.__name__} has {', '.join(known)}"
        owner = section or kind.__name__
        raise ConfigError(f"{owner}.{name}: there is no such setting{hint}")


@contextlib.contextmanager
def remembering_lines(file: str) -> Iterator[None]:
    """Sections that are made or changed by `file` meanwhile remember by which of its lines."""
    global _file
    before, _file = _file, file
    try:
        yield
    finally:
        _file = before


def _line(name: str) -> tuple[int, str] | None:
    """The line of the config file that is setting `name` right now."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _file:
        frame = frame.f_back
    if frame is None:
        return None
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last = positions[0] or frame.f_lineno, positions[1] or frame.f_lineno
    lines = pathlib.Path(_file).read_text(encoding="utf-8", errors="replace").splitlines()
    said = (n for n in range(first, last + 1) if re.search(rf"\b{name}\s*=", lines[n - 1]))
    number = next(said, first)
    return number, lines[number - 1].strip()


def _remember(section: Any, name: str) -> None:
    if _file and name != ORIGINS and (line := _line(name)):
        vars(section).setdefault(ORIGINS, {})[name] = line
    else:  # set by something else since
        vars(section).get(ORIGINS, {}).pop(name, None)


# To a type checker what `setting` gives is the default itself, since it is said by place.
@typing.dataclass_transform(field_specifiers=(dataclasses.field,))
def section(kind: type[T]) -> type[T]:
    """A dataclass of settings, which refuses names that it does not have: a mistyped one would
    otherwise leave a default in place, in silence."""
    made = dataclasses.dataclass(kind)
    initialise = made.__init__

    def __init__(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            check_name(made, name)
        initialise(self, *values, **named)
        vars(self).pop(ORIGINS, None)  # of defaults nobody said anything
        for name in named:
            _remember(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        check_name(type(self), name)
        object.__setattr__(self, name, value)
        _remember(self, name)

    made.__init__ = __init__
    made.__setattr__ = __setattr__  # type: ignore[assignment]
    return made


def origin(config: Any, name: str) -> tuple[int, str] | None:
    """The line of the config file, and its number, that set the setting of that dotted name."""
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


def from_dict(kind: type[T], values: Any, prefix: str = "") -> T:
    """The section that nested dictionaries say; what they leave out keeps its default.

    Raises `ConfigError` for names that `kind` does not have and tables that are none.
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


def read_json(path: pathlib.Path, field: str) -> dict[str, Any]:
    """The object in a JSON file. Raises `ConfigError` naming the setting that led to it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        named = f"config.{field}: {path}" if field else str(path)
        raise ConfigError(f"{named} can't be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{f'config.{field}: ' * bool(field)}{path}: must hold an object")
    return found
