"""Weight transfer from the trainer's stacked shards to decoding: cast, un-stacked, resharded.

Matrices may become int8 with a scale per output channel, before they are moved.

While it runs, a program holds what it reads and what it writes. All layers at once is the fastest;
a few at a time hold less.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dapo_jax.config.experiment import Sampler
from dapo_jax.model import decoder, param_paths
from dapo_jax.model.layers import SCALE
from dapo_jax.model.quantisation import quantise
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sampler_devices import move

# Of [embed, heads, head_dim].
_PER_HEAD = ("query/kernel", "key/kernel", "value/kernel")


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _halfway(before: Sequence[Any], after: Sequence[Any]) -> PartitionSpec:
    """Intermediate layout: cut as decoding wants it, and further as training left it.

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


def _as_read(place: NamedSharding, path: str) -> NamedSharding | Format:
    """Layout of an array in a device's memory.

    TPUs multiply by [embed, heads x head_dim] of query, key and value as one matrix; in the default
    order of [embed, heads, head_dim] every burst would copy them first, and heads are padded.
    """
    assert isinstance(place.mesh, Mesh)  # of devices, not only of their names
    on_tpu = place.mesh.devices.flat[0].platform == "tpu"
    if on_tpu and path.endswith(_PER_HEAD):
        return Format(Layout(major_to_minor=(1, 2, 0)), place)
    return place


class Loader:
    """Program that loads the parameters at the paths of `boxed`.

    Args:
        mesh: where the parameters are.
        decoding_mesh: where they are needed; other devices must be cut into as many tensor shards.
        boxed: shapes and logical axis names by path.
        settings: how many layers of a stack per call (0: everything in one), and whether matrices
            become int8; the embedding, biases and adapters don't.
    """

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: jax.sharding.Mesh,
        decoding_mesh: jax.sharding.Mesh,
        boxed: dict[str, Any],
        settings: Sampler,
    ):
        self._config, self._layers_at_once = config, settings.load_layers
        self._int8 = settings.weights_dtype != "auto"
        self._paths = {path: decoder.layer_paths(path, config) for path in boxed}
        before, after = (
            sharding.tree_shardings(mesh, boxed, column)
            for column in (sharding.TRAINING, sharding.DECODING)
        )
        self._places, self._halfway, final = {}, {}, {}
        for path in boxed:
            first = 1 if self._is_stacked(path) else 0  # a stack's own dimension is not cut
            there, here = after[path].spec[first:], before[path].spec[first:]
            specs: dict[str, tuple[PartitionSpec, ...]]
            specs = {path: (PartitionSpec(*there), _halfway(here, there))}
            if summed := self._summed(path):  # what is left is a scale's
                name = path + SCALE
                specs[name] = tuple(
                    PartitionSpec(*(axes for i, axes in enumerate(spec) if i not in summed))
                    for spec in specs[path]
                )
                self._paths[name] = decoder.layer_paths(name, config)
            for name, (place, halfway) in specs.items():
                self._places[name] = _as_read(NamedSharding(mesh, place), name)
                final[name] = _as_read(NamedSharding(decoding_mesh, place), name)
                self._halfway[name] = NamedSharding(mesh, halfway)
        self._targets = {to: self._places[name] for name in self._paths for to in self._paths[name]}
        self._elsewhere = decoding_mesh != mesh
        self._final = {to: final[name] for name in self._paths for to in self._paths[name]}
        self._whole = jax.jit(self._unstack, out_shardings=self._targets)
        self._some = functools.cache(self._compile_some)

    def __call__(self, params: Any) -> dict[str, Array]:
        """Arrays of each layer by their own path, where and as decoding needs them."""
        if not self._layers_at_once:
            return self._moved(self._whole(params))
        arrays = {}
        for paths, start, count, leaves in self._calls(params):
            for name, layers in self._some(paths, count)(leaves, start).items():
                paths_of_layers = self._paths[name][start : start + count]
                arrays |= self._moved(dict(zip(paths_of_layers, layers, strict=True)))
        return arrays

    def _moved(self, loaded: dict[str, Array]) -> dict[str, Array]:
        if not self._elsewhere:
            return loaded
        return move(loaded, {path: self._final[path] for path in loaded})

    def abstract(self, params: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and places of the loaded arrays, from the shapes of parameters."""
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._final[path])
            for path, leaf in jax.eval_shape(self._whole, params).items()
        }

    def lower(self, params: Any) -> jax.stages.Lowered:
        """Lowered program for parameters of these shapes and places; of several, the largest."""
        if not self._layers_at_once:
            return self._whole.lower(params)
        calls = list(self._calls(params))
        paths, start, count, leaves = max(calls, key=lambda call: call[2] * len(call[0]))
        return self._some(paths, count).lower(leaves, start)

    def _unstack(self, params: Any) -> dict[str, Array]:
        arrays = {}
        for path, leaf in sharding.flatten(params).items():
            stack = leaf if self._is_stacked(path) else leaf[None]
            for name, layers in self._layers(path, stack).items():
                arrays |= zip(self._paths[name], layers, strict=True)
        return arrays

    def _is_stacked(self, path: str) -> bool:
        return self._paths[path] != [path]

    def _summed(self, path: str) -> tuple[int, ...]:
        return param_paths.scaled_axes(path) if self._int8 else ()

    def _calls(self, params: Any):
        """Calls as (paths, first layer, layers, arrays); what is no stack goes alone."""
        flat, groups = sharding.flatten(params), {}
        for path in flat:
            stack = path.split("/")[0] if self._is_stacked(path) else path
            groups.setdefault(stack, []).append(path)
        for paths in map(tuple, groups.values()):
            height, leaves = len(self._paths[paths[0]]), {path: flat[path] for path in paths}
            for start in range(0, height, self._layers_at_once):
                yield paths, start, min(self._layers_at_once, height - start), leaves

    def _compile_some(self, paths: tuple[str, ...], count: int):
        def load(leaves, start):
            arrays = {}
            for path, leaf in leaves.items():
                stacked = self._is_stacked(path)
                some = jax.lax.dynamic_slice_in_dim(leaf, start, count) if stacked else leaf[None]
                arrays |= self._layers(path, some)
            return arrays

        names = (name for path in paths for name in (path, path + SCALE))
        places = {name: [self._places[name]] * count for name in names if name in self._places}
        return jax.jit(load, out_shardings=places)

    def _layers(self, path: str, stack: Array) -> dict[str, list[Array]]:
        """Layers of a stack in the intermediate layout, and by the name beside it their scales."""
        if summed := self._summed(path):
            whole, scale = quantise(stack, jnp.int8, tuple(1 + axis for axis in summed))
            stacks = {path: whole, path + SCALE: scale}
        else:
            stacks = {path: stack.astype(param_paths.forward_dtype(path, self._config))}
        constrain = jax.lax.with_sharding_constraint
        return {
            name: [constrain(layer, self._halfway[name]) for layer in layers]
            for name, layers in stacks.items()
        }
