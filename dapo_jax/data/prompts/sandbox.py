"""Jinja templates of models and users, rendered in jinja's sandbox.

A template can change no value and reach no attribute of Python, and its text is bounded. Names and
white space are as in Hugging Face's `apply_chat_template`.
"""

import datetime
import functools
import json
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dapo_jax.types.errors import ConfigError

# A constant date keeps the prompts of a resumed run equal; this is Llama 3's default.
TODAY = datetime.date(2024, 7, 26)
MAX_CHARACTERS = 1 << 20  # of a template, and of a text that it writes


class _Generation(Extension):
    """Block `{% generation %}` around a model's text; the text is written unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Undefined(jinja2.Undefined):
    """Name without a value; it writes nothing, but that of a special token is an error."""

    def __str__(self) -> str:
        name = str(self._undefined_name)
        if self._undefined_obj is jinja2.utils.missing and name.endswith("_token"):
            raise jinja2.UndefinedError(f"the model folder names no {name}")
        return ""


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _environment(strict: bool) -> jinja2.Environment:
    """Return Hugging Face's environment; if `strict`, names without a value are errors."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined if strict else _Undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


@functools.lru_cache(16)
def _compiled(text: str, strict: bool) -> jinja2.Template:
    if len(text) > MAX_CHARACTERS:
        raise jinja2.TemplateError(f"it has {len(text)} characters: at most {MAX_CHARACTERS}")
    return _environment(strict).from_string(text)


def _config_error(subject: str, error: Exception) -> ConfigError:
    """Return the error of a template in one line."""
    message = str(getattr(error, "message", None) or error) or type(error).__name__
    number = getattr(error, "lineno", None)  # None if jinja knows no line
    line = "" if number is None else f", line {number}"
    return ConfigError(f"{subject} fails{line}: {' '.join(message.split())}")


def render(subject: str, template: str, strict: bool, values: dict[str, Any]) -> str:
    """Return the text of a template; raise `ConfigError` about `subject` if the template fails.

    A name without a value is an error if `strict`, else it writes nothing.
    """
    pieces: list[str] = []
    size = 0
    try:
        for piece in _compiled(template, strict).generate(**values):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise jinja2.TemplateError(f"it writes more than {MAX_CHARACTERS} characters")
            piece.encode()  # JSON may hold halves of surrogate pairs, which no tokenizer takes
            pieces.append(piece)
    except Exception as error:  # a template is a program
        raise _config_error(subject, error) from None
    return "".join(pieces)


def read_names(subject: str, template: str) -> set[str]:
    """Return the names that a template reads; raise `ConfigError` if it is no template."""
    environment = _environment(True)
    try:
        reads = meta.find_undeclared_variables(environment.parse(template))
    except Exception as error:
        raise _config_error(subject, error) from None
    return reads - environment.globals.keys()
