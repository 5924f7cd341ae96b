"""Worker process that renders templates, programs that came with a model: jinja in its sandbox.

A template can change no value, and its time and memory are limited. Names and white space are as in
Hugging Face's `apply_chat_template`.
"""

import datetime
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dapo_jax.runtime.workers.child import limit_computing, limit_process, serve

# A constant date keeps the prompts of a resumed run equal; this is Llama 3's default.
TODAY = datetime.date(2024, 7, 26)
MAX_CHARACTERS = 1 << 20  # of a text
SECONDS = 2  # of CPU time for one text; the kernel kills the process one second later


class _Generation(Extension):
    """Block `{% generation %}` around a model's text; the text is written unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _environment(strict: bool) -> jinja2.Environment:
    """Return Hugging Face's environment; if `strict`, names without a value are errors."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
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
    return _environment(strict).from_string(text)


def answer(job: dict) -> dict:
    """Reply to `{"template", "strict", "values"}` with `{"text"}`; without values, `{"reads"}`.

    A template that fails gives `{"error", "line"}`; the line is None if jinja knows none.
    """
    limit_computing(SECONDS)
    template, strict = job["template"], job["strict"]
    try:
        if "values" in job:
            text = _compiled(template, strict).render(**job["values"])
            if len(text) > MAX_CHARACTERS:
                message = f"it writes {len(text)} characters: at most {MAX_CHARACTERS}"
                return {"error": message, "line": None}
            return {"text": text}
        environment = _environment(strict)
        reads = meta.find_undeclared_variables(environment.parse(template))
        return {"reads": sorted(reads - environment.globals.keys())}
    except Exception as error:  # a template is a program
        message = str(getattr(error, "message", None) or error) or type(error).__name__
        return {"error": message, "line": getattr(error, "lineno", None)}


def make_answer() -> Callable[[dict], dict]:
    limit_process()
    return answer


if __name__ == "__main__":
    sys.exit(serve(make_answer))
