"""Inputs of single layers: a second embedding of each token and a projection of the first one."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dapo_jax.model.layers import look_up, named, projection
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
        own = look_up(table, tokens, c.dtype, is_wide=True) if trains else table[tokens]
        whole = sharding.constrain(x, "batch", "sequence", None)
        projected = projection(c, "projection", (width,), ("embed", "norm"))(whole)
        projected = (projected * jnp.asarray(c.embed**-0.5, c.dtype)).reshape(shape)
        scale = named(nn.initializers.ones, ("norm",))
        norm = nn.RMSNorm(c.norm_eps, dtype=c.dtype, scale_init=scale, name="norm")
        own = own.reshape(shape) * jnp.asarray(c.layer_inputs**0.5, c.dtype)
        inputs = (norm(projected) + own) * jnp.asarray(2**-0.5, c.dtype)
        return sharding.constrain(jnp.moveaxis(inputs, 2, 0), None, "batch", "length", None)
