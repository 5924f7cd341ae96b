"""The chat template of a model folder, rendered as the model's own library renders it.

A template is a program that came with the model: it runs in jinja's sandbox and may change
nothing it is given. Names and white space are as in Hugging Face's `apply_chat_template`.
"""

import datetime
import functools
import json
import pathlib
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dapo_jax.experiment.settings import ConfigError, read_json

TODAY = datetime.date(2024, 7, 26)  # what Llama 3's templates say where nobody tells them
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote; a prompt holds nothing of that."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja's own filter escapes HTML, which has no place in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    """Not today: a prompt that changes at midnight is another prompt to a run that goes on."""
    return TODAY.strftime(form)


def sandbox(undefined: type[jinja2.Undefined] = jinja2.Undefined) -> jinja2.Environment:
    """Where templates run, with what Hugging Face's library offers them.

    Args:
        undefined: what a name is that nothing has; it writes nothing, or raises.
    """
    environment = ImmutableSandboxedEnvironment(
        undefined=undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """Messages to prompt text."""

    def __init__(self, text: str, special_tokens: dict[str, str] | None = None):
        self._text, self._special_tokens = text, special_tokens or {}

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return sandbox().from_string(self._text)

    def render(
        self,
        messages: list[dict[str, str]],
        field: str = "config.data.template = 'chat'",
        open_answer: bool = True,
    ) -> str:
        """The prompt, up to where the assistant's turn begins.

        Args:
            messages: each with `role` ('system', 'user' or 'assistant') and `content`.
            field: what asked for it.
            open_answer: without it the text ends with the last message.

        Raises:
            ConfigError: the template is broken, or refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=open_answer,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program
            raise ConfigError(f"{field}: the model's chat template fails: {error}") from None


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def read_chat_template(folder: pathlib.Path, field: str = "model.folder") -> ChatTemplate | None:
    """That of chat_template.jinja, else of tokenizer_config.json; None where neither has one."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path, field) if path.exists() else {}
    text = settings.get("chat_template")
    if isinstance(text, list):  # several by name
        text = {entry.get("name"): entry.get("template") for entry in text}.get("default")
    own = folder / "chat_template.jinja"
    if own.exists():
        text = own.read_text(encoding="utf-8")
    tokens = {name: _token_text(settings[name]) for name in SPECIAL_TOKENS if settings.get(name)}
    return ChatTemplate(text, tokens) if text else None
