"""Log-probs of responses: a scorer, and the `logprobs` fields of OpenAI's API.

One forward pass scores prompt and response after sampling, so that sampling is never slower.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.data.prompts.tokenizer import BROKEN_CHARACTER, TextStream, Tokenizer
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
    """Scorer of one sequence at a time; compiles once for every power of two of tokens."""

    def __init__(self, config: DecoderConfig):
        self._lock = threading.Lock()
        likeliest = min(MAX_LIKELIEST, config.vocab)

        def score(params: Any, tokens: jax.Array) -> Any:
            chunk = min(tokens.size, CHUNK_TOKENS)
            return inference.score(params, config, tokens, likeliest=likeliest, chunk_tokens=chunk)

        self._score = jax.jit(score)

    def score(self, params: Any, ids: Sequence[int], likeliest: int) -> list[Score]:
        """Return the scores of all tokens, each with this many of the likeliest ones."""
        length = max(SMALLEST_TOKENS, 1 << (len(ids) - 1).bit_length())
        tokens = np.zeros(length, np.int32)
        tokens[: len(ids)] = ids
        with self._lock:
            scored = self._score(params, tokens)
            logprobs, values, others = (np.asarray(x)[: len(ids) - 1].tolist() for x in scored)
        tops = [
            list(zip(*top, strict=True))[:likeliest] for top in zip(others, values, strict=True)
        ]
        return [Score(ids[0], None, []), *map(Score, ids[1:], logprobs, tops)]


def _name_tokens(
    tokenizer: Tokenizer, before: Sequence[int], scores: Sequence[Score]
) -> Iterator[tuple[str, dict[int, str]]]:
    """Yield the text that each token adds, and different names of all tokens at its position.

    A name is the text that the token would add, or `token_id:7` if that is no whole character or
    the name of another token. Special tokens have names, and add nothing.
    """
    stream = TextStream(tokenizer, before)
    for score in scores:
        names: dict[int, str] = {}
        for token in dict.fromkeys([score.token, *dict(score.likeliest)]):
            name = tokenizer.special.get(token) or stream.rest([token])
            is_name = BROKEN_CHARACTER not in name and name not in names.values()
            is_known = tokenizer.backend.id_to_token(token) is not None
            names[token] = name if is_name and is_known else f"token_id:{token}"
        yield stream.add([score.token]), names


def completion_logprobs(
    tokenizer: Tokenizer, before: Sequence[int], scores: Sequence[Score]
) -> dict[str, Any]:
    """Return the `logprobs` field of a completion; its top log-probs include the token itself."""
    named = list(_name_tokens(tokenizer, before, scores))
    tops = []
    for (_, names), (token, logprob, likeliest) in zip(named, scores, strict=True):
        top = dict(likeliest) | ({} if logprob is None else {token: logprob})
        tops.append({names[other]: value for other, value in top.items()} or None)
    return {
        "tokens": [names[score.token] for (_, names), score in zip(named, scores, strict=True)],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": list(itertools.accumulate([0, *(len(text) for text, _ in named)]))[:-1],
    }


def chat_logprobs(
    tokenizer: Tokenizer, before: Sequence[int], scores: Sequence[Score]
) -> dict[str, Any]:
    """Return the `logprobs` field of a chat completion."""

    def entry(names: dict[int, str], token: int, logprob: float | None) -> dict[str, Any]:
        text = names[token]
        encoded = None if text.startswith("token_id:") else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": encoded}

    named = zip(_name_tokens(tokenizer, before, scores), scores, strict=True)
    content = [
        entry(names, token, logprob) | {"top_logprobs": [entry(names, *other) for other in others]}
        for (_, names), (token, logprob, others) in named
    ]
    return {"content": content, "refusal": None}
