"""Chat template of a model folder, rendered as the model's own library renders it."""

import pathlib
import reprlib
from typing import Any

from dapo_jax.data.prompts.template_process import TemplateFails, render
from dapo_jax.runtime.settings import ConfigError, read_file, read_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class ChatTemplate:
    """Chat template: from messages to the text of a prompt."""

    def __init__(self, text: str, special_tokens: dict[str, str] | None = None):
        self._text, self._special_tokens = text, special_tokens or {}

    def render(
        self,
        messages: list[dict[str, Any]],
        field: str = "config.data.template = 'chat'",
        open_answer: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Text of the prompt, up to the beginning of the assistant's turn.

        Args:
            messages: each with `role` ('system', 'user' or 'assistant') and `content`.
            field: the setting that asks for the template, for the error.
            open_answer: without it the text ends with the last message.
            tools: that the model may call, as OpenAI's protocol describes them.

        Raises:
            ConfigError: the template is broken, refuses the messages or takes too long.
        """
        values = {
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": open_answer,
        }
        try:
            return render(self._text, values | self._special_tokens)
        except TemplateFails as error:
            raise ConfigError(f"{field}: the model's chat template fails: {error}") from None

    @property
    def writes_tools(self) -> bool:
        """True where the template writes the tools that a model may call."""
        return "tools" in self._text

    def check(self, field: str) -> None:
        """Raises `ConfigError` where the shortest conversation takes too long."""
        try:
            render(self._text, {"messages": [{"role": "user", "content": "1+1"}]})
        except TemplateFails as error:
            if error.late:
                raise ConfigError(f"{field}: the model's chat template fails: {error}") from None


def _token_text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token


def read_chat_template(folder: pathlib.Path, field: str = "model.folder") -> ChatTemplate | None:
    """Chat template of chat_template.jinja, else of tokenizer_config.json; else None.

    Raises:
        ConfigError: a file can't be read, or holds something that is no text.
    """
    path = folder / "tokenizer_config.json"
    settings = read_json(path, field) if path.exists() else {}
    text = settings.get("chat_template")
    if isinstance(text, list):  # several by name
        named = [entry for entry in text if isinstance(entry, dict)]
        text = {str(entry.get("name")): entry.get("template") for entry in named}.get("default")
    own = folder / "chat_template.jinja"
    if own.exists():
        text = read_file(own, field)
    tokens = {name: _token_text(settings[name]) for name in SPECIAL_TOKENS if settings.get(name)}
    for name, value in {"chat_template": text or "", **tokens}.items():
        if not isinstance(value, str):
            wrong = f"{name} = {reprlib.repr(value)}: must be text"
            raise ConfigError(f"config.{field}: {path}: {wrong}", field)
    return ChatTemplate(text, tokens) if text else None
