"""From the trainer's stacked, sharded parameters to those that decode: cast, un-stacked, resharded.

While it runs, a program holds what it reads and what it writes. All layers at once is the fastest;
a few at a time hold less.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from dapo_jax import sharding
from dapo_jax.model import decoder


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _halfway(before: Sequence[Any], after: Sequence[Any]) -> PartitionSpec:
    """Between two layouts: cut as decoding wants it, and further as training left it.

    Devices of `decode_tensor` first exchange parts of embed for parts of heads; only then are the
    parts of fsdp gathered. In one step the compiler gathers everything everywhere.
    """
    taken = {axis for entry in after for axis in _axes(entry)}
    pairs = itertools.zip_longest(before, after)
    return PartitionSpec(
        *(
            there or tuple(axis for axis in _axes(here) if axis not in taken)
            for here, there in pairs
        )
    )


class Loader:
    """Loads the parameters at the paths of `boxed`.

    Args:
        mesh: where the parameters are.
        decoding_mesh: where they are needed; other devices must be cut into as many tensor shards.
        boxed: shapes and logical axis names by path.
        layers_at_once: of a stack, per call; 0: everything in one call.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: jax.sharding.Mesh,
        decoding_mesh: jax.sharding.Mesh,
        boxed: dict[str, Any],
        layers_at_once: int = 0,
    ):
        self._config, self._layers_at_once = config, layers_at_once
        self._paths = {path: decoder.layer_paths(path, config) for path in boxed}
        before, after = (
            sharding.tree_shardings(mesh, boxed, column)
            for column in (sharding.TRAINING, sharding.DECODING)
        )
        self._places, self._halfway = {}, {}
        for path in boxed:
            first = 1 if self._is_stacked(path) else 0  # a stack's own dimension is not cut
            there, here = after[path].spec[first:], before[path].spec[first:]
            self._places[path] = NamedSharding(mesh, PartitionSpec(*there))
            self._halfway[path] = NamedSharding(mesh, _halfway(here, there))
        self._targets = {to: self._places[path] for path in boxed for to in self._paths[path]}
        self._elsewhere = decoding_mesh != mesh
        self._final = {
            to: NamedSharding(decoding_mesh, place.spec) for to, place in self._targets.items()
        }
        self._whole = jax.jit(self._unstack, out_shardings=self._targets)
        self._some = functools.cache(self._compile_some)

    def __call__(self, params: Any) -> dict[str, Array]:
        """Each layer's arrays by their own path, where and as decoding needs them."""
        if not self._layers_at_once:
            return self._moved(self._whole(params))
        found = {}
        for paths, start, count, leaves in self._calls(params):
            loaded = self._some(paths, count)(leaves, start)
            for path in paths:
                layers = self._paths[path][start : start + count]
                found |= self._moved(dict(zip(layers, loaded[path], strict=True)))
        return found

    def _moved(self, loaded: dict[str, Array]) -> dict[str, Array]:
        if not self._elsewhere:
            return loaded
        return sharding.move(loaded, {path: self._final[path] for path in loaded})

    def abstract(self, params: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and places of what loading makes of parameters of these shapes."""
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._final[path])
            for path, leaf in jax.eval_shape(self._whole, params).items()
        }

    def lower(self, params: Any) -> jax.stages.Lowered:
        """The program for parameters of these shapes and places; of several, the largest."""
        if not self._layers_at_once:
            return self._whole.lower(params)
        calls = list(self._calls(params))
        paths, start, count, leaves = max(calls, key=lambda call: call[2] * len(call[0]))
        return self._some(paths, count).lower(leaves, start)

    def _unstack(self, params: Any) -> dict[str, Array]:
        between = {to: self._halfway[path] for path in self._paths for to in self._paths[path]}
        flat = decoder.unstack_layers(params, self._config)
        return jax.lax.with_sharding_constraint(flat, {path: between[path] for path in flat})

    def _is_stacked(self, path: str) -> bool:
        return self._paths[path] != [path]

    def _calls(self, params: Any):
        """(paths, first layer, layers, arrays) of every call; what is no stack goes alone."""
        flat, groups = flatten_dict(params, sep="/"), {}
        for path in flat:
            groups.setdefault(path.split("/")[0] if self._is_stacked(path) else path, []).append(
                path
            )
        for paths in map(tuple, groups.values()):
            height, leaves = len(self._paths[paths[0]]), {path: flat[path] for path in paths}
            for start in range(0, height, self._layers_at_once):
                yield paths, start, min(self._layers_at_once, height - start), leaves

    def _compile_some(self, paths: tuple[str, ...], count: int):
        def load(leaves, start):
            return {path: self._layers(path, leaves[path], start, count) for path in paths}

        places = {path: [self._places[path]] * count for path in paths}
        return jax.jit(load, out_shardings=places)

    def _layers(self, path: str, leaf: Array, start: Array, count: int) -> list[Array]:
        dtype, stacked = decoder.forward_dtype(path, self._config), self._is_stacked(path)
        some = jax.lax.dynamic_slice_in_dim(leaf, start, count) if stacked else leaf[None]
        return [
            jax.lax.with_sharding_constraint(layer.astype(dtype), self._halfway[path])
            for layer in some
        ]
