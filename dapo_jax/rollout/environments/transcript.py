"""Tokens of observations, as the chat template writes them between two turns."""

import json
from collections.abc import Sequence
from typing import Any

from dapo_jax.data.prompts.tokenizer import BROKEN_CHARACTER, Tokenizer
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import present

TURN = "7f3a9c"  # placeholder of the policy's turn in a rendered template
OBSERVED = "c4e81b"  # placeholder of a message after it
QUESTION = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": TURN}
CALL_ID = "000000000"  # Mistral's templates require nine characters


def break_special(text: str, special: Sequence[str]) -> str:
    """Split special tokens with a blank, since they could begin a turn of another role."""
    for token in special:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _text(content: Any) -> str:
    if not isinstance(content, str):
        content = "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
    return content.encode("utf-8", "replace").decode()  # a lone surrogate has no UTF-8


class Transcript:
    """Tokenizer of observations. Sampled tokens never change, even if a template rewrites turns.

    Args:
        chat: whether the model's chat template writes the prompts.
        role: role of messages that the template must support.
        tools: functions that the policy may call.

    Raises:
        ConfigError: the chat template can't write a message of that role after an answer.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool, role: str = "user", tools: Any = None):
        self._tokenizer = tokenizer
        self._tools = tools
        self._chat = tokenizer.chat if chat else None
        added = tokenizer.backend.get_added_tokens_decoder().items()
        special = [t.content for i, t in added if t.special or i in tokenizer.end_ids]
        self._special = [token for token in special if len(token) > 1]
        self._checked_roles: set[str] = set()
        if self._chat is not None:
            self._check_role(role)

    def tokens(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> tuple[list[int], bool]:
        """Return the tokens between a turn's end token and the next turn, and whether any was cut.

        Args:
            max_tokens: limit for the contents of all messages together.

        Raises:
            ConfigError: the chat template rejects or omits a message of such a role.
        """
        shortened = []
        left = max_tokens
        cut = False
        for message in messages:
            content = break_special(_text(message.get("content")), self._special)
            ids = self._tokenizer.encode(content)
            if len(ids) > left:
                content = self._tokenizer.decode(ids[:left]).rstrip(BROKEN_CHARACTER)
                cut = True
            left -= min(left, len(ids))
            shortened.append({**message, "content": content})
        if self._chat is None:
            joined = "".join(message["content"] for message in shortened)
            return self._tokenizer.encode(break_special(joined, self._special), inside=True), cut
        for role in {message["role"]: None for message in shortened}:
            self._check_role(role)
        return self._tokens_after_turn(self._render(shortened).partition(TURN)[2]), cut

    def _check_role(self, role: str) -> None:
        """Raise ConfigError if the template can't write a message of a role."""
        if role in self._checked_roles:
            return
        _, turn, rest = self._render([{"role": role, "content": OBSERVED}]).partition(TURN)
        if not turn or TURN in rest:
            raise ConfigError(
                "config.environment: the chat template does not write an answer once, in its place"
            )
        if OBSERVED not in rest:
            raise ConfigError(
                f"config.environment: the chat template writes no message of the role {role!r}"
            )
        self._checked_roles.add(role)

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return the text of a conversation with these messages after an answer."""
        with_ids = [
            {"tool_call_id": CALL_ID, **message} if message["role"] == "tool" else message
            for message in messages
        ]
        roles = ", ".join({repr(message["role"]): None for message in messages})
        field = f"config.environment: messages of the role {roles}"
        messages = [QUESTION, ANSWER, *with_ids]
        return present(self._chat, "chat template").render(messages, field, tools=self._tools)

    def _tokens_after_turn(self, text: str) -> list[int]:
        """Return the tokens of a text after an answer, without the end token of the turn."""
        ids = self._tokenizer.encode(text, inside=True)
        ends = [place for place, token in enumerate(ids) if token in self._tokenizer.end_ids]
        before = self._tokenizer.backend.decode(ids[: (ends or [0])[0]], skip_special_tokens=False)
        return ids[ends[0] + 1 :] if ends and not before.strip() else ids
