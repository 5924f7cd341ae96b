"""Weight transfer from the trainer's stacked shards to decoding: cast, unstack, reshard.

Matrices may become int8 with a scale per output channel before they are moved. During the
transfer a program holds its inputs and outputs: all layers at once is the fastest, a few at a time
need less memory.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dapo_jax.config.experiment import Sampler
from dapo_jax.model import decoder, param_paths
from dapo_jax.model.layers import SCALE
from dapo_jax.model.quantisation import quantise
from dapo_jax.runtime import sharding
from dapo_jax.runtime.sampler_devices import move

# Kernels of shape [embed, heads, head_dim].
_PER_HEAD = ("query/kernel", "key/kernel", "value/kernel", "qkv/kernel", "qkvz/kernel", "z/kernel")


def _intermediate_spec(before: Sequence[Any], after: Sequence[Any]) -> PartitionSpec:
    """Return a layout that is sharded for decoding, and beyond that as in training.

    Devices of `decode_tensor` first exchange parts of embed for parts of heads; only then are the
    parts of fsdp gathered. In one step the compiler would gather everything on all devices.
    """
    used = {axis for entry in after for axis in sharding.entry_axes(entry)}
    return PartitionSpec(
        *(
            decoding or tuple(axis for axis in sharding.entry_axes(training) if axis not in used)
            for training, decoding in itertools.zip_longest(before, after)
        )
    )


def _with_memory_layout(place: NamedSharding, path: str) -> NamedSharding | Format:
    """Return the sharding of an array, with its order of dimensions in memory if that matters.

    TPUs multiply by [embed, heads x head_dim] of query, key and value as one matrix. In the default
    order of [embed, heads, head_dim] every burst would copy them first, and pad the heads.
    """
    assert isinstance(place.mesh, Mesh)  # not an abstract mesh
    on_tpu = place.mesh.devices.flat[0].platform == "tpu"
    if on_tpu and path.endswith(_PER_HEAD):
        return Format(Layout(major_to_minor=(1, 2, 0)), place)
    return place


class DecodingArrays(dict[str, np.ndarray]):
    """Trained parameters as a `Loader` has returned them to another process, on the host."""


class Loader:
    """Program that loads the parameters at the paths of `boxed`."""

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: Mesh,  # of the parameters
        decoding_mesh: Mesh,
        boxed: dict[str, Any],  # shapes and logical axis names by path
        settings: Sampler,
    ):
        self._config = config
        self._layers_at_once = settings.load_layers
        self._int8 = settings.weights_dtype != "auto"
        self._paths = {path: decoder.layer_paths(path, config) for path in boxed}
        self._moves = decoding_mesh != mesh
        self._places: dict[str, Any] = {}
        self._intermediate: dict[str, NamedSharding] = {}
        final: dict[str, Any] = {}
        before = sharding.tree_shardings(mesh, boxed, sharding.TRAINING)
        after = sharding.tree_shardings(mesh, boxed, sharding.DECODING)
        for path in boxed:
            for name, (place, intermediate) in self._specs(path, before, after).items():
                if name != path:
                    self._paths[name] = decoder.layer_paths(name, config)
                self._places[name] = _with_memory_layout(NamedSharding(mesh, place), name)
                final[name] = _with_memory_layout(NamedSharding(decoding_mesh, place), name)
                self._intermediate[name] = NamedSharding(mesh, intermediate)
        self._final = {to: final[name] for name in self._paths for to in self._paths[name]}
        self._program = functools.cache(self._compile)

    def __call__(self, params: Any) -> dict[str, Array]:
        """Return the arrays of each layer by path, resharded for decoding."""
        arrays = {}
        for call, start, leaves in self._calls(params):
            loaded = self._named(self._program(*call)(leaves, start), start)
            if self._moves:
                loaded = move(loaded, {path: self._final[path] for path in loaded})
            arrays |= loaded
        return arrays

    def place(self, arrays: DecodingArrays) -> dict[str, Array]:
        """Return arrays that a call has returned in another process, on the decoding mesh."""
        if arrays.keys() != self._final.keys():
            raise ValueError("the arrays are not those of this model")
        return {path: jax.device_put(array, self._final[path]) for path, array in arrays.items()}

    def abstract(self, params: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and shardings of the loaded arrays, from the shapes of parameters."""
        shapes = {}
        for call, start, leaves in self._calls(params):
            shapes |= self._named(jax.eval_shape(self._program(*call), leaves, start), start)
        return {path: leaf.update(sharding=self._final[path]) for path, leaf in shapes.items()}

    def lower(self, params: Any) -> jax.stages.Lowered:
        """Lower the program for parameters of these shapes; the largest if there are several."""
        (paths, count), start, leaves = max(
            self._calls(params), key=lambda call: call[0][1] * len(call[0][0])
        )
        return self._program(paths, count).lower(leaves, start)

    def _specs(
        self, path: str, before: dict[str, Any], after: dict[str, Any]
    ) -> dict[str, tuple[PartitionSpec, PartitionSpec]]:
        """Return the final and the intermediate layout of a parameter, and of its int8 scale."""
        first = 1 if self._is_stacked(path) else 0  # the stack's own dimension is not sharded
        final = PartitionSpec(*after[path].spec[first:])
        specs = {path: (final, _intermediate_spec(before[path].spec[first:], tuple(final)))}
        if summed := self._summed(path):
            scale = [
                PartitionSpec(*(axes for i, axes in enumerate(spec) if i not in summed))
                for spec in specs[path]
            ]
            specs[path + SCALE] = (scale[0], scale[1])
        return specs

    def _is_stacked(self, path: str) -> bool:
        return self._paths[path] != [path]

    def _summed(self, path: str) -> tuple[int, ...]:
        return param_paths.scaled_axes(path) if self._int8 else ()

    def _calls(self, params: Any) -> Iterator[tuple[tuple[tuple[str, ...], int], int, dict]]:
        """Yield calls as ((paths, layers), first layer, arrays); unstacked arrays go alone."""
        flat = sharding.flatten(params)
        groups: dict[str, list[str]] = {}
        for path in flat:
            stack = path.split("/")[0] if self._is_stacked(path) else path
            groups.setdefault(stack, []).append(path)
        for paths in map(tuple, groups.values()):
            height = len(self._paths[paths[0]])
            leaves = {path: flat[path] for path in paths}
            size = self._layers_at_once or height
            for start in range(0, height, size):
                yield (paths, min(size, height - start)), start, leaves

    def _named(self, loaded: dict[str, list[Any]], start: int) -> dict[str, Any]:
        """Return the layers from `start` on by their own paths."""
        pairs = ((self._paths[name][start:], layers) for name, layers in loaded.items())
        return {path: layer for pair in pairs for path, layer in zip(*pair, strict=False)}

    def _compile(self, paths: tuple[str, ...], count: int):
        def _unstack(leaves, start):
            arrays = {}
            for path, leaf in leaves.items():
                if not self._is_stacked(path):
                    leaf = leaf[None]
                elif count < len(leaf):
                    leaf = jax.lax.dynamic_slice_in_dim(leaf, start, count)
                arrays |= self._layers(path, leaf)
            return arrays

        names = (name for path in paths for name in (path, path + SCALE))
        places = {name: [self._places[name]] * count for name in names if name in self._places}
        return jax.jit(_unstack, out_shardings=places)

    def _layers(self, path: str, stack: Array) -> dict[str, list[Array]]:
        """Return the layers of a stack in the intermediate layout, and their scales, by name."""
        if summed := self._summed(path):
            whole, scale = quantise(stack, jnp.int8, tuple(1 + axis for axis in summed))
            stacks = {path: whole, path + SCALE: scale}
        else:
            stacks = {path: stack.astype(param_paths.forward_dtype(path, self._config))}
        constrain = jax.lax.with_sharding_constraint
        return {
            name: [constrain(layer, self._intermediate[name]) for layer in layers]
            for name, layers in stacks.items()
        }


