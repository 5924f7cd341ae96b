"""Worker process of templates: jinja in its sandbox, in a process that may be killed.

`python -m dapo_jax.data.prompts.template_worker` answers as `runtime.workers.child.serve` does.

A template is a program that came with a model. It can change no value, and its time and memory are
limited. Names and white space are as in Hugging Face's `apply_chat_template`.
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

TODAY = datetime.date(2024, 7, 26)  # what Llama 3's templates say where nobody tells them
MAX_CHARACTERS = 1 << 20  # of a text
SECONDS = 2  # of computing, for one text; the kernel ends the process at the next whole one


class _Generation(Extension):
    """Block `{% generation %}` around text of a model, which is written as it stands."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without HTML escapes, which jinja's own filter would write."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    """Date that never changes: a resumed run sees the same prompts after midnight."""
    return TODAY.strftime(form)


@functools.cache
def _environment(strict: bool) -> jinja2.Environment:
    """Environment as in Hugging Face's library. `strict`: names without a value are errors."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(16)
def _compiled(text: str, strict: bool) -> jinja2.Template:
    return _environment(strict).from_string(text)


def answer(job: dict) -> dict:
    """Reply to `{"template", "strict", "values"}`: `{"text"}`; without values, `{"reads"}`.

    A template that fails gives `{"error", "line"}`; the line is None where jinja knows none.
    """
    limit_computing(SECONDS)
    template, strict = job["template"], job["strict"]
    try:
        if "values" in job:
            text = _compiled(template, strict).render(**job["values"])
            too_long = f"it writes {len(text)} characters: at most {MAX_CHARACTERS}"
            return (
                {"text": text} if len(text) <= MAX_CHARACTERS else {"error": too_long, "line": None}
            )
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
