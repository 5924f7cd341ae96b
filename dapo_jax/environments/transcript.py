"""Tokens of observations: exactly those that the template writes between two turns."""

import json
from collections.abc import Sequence
from typing import Any

from dapo_jax.data.prompts.tokenizer import BROKEN_CHARACTER, Tokenizer
from dapo_jax.runtime.settings import ConfigError

TURN = "7f3a9c"  # stands for the policy's turn where a template is rendered around it
OBSERVED = "c4e81b"  # and this for a message behind it
ASKED, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}
CALL_ID = "000000000"  # of nine characters, as Mistral's templates demand


def break_special(text: str, special: Sequence[str]) -> str:
    """Text in which no special token is written: it could begin a turn in another's name."""
    for token in special:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _text(content: Any) -> str:
    if not isinstance(content, str):
        content = "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
    return content.encode("utf-8", "replace").decode()  # half a surrogate pair has no UTF-8


class Transcript:
    """Writer of observations as tokens.

    What the policy drew stays as it was drawn, also where a template rewrites earlier turns.

    Args:
        chat: whether prompts are written by the model's chat template.
        role: whose messages the template has to write.

    Raises:
        ConfigError: the chat template can't go on after an answer with a message of that role.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool, role: str = "user"):
        self._tokenizer, self._chat = tokenizer, tokenizer.chat if chat else None
        added = tokenizer.backend.get_added_tokens_decoder().items()
        self._special = [t.content for i, t in added if t.special or i in tokenizer.end_ids]
        self._special = [token for token in self._special if len(token) > 1]
        self._roles: set[str] = set()  # those that the template is known to write
        if self._chat is not None:
            self._check_role(role)

    def tokens(self, messages: Sequence[dict[str, Any]], most: int) -> tuple[list[int], bool]:
        """Tokens behind a turn that ended with its end token, up to where the next turn begins.

        Args:
            most: tokens of the messages' contents together; what is beyond is cut.

        Returns the tokens, and whether anything was cut.

        Raises:
            ConfigError: the chat template refuses or leaves out a message of such a role.
        """
        shortened, left, cut = [], most, False
        for message in messages:
            content = break_special(_text(message.get("content")), self._special)
            ids = self._tokenizer.encode(content)
            if len(ids) > left:
                content, cut = self._tokenizer.decode(ids[:left]).rstrip(BROKEN_CHARACTER), True
            left -= min(left, len(ids))
            shortened.append({**message, "content": content})
        if self._chat is None:
            joined = break_special("".join(one["content"] for one in shortened), self._special)
            return self._tokenizer.encode(joined), cut
        for role in {message["role"]: None for message in shortened}:
            self._check_role(role)
        return self._behind(self._render(shortened).partition(TURN)[2]), cut

    def _check_role(self, role: str) -> None:
        """Raises `ConfigError` where the template can't write a message of a role."""
        if role in self._roles:
            return
        _, found, behind = self._render([{"role": role, "content": OBSERVED}]).partition(TURN)
        if not found or TURN in behind:
            raise ConfigError(
                "config.environment: the chat template writes an answer elsewhere than in its place"
            )
        if OBSERVED not in behind:
            raise ConfigError(
                f"config.environment: the chat template writes no message of the role {role!r}"
            )
        self._roles.add(role)

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Text of a conversation in which these messages follow an answer."""
        assert self._chat is not None
        known = [
            {"tool_call_id": CALL_ID, **one} if one["role"] == "tool" else one for one in messages
        ]
        roles = ", ".join({repr(message["role"]): None for message in messages})
        field = f"config.environment: messages of the role {roles}"
        return self._chat.render([ASKED, ANSWER, *known], field)

    def _behind(self, text: str) -> list[int]:
        """Ids of a text behind an answer; its end token the policy has drawn itself."""
        ids = self._tokenizer.encode(text)
        ends = [place for place, token in enumerate(ids) if token in self._tokenizer.end_ids]
        before = self._tokenizer.backend.decode(ids[: (ends or [0])[0]], skip_special_tokens=False)
        return ids[ends[0] + 1 :] if ends and not before.strip() else ids
