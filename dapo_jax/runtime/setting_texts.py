"""Texts of settings for people: docstrings and representations of sections, made when asked for."""

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from dapo_jax.runtime.rules import Choices, Range

COLUMNS = 88
INDENT = " " * 4
FILLED = textwrap.TextWrapper(COLUMNS - 2 * len(INDENT), break_on_hyphens=False)


def explain(field: dataclasses.Field) -> str:
    """Sentences of a setting: what it is, and the values that it may have."""
    text, allowed = field.metadata["explanation"], field.metadata["rule"].allowed
    if isinstance(allowed, Range):
        limits = str(allowed)
        text += f" {limits[0].upper()}{limits[1:]}."
    elif isinstance(allowed, Choices) and not all(f"'{word}'" in text for word in allowed):
        text += f" One of: {', '.join(allowed)}."
    return text


class SectionDoc:
    """Docstring of a section: its own text, and every setting with type, default and sentences.

    A descriptor, so that a section that nobody asks about costs nothing.
    """

    def __init__(self, text: str):
        self._text = text

    def __get__(self, instance: Any, owner: type) -> str:
        lines = [self._text, "", "Settings:"]
        for field in dataclasses.fields(owner):
            assert isinstance(field.type, type), field.name
            if dataclasses.is_dataclass(field.type):
                default, text = _made(field), (field.type.__doc__ or "").split("\n\n")[0]
            else:
                default, text = field.default, explain(field)
            lines.append(f"{INDENT}{field.name}: {field.type.__name__} = {default!r}")
            lines += [f"{2 * INDENT}{line}" for line in FILLED.wrap(text)]
        return "\n".join(lines)


def _made(field: dataclasses.Field) -> Any:
    assert field.default_factory is not dataclasses.MISSING
    return field.default_factory()


def signature(kind: type, initialise: Callable[..., None]) -> inspect.Signature:
    """Signature of a section's constructor, with plain types."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    found = inspect.signature(initialise)
    plain = [
        p.replace(annotation=types.get(p.name, p.annotation)) for p in found.parameters.values()
    ]
    return found.replace(parameters=plain)


@functools.cache
def _defaults(kind: type) -> Any:
    return kind()


def represent(section: Any) -> str:
    """Code that makes a section again: the settings that are not the defaults.

    A line each where one line would be too long.
    """
    kind = type(section)
    values = {f.name: getattr(section, f.name) for f in dataclasses.fields(kind)}
    defaults = _defaults(kind)
    changed = [f"{n}={v!r}" for n, v in values.items() if v != getattr(defaults, n)]
    line = f"{kind.__name__}({', '.join(changed)})"
    if len(line) <= COLUMNS and "\n" not in line:
        return line
    lines = "".join(textwrap.indent(f"{text},\n", INDENT) for text in changed)
    return f"{kind.__name__}(\n{lines})"
