"""Frozen teacher of a run: its shape, and its parameters on the learner's mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from dapo_jax.config.experiment import Config
from dapo_jax.learner.learners import Model
from dapo_jax.model import load_huggingface
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.layers import SCALE
from dapo_jax.model.param_paths import forward_dtype, scaled_axes
from dapo_jax.model.quantisation import quantise
from dapo_jax.run.build import check_divisible, numerics
from dapo_jax.runtime import sharding
from dapo_jax.types.errors import require

FIELD = "extras.teacher.folder"
READ = functools.partial(load_huggingface.read_config, field=FIELD)


def read_shape(
    config: Config, policy: DecoderConfig, mesh: jax.sharding.Mesh, read: Any = READ
) -> DecoderConfig:
    """Return the shape of the folder. Raises `ConfigError` if it does not fit policy or mesh."""
    settings = config.extras.teacher
    folder = settings.folder
    if not folder:
        return policy
    numbers = numerics(config.compute, mesh, config.rows().row_tokens) | {"remat": "none"}
    if settings.dtype != "auto":
        numbers["dtype"] = jnp.dtype(settings.dtype)
    decoder = read(folder, **numbers)
    allowed = (
        f"a folder of at least the policy's {policy.vocab} tokens, padding included: it has "
        f"{decoder.vocab}, and what it lacks would have no probability"
    )
    require(decoder.vocab >= policy.vocab, FIELD, folder, allowed)
    capped = policy.logit_cap or decoder.logit_cap
    fits = config.algorithm.distillation != "jsd" or capped is None
    allowed = "'reverse' if logits of the policy or the teacher are capped (Gemma 4)"
    require(fits, "algorithm.distillation", config.algorithm.distillation, allowed)
    check_divisible(decoder, mesh)
    return decoder


def abstract_teacher(
    config: Config,
    policy: DecoderConfig,
    mesh: jax.sharding.Mesh,
    read: Callable[..., DecoderConfig] = READ,
) -> Model:
    """Return the shapes, dtypes and shardings of the teacher, with the policy's vocabulary."""
    decoder = read_shape(config, policy, mesh, read)
    decoder = dataclasses.replace(decoder, vocab=policy.vocab)
    boxed = abstract_params(decoder)
    flat: dict[str, jax.ShapeDtypeStruct] = {}
    shardings = sharding.flatten(sharding.tree_shardings(mesh, boxed))
    for path, leaf in sharding.flatten(sharding.unbox(boxed)).items():
        dtype: Any = forward_dtype(path, decoder)
        summed = scaled_axes(path) if path.endswith("/kernel") else ()
        if config.extras.teacher.weights_dtype == "int8" and summed:
            dtype = jnp.int8
            # The first axis of an array is its layers, so axes are counted from the second.
            shape, spec = (
                tuple(size for axis, size in enumerate(sizes) if axis - 1 not in summed)
                for sizes in (leaf.shape, shardings[path].spec)
            )
            scale_sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
            flat[path + SCALE] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=scale_sharding)
        flat[path] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=shardings[path])
    return Model(decoder, unflatten_dict(flat, sep="/"))


def load_teacher(config: Config, policy: DecoderConfig, mesh: jax.sharding.Mesh) -> Model:
    """Return the teacher, sharded like the policy.

    Rows of its vocabulary beyond the policy's are padding and are dropped. Raises `ConfigError`.
    """
    folder = config.extras.teacher.folder
    whole = read_shape(config, policy, mesh)
    params = load_huggingface.load_params(folder, whole, mesh, field=FIELD, cast=True)
    flat = sharding.flatten(params)
    del params
    abstract = abstract_teacher(config, policy, mesh)
    targets = sharding.flatten(abstract.params)
    for path in list(flat):  # one at a time, to free each array that is replaced
        names = [name for name in (path, path + SCALE) if name in targets]
        converted = _convert(path, flat.pop(path), [targets[name] for name in names])
        flat |= zip(names, converted, strict=True)
    return Model(abstract.decoder, unflatten_dict(flat, sep="/"))


def _convert(path: str, leaf: jax.Array, targets: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return the array sliced to the target's shape, or as int8 and its scales."""
    shape = targets[0].shape
    is_int8 = len(targets) > 1
    summed = tuple(1 + axis for axis in scaled_axes(path))

    def convert(array):
        if is_int8:
            return list(quantise(array, jnp.int8, summed))
        return [array[tuple(map(slice, shape))]]

    if leaf.shape == shape and not is_int8:
        return [leaf]
    return jax.jit(convert, out_shardings=[target.sharding for target in targets])(leaf)
