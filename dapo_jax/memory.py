"""How much memory a run's arrays take."""

from typing import Any

import jax


def megabytes_per_device(**held: Any) -> dict[str, float]:
    """Of trees of arrays by name; what two of them share is counted with the first."""
    sizes, counted = {}, set()
    for name, tree in held.items():
        arrays = {id(array): array for array in jax.tree.leaves(tree)}
        shards = (arrays[i].addressable_shards[0] for i in arrays.keys() - counted)
        sizes[name] = round(sum(shard.data.nbytes for shard in shards) / 1e6, 2)
        counted |= arrays.keys()
    return {name: size for name, size in sizes.items() if size}
