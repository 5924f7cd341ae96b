"""Log-probs of responses: a scorer, and the `logprobs` fields of OpenAI's API.

One forward pass scores prompt and response after sampling, so that sampling costs the same whether
or not a client asks for log-probs.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from dapo_jax.data.prompts.tokenizer import BROKEN_CHARACTER, Tokenizer
from dapo_jax.model import inference
from dapo_jax.model.decoder import DecoderConfig

MAX_LIKELIEST = 20  # per token, in one request
SMALLEST_TOKENS = 16
CHUNK_TOKENS = 128


class Scores(NamedTuple):
    """Scores of all tokens of a sequence but the first, without temperature and truncation.

    Attributes:
        ids: the tokens.
        logprobs: log-probs of the tokens.
        likeliest_ids, likeliest_logprobs: the likeliest tokens at each position, in order.
    """

    ids: Sequence[int]
    logprobs: Float[np.ndarray, "T"]
    likeliest_ids: Int[np.ndarray, "T k"]
    likeliest_logprobs: Float[np.ndarray, "T k"]

    def since(self, first: int) -> "Scores":
        """Return the scores of the tokens from index `first` of the sequence."""
        start = max(first - 1, 0)
        return Scores._make(field[start:] for field in self)

    def rows(self, likeliest: int) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        """Yield each token, its log-prob, and the `likeliest` tokens with their log-probs."""
        lists = (self.likeliest_ids.tolist(), self.likeliest_logprobs.tolist())
        for token, logprob, ids, values in zip(
            self.ids, self.logprobs.tolist(), *lists, strict=True
        ):
            yield token, logprob, list(zip(ids, values, strict=True))[:likeliest]


class Scorer:
    """Scorer of one sequence at a time; compiles once for every power of two of tokens.

    Args:
        params: decoding weights.
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

    def score(self, ids: Sequence[int]) -> Scores:
        """Return the scores of ids; those of a single id are empty."""
        length = max(SMALLEST_TOKENS, 1 << (len(ids) - 1).bit_length())
        tokens = np.zeros(length, np.int32)
        tokens[: len(ids)] = ids
        with self._lock:
            scored = self._score(self._params, tokens, chunk_tokens=min(length, CHUNK_TOKENS))
            logprobs, values, likeliest = (np.asarray(x)[: len(ids) - 1] for x in scored)
        return Scores(ids[1:], logprobs, likeliest, values)


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token; `token_id:7` if it is not a whole character."""
    text = tokenizer.backend.decode([token], skip_special_tokens=False)
    return f"token_id:{token}" if not text or BROKEN_CHARACTER in text else text


def completion_logprobs(
    tokenizer: Tokenizer, scores: Scores, likeliest: int, first_id: int | None
) -> dict[str, Any]:
    """Return the `logprobs` field of a completion.

    Args:
        likeliest: number of likeliest tokens per position; the token itself is always included.
        first_id: the prompt's first token, if it is echoed; it has no log-prob.
    """
    tokens = [] if first_id is None else [_token_text(tokenizer, first_id)]
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
    """Return the `logprobs` field of a chat completion."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _token_text(tokenizer, token)
        encoded = None if text.startswith("token_id:") else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": encoded}

    content = [
        entry(token, logprob) | {"top_logprobs": [entry(*other) for other in others]}
        for token, logprob, others in scores.rows(likeliest)
    ]
    return {"content": content, "refusal": None}
