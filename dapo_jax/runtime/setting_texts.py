"""Docstrings, signatures and representations of settings, computed on demand."""

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
    """Return the explanation of a setting and its allowed values."""
    text = field.metadata["explanation"]
    allowed = field.metadata["rule"].allowed
    if isinstance(allowed, Range):
        limits = str(allowed)
        text += f" {limits[0].upper()}{limits[1:]}."
    elif isinstance(allowed, Choices) and not all(f"'{word}'" in text for word in allowed):
        text += f" One of: {', '.join(allowed)}."
    return text


class SectionDoc:
    """A descriptor for the docstring of a section, with all settings; computed on access."""

    def __init__(self, text: str):
        self._text = text

    def __get__(self, instance: Any, owner: type) -> str:
        lines = [self._text, "", "Settings:"]
        for field in dataclasses.fields(owner):
            assert isinstance(field.type, type), field.name
            if dataclasses.is_dataclass(field.type):
                default, text = _make_default(field), (field.type.__doc__ or "").split("\n\n")[0]
            else:
                default, text = field.default, explain(field)
            lines.append(f"{INDENT}{field.name}: {field.type.__name__} = {default!r}")
            lines += [f"{2 * INDENT}{line}" for line in FILLED.wrap(text)]
        return "\n".join(lines)


def _make_default(field: dataclasses.Field) -> Any:
    assert field.default_factory is not dataclasses.MISSING
    return field.default_factory()


def signature(kind: type, initialise: Callable[..., None]) -> inspect.Signature:
    """Return the signature of a section's constructor with plain types."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    original = inspect.signature(initialise)
    plain = [
        p.replace(annotation=types.get(p.name, p.annotation)) for p in original.parameters.values()
    ]
    return original.replace(parameters=plain)


@functools.cache
def _defaults(kind: type) -> Any:
    return kind()


def represent(section: Any) -> str:
    """Return code that creates an equal section: the settings that differ from the defaults."""
    kind = type(section)
    values = {f.name: getattr(section, f.name) for f in dataclasses.fields(kind)}
    defaults = _defaults(kind)
    changed = [f"{n}={v!r}" for n, v in values.items() if v != getattr(defaults, n)]
    line = f"{kind.__name__}({', '.join(changed)})"
    if len(line) <= COLUMNS and "\n" not in line:
        return line
    lines = "".join(textwrap.indent(f"{text},\n", INDENT) for text in changed)
    return f"{kind.__name__}(\n{lines})"
