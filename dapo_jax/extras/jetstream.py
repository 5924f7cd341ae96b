"""The engine behind JetStream's own `Engine`, for its orchestrator; needs google-jetstream."""

import contextlib
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.sampling import SAMPLE_FOR_SERVING, sample_keys
from dapo_jax.types.structs import SamplingRule

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


with _without_tokenizers():
    from jetstream.engine.engine_api import Engine, ResultTokens
    from jetstream.engine.tokenizer_pb2 import (
        TokenizerParameters,  # pyright: ignore[reportAttributeAccessIssue]: defined at import
    )


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

    def encode(self, s: str, **options: Any) -> tuple[jax.Array | np.ndarray, int]:
        """Return the ids of a prompt, padded on the right, and their number."""
        from jetstream.engine import token_utils

        ids = np.array(self._tokenizer.encode_prompt(s), np.int32)
        options["is_bos"] = False
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **options)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return self._tokenizer.decode_all([list(token_ids)])[0]


class JetStreamEngine(Engine):
    """A `PolicyEngine` with the methods and types of JetStream's `Engine`."""

    samples_per_slot: Any = 1
    colocated_cpus: Any = None
    max_concurrent_decodes: Any = 0
    max_prefill_length: Any = 0
    mesh: Any = None

    def __init__(
        self,
        engine: PolicyEngine,
        tokenizer: Tokenizer,
        rule: SamplingRule = SamplingRule(),  # noqa: B008
        seed: int = 0,  # part of the random keys, with the order of arrival
    ):
        if (burst := engine.shape.tokens_per_burst) != 1:
            allowed = "1, as JetStream drops the other tokens of a response's last burst"
            raise ValueError(f"burst_tokens = {burst}: must be {allowed}")
        self._engine, self._tokenizer = engine, tokenizer
        self._rule, self._seed, self._arrivals = rule, seed, itertools.count()
        self.max_concurrent_decodes = engine.max_concurrent_decodes
        self.max_prefill_length = engine.max_prefill_length
        self.mesh = engine.mesh

    def load_params(self, params: Any) -> Any:
        return self._engine.load_params(params)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        key: jax.Array | None = None,
    ) -> Prefix:
        if existing_prefix is not None:
            raise ValueError("prefill: existing_prefix is not supported")
        if padded_tokens[0] == NO_TOKEN:
            padded_tokens = np.append(padded_tokens[1:], self._tokenizer.pad_id)
            true_length -= 1
        engine = self._engine
        limit = min(len(padded_tokens), engine.max_prefill_length)
        if not 0 < true_length <= limit:
            allowed = f"above 0 and at most {limit}"
            raise ValueError(f"prefill: true_length = {true_length}: must be {allowed}")
        if key is None:
            key = sample_keys([(self._seed, SAMPLE_FOR_SERVING, 0, next(self._arrivals))])[0]
        keys = jnp.stack([key] * engine.prefill_batch(1))
        tokens = np.asarray(padded_tokens)[None]
        return engine.prefill_prompts(params, tokens, [true_length], keys)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        if pages := self._engine.pages:
            whole = np.full(self.max_concurrent_decodes, self._engine.cache_tokens)
            fits = pages.claim(slot, int(prefix.true_length[0]), prompt=("alone", slot))
            if not fits or pages.reserve([slot], whole):
                raise ValueError(f"slot {slot}: no pages are left; raise sampler.pages")
        return self._engine.insert(prefix, decode_state, slot)

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, ResultTokens]:
        engine = self._engine
        rule, longest = self._rule, engine.cache_tokens
        state, (tokens, counts) = engine.generate(params, decode_state, rule=rule, longest=longest)
        size = tokens.shape[1]
        valid = jnp.arange(size) < counts[:, None]
        data = [jnp.where(valid, tokens, 0), valid, state.generated[:, None]]
        return state, ResultTokens(
            data=jnp.concatenate(data, axis=1).astype(jnp.int32),
            tokens_idx=(0, size),
            valid_idx=(size, 2 * size),
            length_idx=(2 * size, 2 * size + 1),
            samples_per_slot=1,
        )

    def init_decode_state(self) -> DecodeState:
        return self._engine.init_decode_state()

    def get_prefix_destination_sharding(self) -> None:
        return None  # prefill and decoding share the mesh

    def get_tokenizer(self) -> TokenizerParameters:
        return TokenizerParameters()  # empty: the tokenizer comes from the model folder

    def build_tokenizer(self, metadata: TokenizerParameters) -> JetStreamTokenizer:
        return JetStreamTokenizer(self._tokenizer)
