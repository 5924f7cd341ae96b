"""Inputs of single layers: a second embedding of each token and a projection of the first one."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.layers import named, projection
from dapo_jax.runtime import sharding


class LayerInputs(nn.Module):
    """Inputs as in Gemma 4: (norm(projection of x) + embedding of the token) / sqrt 2."""

    config: Any  # a `DecoderConfig`

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"], trains: bool = True
    ) -> Float[Array, "L B T P"]:
        """Return the inputs of all layers; x holds the scaled embeddings."""
        c = self.config
        width, shape = c.layers * c.layer_inputs, (*tokens.shape, c.layers, c.layer_inputs)
        init = named(nn.initializers.normal(0.02), ("vocab", "embed"))
        table = self.param("embedding", init, (c.vocab, width)).astype(c.dtype)
        own = look_up_columns(table, tokens) if trains else table[tokens]
        whole = sharding.constrain(x, "batch", "sequence", None)
        projected = projection(c, "projection", (width,), ("embed", "norm"))(whole)
        projected = (projected * jnp.asarray(c.embed**-0.5, c.dtype)).reshape(shape)
        scale = named(nn.initializers.ones, ("norm",))
        norm = nn.RMSNorm(c.norm_eps, dtype=c.dtype, scale_init=scale, name="norm")
        own = own.reshape(shape) * jnp.asarray(c.layer_inputs**0.5, c.dtype)
        inputs = (norm(projected) + own) * jnp.asarray(2**-0.5, c.dtype)
        return sharding.constrain(jnp.moveaxis(inputs, 2, 0), None, "batch", "length", None)


def look_up_columns(table: Float[Array, "V D"], tokens: Int[Array, "R T"]) -> Array:
    """Return the embeddings [R T D] of packed rows from a table wider than the residual stream.

    Each device looks up the tokens of all devices in its columns, then they exchange the results,
    which are smaller than the table that `layers.look_up` would gather.
    """
    vocab, embed = (sharding.active_axes(name) for name in ("vocab", "embed"))
    if sharding.active_mesh() is None:
        return table[tokens]

    def look_up_locally(table: Float[Array, "v d"], tokens: Int[Array, "r t"]) -> Array:
        if embed:
            tokens = jax.lax.all_gather(tokens, embed, axis=0, tiled=True)
        indices = tokens - (jax.lax.axis_index(vocab) * len(table) if vocab else 0)
        local = (indices >= 0) & (indices < len(table))
        found = jnp.where(local[..., None], table[jnp.where(local, indices, 0)], 0)
        if embed:
            found = jax.lax.all_to_all(found, embed, split_axis=0, concat_axis=2, tiled=True)
        return jax.lax.psum(found, vocab) if vocab else found

    rows = sharding.active_spec("batch", "sequence")
    return jax.shard_map(
        look_up_locally,
        in_specs=(sharding.active_spec("vocab", "embed"), rows),
        out_specs=sharding.active_spec("batch", "sequence", None),
    )(table, tokens)
