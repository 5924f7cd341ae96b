"""The trainer's parameters, laid out for decoding: un-stacked, cast, whole along `embed`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from dapo_jax import sharding
from dapo_jax.model import decoder


def places(
    config: decoder.DecoderConfig, mesh: jax.sharding.Mesh, boxed: dict[str, Any]
) -> dict[str, jax.sharding.NamedSharding]:
    """Where the parameters at those paths lie while decoding, by their paths then."""
    found = {}
    for path, place in sharding.tree_shardings(mesh, boxed, sharding.DECODING).items():
        paths = decoder.layer_paths(path, config)
        if paths != [path]:
            place = jax.sharding.NamedSharding(mesh, jax.P(*place.spec[1:]))
        found |= dict.fromkeys(paths, place)
    return found


def loader(
    config: decoder.DecoderConfig, mesh: jax.sharding.Mesh, boxed: dict[str, Any]
) -> Callable[[Any], dict[str, jax.Array]]:
    """What un-stacks the parameters at those paths onto the devices that decode."""
    unstack = functools.partial(decoder.unstack_layers, config=config)
    return jax.jit(unstack, out_shardings=places(config, mesh, boxed))
