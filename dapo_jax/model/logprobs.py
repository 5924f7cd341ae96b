"""What a decoder says of given tokens: log-probability and entropy, or a scalar.

Logits come in chunks, so that [R, T, V] never exists.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.decoder import Decoder, DecoderConfig, head_kernel


def _of_chunk(head: Float[Array, "D V"], temperature: float, hidden, targets):
    logits = jnp.dot(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logits = logits / temperature
    # Less the largest first, as the sampler: the difference of two large numbers has few digits.
    logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    powers = jnp.exp(logits)
    total = jnp.sum(powers, axis=-1)
    drawn = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    normaliser = jnp.log(total)
    return drawn - normaliser, normaliser - jnp.sum(powers * logits, axis=-1) / total


def head_logprobs(
    hidden: Float[Array, "R T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "R T"],
    temperature: float,
    chunk_tokens: int,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Log-probability of each target under its hidden state, and the entropy there; float32.

    Chunks run along T, so that a sharded R stays sharded; each is recomputed in the backward
    pass. The head stays float32 outside the chunk, so its gradient adds up in float32.
    """
    rows, length, width = hidden.shape
    size = max(1, chunk_tokens // rows)
    of_chunk = functools.partial(_of_chunk, head, temperature)
    if size >= length:
        return of_chunk(hidden, targets)
    pad = -length % size
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(rows, -1, size, width)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(rows, -1, size)
    chunks = (hidden.swapaxes(0, 1), targets.swapaxes(0, 1))
    step = jax.checkpoint(lambda _, chunk: (None, of_chunk(*chunk)))
    _, results = jax.lax.scan(step, None, chunks)
    return tuple(r.swapaxes(0, 1).reshape(rows, -1)[:, :length] for r in results)


def token_logprobs(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """log p(tokens[t] | tokens[<t]) and the entropy of that distribution, aligned with `tokens`.

    The first token of a segment has no past: what stands there is meaningless and must be masked.
    """
    hidden = Decoder(config).apply({"params": params}, tokens, segment_ids, positions)
    following = jnp.roll(tokens, -1, axis=1)
    results = head_logprobs(hidden, head_kernel(params), following, temperature, chunk_tokens)
    return tuple(jnp.roll(result, 1, axis=1) for result in results)


def token_values(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
) -> Float[Array, "R T"]:
    """The scalar head's V(tokens[<t]), aligned with `tokens`; float32.

    What stands on the first token of a segment is meaningless and must be masked.
    """
    return jnp.roll(scalars_after(params, config, tokens, segment_ids, positions), 1, axis=1)


def scalars_after(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
) -> Float[Array, "R T"]:
    """The scalar head applied to the hidden state that has read tokens[<=t]; float32."""
    hidden = Decoder(config).apply({"params": params}, tokens, segment_ids, positions)
    return jnp.dot(hidden, params["score"], preferred_element_type=jnp.float32)
