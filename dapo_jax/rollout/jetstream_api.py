"""JetStream's interface: the classes that the engine needs, a tokenizer, the layout of results.

JetStream is the extra `jetstream`. Without it the engine samples the same tokens, but JetStream's
orchestrator cannot drive it.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model.caches import DecodeState

REPLACED = ("seqio", "seqio.vocabularies", "tiktoken", "tiktoken.load")
NO_TOKEN = -1


@contextlib.contextmanager
def _without_tokenizers() -> Iterator[None]:
    """Replace packages while JetStream is imported: their TensorFlow takes 5 s to import.

    JetStream needs them for tokenizers of SentencePiece and Llama 3, which are not used here.
    """
    names = [name for name in REPLACED if name not in sys.modules]
    for name in names:
        sys.modules[name] = module = types.ModuleType(name)
        for attribute in "Vocabulary", "SentencePieceVocabulary", "load_tiktoken_bpe":
            setattr(module, attribute, object)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


try:
    with _without_tokenizers():
        from jetstream.engine.engine_api import Engine, ResultTokens
        from jetstream.engine.tokenizer_pb2 import (
            TokenizerParameters,  # pyright: ignore[reportAttributeAccessIssue]: defined at import
        )
except ImportError:
    from dapo_jax.rollout.without_jetstream import Engine, ResultTokens, TokenizerParameters

__all__ = ["Engine", "JetStreamTokenizer", "ResultTokens", "TokenizerParameters", "result_tokens"]


class JetStreamTokenizer:
    """Tokenizer of a model folder behind JetStream's interface `tokenizer_api.Tokenizer`."""

    stop_tokens: Any = None
    pad_id: Any = None
    eos_id: Any = None
    # Marker that JetStream puts before ids and `prefill` removes; policies have none.
    bos_id: Any = NO_TOKEN

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.stop_tokens = set(tokenizer.end_ids)
        self.pad_id = tokenizer.pad_id
        self.eos_id = tokenizer.end_ids[0]

    def encode(self, s: str, **options: Any) -> tuple[Array | np.ndarray, int]:
        """Return the ids of a prompt, padded on the right, and their number."""
        from jetstream.engine import token_utils

        ids = np.array(self._tokenizer.encode_prompt(s), np.int32)
        options["is_bos"] = False
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **options)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return self._tokenizer.decode_all([list(token_ids)])[0]


def result_tokens(
    state: DecodeState, generated_before: Int[Array, "S"], columns: int
) -> Any:  # the `ResultTokens` of one of two modules
    """Return the tokens of the last burst and their validity in JetStream's one-array layout."""
    at = generated_before[:, None] + jnp.arange(columns)
    valid = at < state.generated[:, None]
    at = jnp.minimum(at, state.tokens.shape[1] - 1)
    tokens = jnp.where(valid, jnp.take_along_axis(state.tokens, at, axis=1), 0)
    data = jnp.concatenate([tokens, valid, state.generated[:, None]], axis=1)
    return ResultTokens(
        data=data.astype(jnp.int32),
        tokens_idx=(0, columns),
        valid_idx=(columns, 2 * columns),
        length_idx=(2 * columns, 2 * columns + 1),
        samples_per_slot=1,
    )
