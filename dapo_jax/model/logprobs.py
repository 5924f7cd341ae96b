"""Log-probabilities, entropies and scalar values of packed tokens under a decoder."""

from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dapo_jax.model.decoder import Decoder, DecoderConfig, head_kernel, layer_stacks
from dapo_jax.model.divergence import Divergence, head_divergence
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
    """Log-probability log p(tokens[t] | tokens[<t]) and its distribution's entropy, at t; float32.

    The first token of a segment has no past: both numbers are meaningless there and must be masked.
    """
    hidden, _ = hidden_states(params, config, tokens, segment_ids, positions)
    return logprobs_of(params, hidden, tokens, temperature, chunk_tokens)


def hidden_states(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    routes: Int[Array, "R T L k"] | None = None,
    record: Sequence[str] = (),
) -> tuple[Float[Array, "R T D"], dict[str, Shaped[Array, "L R T ..."]]]:
    """Final hidden states, of the compute dtype: at t of tokens[<=t]; and records of the routers.

    Args:
        routes: experts to take, where they are not -1.
        record: some of `experts.RECORDS`.
    """
    arrays = tokens, segment_ids, positions, routes
    hidden, records = Decoder(config).apply({"params": params}, *arrays, mutable=list(record))
    by_layer = {}
    for name in record:
        stacks: list[Any] = [records[name][stack] for stack in layer_stacks(config)]
        by_layer[name] = jnp.concatenate([stack["moe"]["layer"] for stack in stacks])
    return cast(Array, hidden), by_layer


def logprobs_of(
    params: Any,
    hidden: Float[Array, "R T D"],
    tokens: Int[Array, "R T"],
    temperature: float,
    chunk_tokens: int,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Log-probabilities and entropies of `token_logprobs`, from the final hidden states."""
    following = jnp.roll(tokens, -1, axis=1)
    # jax.custom_vjp loses the type of the function.
    logprobs, entropy = cast(
        tuple[Array, Array],
        head_logprobs(hidden, head_kernel(params), following, temperature, chunk_tokens),
    )
    return jnp.roll(logprobs, 1, axis=1), jnp.roll(entropy, 1, axis=1)


def divergences_of(
    params: Any,
    hidden: Float[Array, "R T D"],
    teacher_params: Any,
    teacher_hidden: Float[Array, "R T E"],
    divergence: Divergence,
    chunk_tokens: int,
) -> Float[Array, "R T"]:
    """Divergence, at t, of the distributions that tokens[t] is from; float32, in nats.

    As of log-probabilities the first of a segment is meaningless.
    """
    heads = head_kernel(params), head_kernel(teacher_params)
    arrays = hidden, heads[0], teacher_hidden, heads[1]
    found = cast(Array, head_divergence(*arrays, divergence, chunk_tokens))
    return jnp.roll(found, 1, axis=1)


def token_values(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
) -> Float[Array, "R T"]:
    """Value V(tokens[<t]) of the scalar head at t; float32.

    The value at the first token of a segment is meaningless and must be masked.
    """
    return jnp.roll(scalars_after(params, config, tokens, segment_ids, positions), 1, axis=1)


def scalars_after(
    params: Any,
    config: DecoderConfig,
    tokens: Int[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
) -> Float[Array, "R T"]:
    """Scalar head at the hidden state of tokens[<=t]; float32."""
    hidden = cast(Array, Decoder(config).apply({"params": params}, tokens, segment_ids, positions))
    return jnp.dot(hidden, params["score"], preferred_element_type=jnp.float32)
