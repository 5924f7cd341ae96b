"""The policy behind JetStream's `Engine`: prefill, insert, generate.

Prefill, insert and generate keep JetStream's signatures; the keyword arguments beyond them carry
what reproducible rollouts need. Importing JetStream pulls TensorFlow in, so this module is imported
after the config was checked, and TensorFlow is kept quiet and off the GPU.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Int

from dapo_jax import sharding
from dapo_jax.experiment.settings import require
from dapo_jax.model import decoder
from dapo_jax.prompts.tokenizer import Tokenizer
from dapo_jax.sampler import decoding
from dapo_jax.sampler.loading import Loader
from dapo_jax.sampler.sampling import SAMPLE_FOR_SERVING, SamplingRule, sample_key
from dapo_jax.structs import DecodeState, KVCache, Prefix


@contextlib.contextmanager
def _standard_error_muted() -> Iterator[None]:
    """TensorFlow reports the GPUs it does not find on standard error, whatever its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


with _standard_error_muted():
    import tensorflow
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

    tensorflow.config.set_visible_devices([], "GPU")

NO_TOKEN = -1


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """The tokenizer of a model folder, as JetStream's threads ask for one."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s: str, **options: Any) -> tuple[np.ndarray, int]:
        """Ids of the prompt `s`, padded on the right, and how many they are."""
        ids = np.array(self._tokenizer.encode_prompt(s), np.int32)
        options["is_bos"] = False
        return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **options)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._tokenizer.end_ids)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self._tokenizer.end_ids[0]

    @property
    def bos_id(self) -> int:
        """Policies begin without one, but JetStream puts it before ids: `prefill` takes it off."""
        return NO_TOKEN


class PolicyEngine(engine_api.Engine):
    """Decodes `slots` responses side by side, `burst_tokens` per call.

    Args:
        config: shape and numerics of the policy.
        mesh: the devices; slots are split over data x fsdp, heads over tensor.
        slots: how many responses decode together.
        burst_tokens: token columns of one `generate` call.
        max_prompt_tokens, max_response_tokens: limits; a slot's cache holds their sum.
        first_window_tokens: cache length of an empty state; it doubles when responses outgrow it,
            so that attention reads what exists and not the maximum. The limit itself: no growth.
        insert_width: how many slots one `insert` can fill from one prefix (the group size).
        tokenizer: its `end_ids` end a response; JetStream encodes and decodes with it.
        seed: of the draws of prompts that come without a key.
        frozen: parameters that never change. One copy for decoding is made of them, once;
            `load_params` then takes the others.
        load_layers: how many layers `load_params` copies at once; 0: all.

    Attributes:
        rule: how tokens are drawn; `generate` reads it at each call.
        held: the decoding copy of the frozen parameters; None before it was needed.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: jax.sharding.Mesh,
        *,
        slots: int,
        burst_tokens: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        first_window_tokens: int,
        insert_width: int,
        tokenizer: Tokenizer,
        seed: int = 0,
        frozen: Any = None,
        load_layers: int = 0,
    ):
        pieces = sharding.shards(mesh, "batch", sharding.DECODING)
        require(
            slots % pieces == 0, "sampler.slots", slots, f"a multiple of data x fsdp = {pieces}"
        )
        self.config, self._mesh, self.rule = config, mesh, SamplingRule()
        self._slots, self._burst_tokens = slots, burst_tokens
        self._max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens
        self._first_window_tokens, self._insert_width = first_window_tokens, insert_width
        self._tokenizer, self._seed, self._served = tokenizer, seed, itertools.count()
        self._end_ids = jnp.asarray(tokenizer.end_ids, jnp.int32)
        self._empty_fn = functools.partial(
            decoding.empty_state, config, slots=slots, max_response_tokens=max_response_tokens
        )
        self._state_shardings = self._shardings_of_state()
        self._frozen, self.held, self._load_layers = frozen or {}, None, load_layers
        self._compile()

    def _compile(self) -> None:
        state, replicated = self._state_shardings, sharding.sharding(self._mesh)
        boxed = flatten_dict(decoder.abstract_params(self.config), sep="/")
        frozen = flatten_dict(self._frozen, sep="/")
        loader = functools.partial(Loader, self.config, self._mesh)
        trained = {path: leaf for path, leaf in boxed.items() if path not in frozen}
        self._load_frozen = loader({path: boxed[path] for path in frozen}, self._load_layers)
        self._load = loader(trained, self._load_layers)
        self._prefill = jax.jit(self._prefill_fn)
        self._insert = jax.jit(decoding.start_responses, donate_argnums=1, out_shardings=state)
        self._generate = jax.jit(
            self._generate_fn,
            static_argnames="rule",
            donate_argnums=1,
            out_shardings=(state, replicated),
        )
        self._grow = jax.jit(decoding.grow, static_argnames="window", out_shardings=state)
        self._empty = jax.jit(self._empty_fn, static_argnames="window", out_shardings=state)
        self._rows = jax.jit(lambda array, slots: array[slots], out_shardings=replicated)

    # --- what JetStream asks for --------------------------------------------------------------

    def load_params(self, params: Any) -> Any:
        """The trainer's live parameters, resharded, cast and un-stacked for decoding."""
        self.hold()
        return decoder.for_decoding(self.held | self._load(params), self.config)

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: Int[Array, "P"],
        true_length: int,
        key: jax.Array | None = None,
    ) -> Prefix:
        """Keys and values of one prompt, padded on the right.

        `key` belongs to the prompt (seed, step and place in the data); left out, it is of the
        engine's seed and of how many prompts came without a key before.
        """
        if existing_prefix is not None:
            raise ValueError("prefill: existing_prefix is not supported")
        if padded_tokens[0] == NO_TOKEN:
            padded_tokens = np.append(padded_tokens[1:], self._tokenizer.pad_id)
            true_length -= 1
        if not 0 < true_length <= min(len(padded_tokens), self._max_prompt_tokens):
            raise ValueError(
                f"prefill: true_length = {true_length}: must be above 0 and at most "
                f"{min(len(padded_tokens), self._max_prompt_tokens)}"
            )
        if key is None:
            key = sample_key(self._seed, SAMPLE_FOR_SERVING, 0, next(self._served))
        return self._prefill(params, jnp.asarray(padded_tokens, jnp.int32), true_length, key)

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int | np.ndarray,
        *,
        sample_index: int | np.ndarray = 0,
    ) -> DecodeState:
        """Starts a response of `prefix` in `slot`, or one in each of up to `insert_width` slots."""
        decode_state = self._fit(decode_state, prefix.caches[0].values.shape[2])
        slots, samples = np.atleast_1d(slot), np.atleast_1d(sample_index)
        width = 1 if len(slots) == 1 else self._insert_width
        if len(slots) > width:
            raise ValueError(f"insert: {len(slots)} slots: must be at most insert_width = {width}")
        pad = (0, width - len(slots))
        # An index past the last slot is dropped by the scatter.
        slots = np.pad(slots, pad, constant_values=self._slots).astype(np.int32)
        return self._insert(prefix, decode_state, slots, np.pad(samples, pad).astype(np.int32))

    def generate(
        self, params: Any, decode_state: DecodeState, *, longest: int | None = None
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Draws up to `burst_tokens` tokens per active slot in one call.

        `longest`: the most tokens that any active slot has in its cache now; left out, a slot may
        be as full as it gets. The cache grows first where this burst would not fit.
        """
        longest = self.cache_tokens if longest is None else longest
        decode_state = self._fit(decode_state, longest + self._burst_tokens)
        return self._generate(params, decode_state, rule=self.rule)

    def init_decode_state(self) -> DecodeState:
        """A state with every slot free, its cache as short as it may be."""
        return self._empty(window=self._window(1))

    def get_prefix_destination_sharding(self) -> Any:
        """None: prefill and decoding share the mesh."""
        return None

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """JetStream's description of a vocabulary; ours comes from the model folder instead."""
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> JetStreamTokenizer:
        """The model folder's own, whatever `metadata` says."""
        return JetStreamTokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._max_prompt_tokens

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # --- what rollouts need beyond it ---------------------------------------------------------

    @property
    def cache_tokens(self) -> int:
        """Tokens a slot can hold; the last drawn one is never fed back."""
        return self._max_prompt_tokens + self.max_response_tokens

    def hold(self) -> None:
        """Makes the decoding copy of the frozen parameters, the first time."""
        if self.held is None:
            self.held = self._load_frozen(self._frozen)

    def harvest(self, state: DecodeState, slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Drawn tokens and log-probs [len(slots), max_response_tokens] of those slots, on host."""
        padded = np.zeros(1 << (len(slots) - 1).bit_length(), np.int32)
        padded[: len(slots)] = slots
        tokens, logprobs = self._rows(state.tokens, padded), self._rows(state.logprobs, padded)
        return np.asarray(tokens)[: len(slots)], np.asarray(logprobs)[: len(slots)]

    def _window(self, needed: int) -> int:
        window = self._first_window_tokens
        while window < needed:
            window *= 2
        return min(window, self.cache_tokens)

    def _fit(self, state: DecodeState, needed: int) -> DecodeState:
        window = self._window(needed)
        if window <= state.caches[0].values.shape[2]:
            return state
        return self._grow(state, window=window)

    def _shardings_of_state(self) -> DecodeState:
        place = functools.partial(sharding.sharding, self._mesh, column=sharding.DECODING)
        shapes = jax.eval_shape(lambda: self._empty_fn(window=1))
        per_slot = jax.tree.map(lambda leaf: place("batch") if leaf.ndim else place(), shapes)
        cache = KVCache(place("batch", "kv_heads"), place("batch", "kv_heads"))
        return per_slot.replace(caches=(cache,) * self.config.layers)

    # --- jitted bodies ------------------------------------------------------------------------

    def _prefill_fn(self, params, tokens, true_length, key) -> Prefix:
        caches = decoder.prefill(params, self.config, tokens)
        return Prefix(caches, tokens[true_length - 1], jnp.asarray(true_length), key)

    def _generate_fn(self, params, state: DecodeState, *, rule: SamplingRule):
        def more(carry):
            step, state = carry
            return (step < self._burst_tokens) & state.active.any()

        def body(carry):
            step, state = carry
            return step + 1, decoding.decode_one(params, self.config, state, self._end_ids, rule)

        started_at = state.generated
        _, state = jax.lax.while_loop(more, body, (0, state))
        return state, self._result_tokens(state, started_at)

    def _result_tokens(self, state: DecodeState, started_at) -> engine_api.ResultTokens:
        """This burst's token columns with their validity, in JetStream's one-array layout."""
        columns = self._burst_tokens
        at = started_at[:, None] + jnp.arange(columns)
        valid = at < state.generated[:, None]
        at = jnp.minimum(at, self.max_response_tokens - 1)
        tokens = jnp.where(valid, jnp.take_along_axis(state.tokens, at, axis=1), 0)
        data = jnp.concatenate([tokens, valid, state.generated[:, None]], axis=1)
        return engine_api.ResultTokens(
            data=data.astype(jnp.int32),
            tokens_idx=(0, columns),
            valid_idx=(columns, 2 * columns),
            length_idx=(2 * columns, 2 * columns + 1),
            samples_per_slot=1,
        )
