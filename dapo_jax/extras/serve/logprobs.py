"""Log-probs of responses: a scorer, and the `logprobs` fields of OpenAI's API.

One forward pass scores prompt and response after sampling, so that sampling is never slower.
"""

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.data.prompts.tokenizer import BROKEN_CHARACTER, Tokenizer
from dapo_jax.model import inference
from dapo_jax.model.decoder import DecoderConfig

MAX_LIKELIEST = 20  # per token, in one request
SMALLEST_TOKENS = 16
CHUNK_TOKENS = 128


class Score(NamedTuple):
    """Log-prob of a token, without temperature and truncation."""

    token: int
    logprob: float | None  # None: the first token of a sequence
    likeliest: list[tuple[int, float]]  # tokens at its position with their log-probs, in order


class Scorer:
    """Scorer of one sequence at a time; compiles once for every power of two of tokens.

    `params` may be None if every call of `score` brings its own.
    """

    def __init__(self, config: DecoderConfig, params: Any):
        self._params = params
        self._lock = threading.Lock()
        likeliest = min(MAX_LIKELIEST, config.vocab)
        self._score = jax.jit(
            lambda params, tokens, chunk_tokens: inference.score(
                params, config, tokens, likeliest=likeliest, chunk_tokens=chunk_tokens
            ),
            static_argnames="chunk_tokens",
        )

    def score(self, ids: Sequence[int], likeliest: int, params: Any = None) -> list[Score]:
        """Return the scores of all tokens, each with this many of the likeliest ones."""
        params = self._params if params is None else params
        length = max(SMALLEST_TOKENS, 1 << (len(ids) - 1).bit_length())
        tokens = np.zeros(length, np.int32)
        tokens[: len(ids)] = ids
        with self._lock:
            scored = self._score(params, tokens, chunk_tokens=min(length, CHUNK_TOKENS))
            logprobs, values, others = (np.asarray(x)[: len(ids) - 1].tolist() for x in scored)
        tops = [
            list(zip(*top, strict=True))[:likeliest] for top in zip(others, values, strict=True)
        ]
        return [Score(ids[0], None, []), *map(Score, ids[1:], logprobs, tops)]


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token; `token_id:7` if it is not a whole character."""
    text = tokenizer.backend.decode([token], skip_special_tokens=False)
    return f"token_id:{token}" if not text or BROKEN_CHARACTER in text else text


def completion_logprobs(tokenizer: Tokenizer, scores: list[Score]) -> dict[str, Any]:
    """Return the `logprobs` field of a completion; its top log-probs include the token itself."""
    tokens = [_token_text(tokenizer, score.token) for score in scores]
    tops = []
    for score in scores:
        top: dict[str, float] = {}
        for token, logprob in [*score.likeliest, (score.token, score.logprob)]:
            if logprob is not None:
                top.setdefault(_token_text(tokenizer, token), logprob)
        tops.append(top or None)
    return {
        "tokens": tokens,
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
    }


def chat_logprobs(tokenizer: Tokenizer, scores: list[Score]) -> dict[str, Any]:
    """Return the `logprobs` field of a chat completion."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = _token_text(tokenizer, token)
        encoded = None if text.startswith("token_id:") else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": encoded}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*other) for other in others]}
        for token, logprob, others in scores
    ]
    return {"content": content, "refusal": None}