class DecodingWeights:
    """Decoding copies of the trainer's parameters; the frozen ones are copied once."""

    def __init__(
        self,
        config: decoder.DecoderConfig,
        mesh: Mesh,
        trained_on: Mesh,  # of the trainer's parameters
        settings: Sampler,
        frozen: Any = None,  # parameters that never change
    ):
        self._config = config
        self._frozen = frozen or {}
        self._frozen_copy: dict[str, Array] | None = None
        boxed = sharding.flatten(decoder.abstract_params(config))
        kept = sharding.flatten(self._frozen)
        load = functools.partial(Loader, config, trained_on, mesh, settings=settings)
        self.load_frozen = load({path: boxed[path] for path in kept})
        self.load_trained = load({p: leaf for p, leaf in boxed.items() if p not in kept})

    def frozen(self) -> dict[str, Array]:
        """Return the decoding copy of the frozen parameters, made at the first call."""
        if self._frozen_copy is None:
            self._frozen_copy = self.load_frozen(self._frozen)
        return self._frozen_copy

    def share_frozen(self, copy: dict[str, Array]) -> None:
        """Use the decoding copy of other weights that have the same frozen parameters."""
        self._frozen_copy = copy

    def load(self, params: Any) -> Any:
        """Return decoding weights: parameters of the trainer, and the frozen ones.

        Raises ValueError for `DecodingArrays` of other names or shapes.
        """
        load = self.load_trained
        trained = load.place(params) if isinstance(params, DecodingArrays) else load(params)
        return decoder.for_decoding(self.frozen() | trained, self._config)
