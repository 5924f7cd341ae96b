"""From the trainer's stacked, sharded parameters to those that decode: cast, un-stacked, resharded.

While it runs, a program holds what it reads and what it writes. All layers at once is the fastest;
a few at a time hold less.
"""

import functools
from typing import Any

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jaxtyping import Array

from dapo_jax import sharding
from dapo_jax.model import decoder


class Loader:
    """Loads the parameters at the paths of `boxed`.

    Args:
        boxed: shapes and logical axis names by path.
        layers_at_once: of a stack, per call; 0: everything in one call.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: jax.sharding.Mesh,
        boxed: dict[str, Any],
        layers_at_once: int = 0,
    ):
        self._config, self._layers_at_once = config, layers_at_once
        self._paths = {path: decoder.layer_paths(path, config) for path in boxed}
        self._places = sharding.tree_shardings(mesh, boxed, sharding.DECODING)
        for path, place in self._places.items():
            if self._is_stacked(path):
                self._places[path] = NamedSharding(mesh, jax.P(*place.spec[1:]))
        self._targets = {to: self._places[path] for path in boxed for to in self._paths[path]}
        unstack = functools.partial(decoder.unstack_layers, config=config)
        self._whole = jax.jit(unstack, out_shardings=self._targets)
        self._some = functools.cache(self._compile_some)

    def __call__(self, params: Any) -> dict[str, Array]:
        """Each layer's arrays by their own path, where and as decoding needs them."""
        if not self._layers_at_once:
            return self._whole(params)
        found = {}
        for paths, start, count, leaves in self._calls(params):
            loaded = self._some(paths, count)(leaves, start)
            for path in paths:
                found |= zip(self._paths[path][start : start + count], loaded[path], strict=True)
        return found

    def abstract(self, params: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and places of what loading makes of parameters of these shapes."""
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._targets[path])
            for path, leaf in jax.eval_shape(self._whole, params).items()
        }

    def lower(self, params: Any) -> jax.stages.Lowered:
        """The program for parameters of these shapes and places; of several, the largest."""
        if not self._layers_at_once:
            return self._whole.lower(params)
        calls = list(self._calls(params))
        paths, start, count, leaves = max(calls, key=lambda call: call[2] * len(call[0]))
        return self._some(paths, count).lower(leaves, start)

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
        dtype = decoder.forward_dtype(path, self._config)
        if not self._is_stacked(path):
            return [leaf.astype(dtype)]
        return list(jax.lax.dynamic_slice_in_dim(leaf, start, count).astype(dtype))
