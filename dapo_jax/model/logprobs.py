"""Log-probs, entropies and scalar values of packed tokens under a decoder.

A value at t belongs to the distribution of tokens[t] given tokens[<t]. The first token of a segment
has no past: its value must be masked.
"""

from collections.abc import Collection
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.model.decoder import Decoder, DecoderConfig, head_kernel
from dapo_jax.model.experts import BALANCE, REPLACED, ROUTES, RouterRecords
from dapo_jax.model.lm_head import Scale, head_logprobs


class Rows(NamedTuple):
    """Packed rows as a decoder reads them."""

    tokens: Int[Array, "R T"]
    segment_ids: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    routes: Int[Array, "R T L k"] | None = None  # experts to take; -1 for the likeliest
    prompt_ids: Int[Array, "R T"] | None = None  # segment of the prompt that a token attends to too


def hidden_states(
    params: Any, config: DecoderConfig, rows: Rows, record: Collection[str] = ()
) -> tuple[Float[Array, "R T D"], RouterRecords]:
    """Return the final hidden states, at t those of tokens[<=t], and `record` of the routers."""
    hidden, collections = Decoder(config).apply({"params": params}, *rows, mutable=list(record))

    def layers(name: str) -> Array | None:
        if name not in record:
            return None
        stacks: list[Any] = list(collections[name].values())  # frozen layers come first
        return jnp.concatenate([stack["moe"]["layer"] for stack in stacks])

    routes = layers(ROUTES)
    routes = None if routes is None else jnp.moveaxis(routes, 0, 2)
    return cast(Array, hidden), RouterRecords(routes, layers(REPLACED), layers(BALANCE))


def logprobs_of(
    params: Any,
    hidden: Float[Array, "R T D"],
    tokens: Int[Array, "R T"],
    needed: Bool[Array, "R T"],
    scale: Scale,
    chunk_tokens: int,
    edges: Float[Array, "R T"] | None = None,  # see `head_logprobs`
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Return log p(tokens[t] | tokens[<t]) and the entropy of its distribution, at t; float32.

    Those of tokens that are not needed are 0; products with the head are left out for them.
    """
    following, wanted = jnp.roll(tokens, -1, axis=1), jnp.roll(needed, -1, axis=1)
    edges = None if edges is None else jnp.roll(edges, -1, axis=1)
    # jax.custom_vjp loses the function's type.
    logprobs, entropy = cast(
        tuple[Array, Array],
        head_logprobs(hidden, head_kernel(params), following, wanted, scale, chunk_tokens, edges),
    )
    return jnp.roll(logprobs, 1, axis=1), jnp.roll(entropy, 1, axis=1)


def energies_of(
    params: Any,
    hidden: Float[Array, "R T D"],
    tokens: Int[Array, "R T"],
    needed: Bool[Array, "R T"],
    logprobs: Float[Array, "R T"],  # of the tokens
    scale: Scale,
    chunk_tokens: int,
    edges: Float[Array, "R T"] | None = None,
) -> Float[Array, "R T"]:
    """Return 1 - 2 p(tokens[t]) + sum p^2: the squared gradient of log p by the logits."""
    # The log of sum p^2 is 2 log p - log p at half the temperature, for any token.
    half = scale._replace(temperature=scale.temperature / 2)
    edges = None if edges is None else 2 * edges
    sharper, _ = logprobs_of(params, hidden, tokens, needed, half, chunk_tokens, edges)
    squares = jnp.exp(2 * logprobs - sharper)
    return jnp.maximum(1 - 2 * jnp.exp(logprobs) + squares, 0.0)


def token_values(params: Any, config: DecoderConfig, rows: Rows) -> Float[Array, "R T"]:
    """Return the scalar head's value V(tokens[<t]) at t; float32."""
    return jnp.roll(scalars_after(params, config, rows), 1, axis=1)


def scalars_after(params: Any, config: DecoderConfig, rows: Rows) -> Float[Array, "R T"]:
    """Return the scalar head's value of tokens[<=t] at t; float32."""
    hidden = cast(Array, Decoder(config).apply({"params": params}, *rows))
    return jnp.dot(hidden, params["score"], preferred_element_type=jnp.float32)
