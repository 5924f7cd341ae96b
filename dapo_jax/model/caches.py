"""Key/value caches and the decode state built on them, with shapes.

Dimension letters are those of `structs`: S decode slots, B prompts, K key/value heads, E head
dimension, T cached tokens of a slot, P tokens of a prompt or of a page, W pages of a slot's table,
C response tokens.
"""

from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float, Int


class KVCache(struct.PyTreeNode):
    """Keys and values of one layer for every slot, all of one length.

    Time is the last axis of keys on CPU, which makes scores 3 times faster. Elsewhere it is next to
    last; otherwise each decode step would rewrite the whole cache.
    """

    keys: Array  # [S, K, E, T] if `time_last`, else [S, K, T, E]
    values: Float[Array, "S K T E"]
    key_scale: Float[Array, "S K T"] | None = None  # if keys are int8
    value_scale: Float[Array, "S K T"] | None = None
    time_last: bool = struct.field(pytree_node=False, default=True)

    @property
    def axes(self) -> tuple[str, str]:
        """Order of slots b, heads k, time t and head dimension e in keys and in values."""
        return "bket" if self.time_last else "bkte", "bkte"


class PageCache(struct.PyTreeNode):
    """Pages of one layer, replica after replica; key and value heads alternate.

    No slot owns page 0 of a replica: finished slots write there.
    """

    pages: Array  # [N, P, K2, E]
    scales: Array | None = None  # of int8 pages: [N, P, K2], or [K2] shared by all tokens

    @property
    def calibrated(self) -> bool:
        """True for int8 pages with fixed scales, known before their tokens."""
        return self.scales is not None and self.scales.ndim == 1


class PromptCache(struct.PyTreeNode):
    """Keys and values of one layer for prefilled prompts."""

    keys: Float[Array, "B P K E"]
    values: Float[Array, "B P K E"]
    key_scale: Float[Array, "B K P"] | None = None  # if keys are int8
    value_scale: Float[Array, "B K P"] | None = None

    axes = ("btke", "btke")  # as of KVCache


class StateCache(struct.PyTreeNode):
    """State of one gated delta-net layer for every slot or prompt; see `model.delta_net`."""

    state: Float[Array, "S H G K V"]  # float32
    window: Float[Array, "S W H X"]  # the convolution's last inputs


class Prefix(struct.PyTreeNode):
    """Prefilled prompts. A prompt's last token is fed by the first decode step.

    `key` belongs to the prompt; the sample index is folded in at insertion.
    """

    caches: tuple[PromptCache | StateCache, ...]
    last_token: Int[Array, "B"]
    true_length: Int[Array, "B"]
    key: jax.Array  # [B]
    resumed_tokens: Int[Array, "B"]  # last tokens, which belong to a resumed response
    routes: Int[Array, "B P L k"] | None = None  # if the engine records them
    tokens: Int[Array, "B P"] | None = None  # if the engine proposes tokens


class Texts(struct.PyTreeNode):
    """Tokens of prompt and response of each slot, in which proposals are looked up."""

    tokens: Int[Array, "S T"]  # at their positions
    prompts: Int[Array, "S"]  # equal for the responses to one prompt


class DecodeState(struct.PyTreeNode):
    """State of the decode slots that a burst changes."""

    caches: tuple[KVCache | PageCache | StateCache, ...]
    tables: Int[Array, "S W"] | None  # pages of each slot in order; 0 if not assigned yet
    last_token: Int[Array, "S"]
    length: Int[Array, "S"]  # tokens in the cache, so also the position of last_token
    generated: Int[Array, "S"]  # response tokens so far
    active: Array  # [S] bool: occupied and not finished
    key: jax.Array  # [S] typed keys, one per response
    tokens: Int[Array, "S C"]  # response tokens, C = max_response_tokens
    logprobs: Float[Array, "S C"]
    supports: Float[Array, "S C 2"] | None  # if training truncates; see `rollout.sampling`
    busy_slot_steps: Int[Array, ""]  # decode steps of active slots since the start
    slot_steps: Int[Array, ""]  # decode steps of all slots since the start
    rules: Any = None  # SamplingRules of [S] if each response has its own
    routes: Int[Array, "S T L k"] | None = None  # of cached tokens, if they are recorded
    known: Int[Array, "S"] | None = None  # response tokens that are fed, not sampled
    texts: Texts | None = None  # if the engine proposes tokens
