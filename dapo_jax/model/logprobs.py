"""What a decoder says of given tokens: log-probability and entropy, or a scalar."""

from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.decoder import Decoder, DecoderConfig, head_kernel
from dapo_jax.model.lm_head import head_logprobs


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
    # A function with a gradient of its own has no type of its own.
    logprobs, entropy = cast(
        tuple[Array, Array],
        head_logprobs(hidden, head_kernel(params), following, temperature, chunk_tokens),
    )
    return jnp.roll(logprobs, 1, axis=1), jnp.roll(entropy, 1, axis=1)


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
    hidden = cast(Array, Decoder(config).apply({"params": params}, tokens, segment_ids, positions))
    return jnp.dot(hidden, params["score"], preferred_element_type=jnp.float32)
