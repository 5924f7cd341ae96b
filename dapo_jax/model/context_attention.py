"""Training attention over rows whose length is cut over devices (context parallelism).

Keys and values are gathered layer by layer, queries stay cut. Later tokens see more keys, so each
device attends from an early piece of the row and from the late one as far from the row's end.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PIECES = 2  # of a row, on each device


def attend_in_context(
    attention: Callable,
    axes: tuple[str, ...],
    queries: Float[Array, "B t H E"],
    keys: Float[Array, "B t K E"],
    values: Float[Array, "B t K E"],
    segment_ids: Int[Array, "B T"],
    *shared: Array,
) -> Float[Array, "B t H E"]:
    """Attention output of a device's tokens; of a row's pieces device i has numbers 2i and 2i + 1.

    Args:
        attention: takes the queries of a piece, whole keys, values and segment numbers, `shared`,
            and by name `first`, the place of the piece's first token in the row.
        axes: of the mesh, that cut the rows.
    """
    devices = jax.lax.axis_size(axes)
    pieces, size = PIECES * devices, queries.shape[1] // PIECES
    keys, values = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (keys, values))
    mixed = []
    for which, part in enumerate(jnp.split(queries, PIECES, axis=1)):
        numbers = range(which, pieces, PIECES)
        hosts = [min(number, pieces - 1 - number) for number in numbers]
        there, back = list(enumerate(hosts)), [(host, i) for i, host in enumerate(hosts)]
        hosted = dict(zip(hosts, numbers, strict=True))
        number = jnp.array([hosted[i] for i in range(devices)])[jax.lax.axis_index(axes)]
        part = jax.lax.ppermute(part, axes, there)
        part = attention(part, keys, values, segment_ids, *shared, first=number * size)
        mixed.append(jax.lax.ppermute(part, axes, back))
    return jnp.concatenate(mixed, axis=1)
