"""Fields `logprobs` of OpenAI's protocol, made from scores."""

import itertools
from typing import Any

from dapo_jax.commands.serve.scoring import Scores
from dapo_jax.data.prompts.tokenizer import BROKEN_CHARACTER, Tokenizer


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """Text of one token, also of a special one; `token_id:7` for one that is no whole character."""
    text = tokenizer.backend.decode([token], skip_special_tokens=False)
    return f"token_id:{token}" if not text or BROKEN_CHARACTER in text else text


def completion_logprobs(
    tokenizer: Tokenizer, scores: Scores, likeliest: int, head: int | None
) -> dict[str, Any]:
    """Lists of completions: tokens, log-probs, the likeliest tokens at each, offsets in the text.

    Args:
        likeliest: number of the likeliest tokens; the token itself is always with them.
        head: the prompt's first token, if shown; nothing is before it, so it has no log-prob.
    """
    tokens = [] if head is None else [_token_text(tokenizer, head)]
    logprobs: list[float | None] = [None] * len(tokens)
    tops: list[dict[str, float] | None] = [None] * len(tokens)
    for token, logprob, others in scores.rows(likeliest):
        tokens.append(_token_text(tokenizer, token))
        logprobs.append(logprob)
        top: dict[str, float] = {}
        for other, value in [*others, (token, logprob)]:
            top.setdefault(_token_text(tokenizer, other), value)
        tops.append(top)
    offsets = [0, *itertools.accumulate(map(len, tokens))][: len(tokens)]
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(
    tokenizer: Tokenizer, scores: Scores, likeliest: int, _: int | None
) -> dict[str, Any]:
    """List of chat completions: of each token its text, bytes, log-prob and the likeliest ones."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        text = _token_text(tokenizer, token)
        broken = text.startswith("token_id:")
        encoded = None if broken else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": encoded}

    content = [
        described(token, logprob) | {"top_logprobs": [described(*other) for other in others]}
        for token, logprob, others in scores.rows(likeliest)
    ]
    return {"content": content, "refusal": None}
