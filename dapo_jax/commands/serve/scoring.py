"""Scores of given tokens under a served policy: their log-probs, and the likeliest tokens beside.

One forward pass over prompt and response, after the response is drawn: so that drawing costs the
same whether somebody asks for log-probs or not.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from dapo_jax.model import inference
from dapo_jax.model.decoder import DecoderConfig

MAX_LIKELIEST = 20  # that a request may ask for
SMALLEST_TOKENS, CHUNK_TOKENS = 16, 128


class Scores(NamedTuple):
    """Scores of the tokens of a sequence, without its first, which has nothing before it.

    They are of the policy as it is: no temperature, no truncation.

    Attributes:
        ids: the tokens.
        logprobs: theirs.
        likeliest_ids, likeliest_logprobs: of the likeliest tokens there, the likeliest first.
    """

    ids: Sequence[int]
    logprobs: Float[np.ndarray, "T"]
    likeliest_ids: Int[np.ndarray, "T k"]
    likeliest_logprobs: Float[np.ndarray, "T k"]

    def since(self, first: int) -> "Scores":
        """Scores of the tokens from place `first` of the sequence on."""
        at = max(first - 1, 0)
        return Scores._make(field[at:] for field in self)

    def rows(self, likeliest: int) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        """Each token with its log-prob and the `likeliest` tokens there with theirs."""
        lists = (self.likeliest_ids.tolist(), self.likeliest_logprobs.tolist())
        for token, logprob, ids, values in zip(
            self.ids, self.logprobs.tolist(), *lists, strict=True
        ):
            yield token, logprob, list(zip(ids, values, strict=True))[:likeliest]


class Scorer:
    """Scorer of sequences, one at a time; it compiles once for every power of two of tokens.

    Args:
        config: shape and numerics of the policy.
        params: its decoding weights.
    """

    def __init__(self, config: DecoderConfig, params: Any):
        self._params, self._turn = params, threading.Lock()
        self._likeliest = min(MAX_LIKELIEST, config.vocab)
        self._score = jax.jit(
            lambda params, tokens, chunk_tokens: inference.score(
                params, config, tokens, likeliest=self._likeliest, chunk_tokens=chunk_tokens
            ),
            static_argnames="chunk_tokens",
        )

    def score(self, ids: Sequence[int]) -> Scores:
        """Scores of ids; of a single one there are none."""
        length = max(SMALLEST_TOKENS, 1 << (len(ids) - 1).bit_length())
        tokens = np.zeros(length, np.int32)
        tokens[: len(ids)] = ids
        with self._turn:
            scored = self._score(self._params, tokens, chunk_tokens=min(length, CHUNK_TOKENS))
            chosen, logprobs, likeliest = (np.asarray(x)[: len(ids) - 1] for x in scored)
        return Scores(ids[1:], chosen, likeliest, logprobs)
