"""Frozen teacher of a run: its shape, and its parameters on the learner's mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from dapo_jax.config.experiment import Config
from dapo_jax.learner.update import Model
from dapo_jax.model import load_huggingface
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.param_paths import forward_dtype
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
    decoder = dataclasses.replace(read_shape(config, policy, mesh, read), vocab=policy.vocab)
    boxed = abstract_params(decoder)
    shardings = sharding.flatten(sharding.tree_shardings(mesh, boxed))
    flat = {
        path: jax.ShapeDtypeStruct(
            leaf.shape, forward_dtype(path, decoder), sharding=shardings[path]
        )
        for path, leaf in sharding.flatten(sharding.unbox(boxed)).items()
    }
    return Model(decoder, unflatten_dict(flat, sep="/"))


def load_teacher(config: Config, policy: DecoderConfig, mesh: jax.sharding.Mesh) -> Model:
    """Return the teacher, sharded like the policy.

    Rows of its vocabulary beyond the policy's are padding and are dropped. Raises `ConfigError`.
    """
    folder, whole = config.extras.teacher.folder, read_shape(config, policy, mesh)
    flat = sharding.flatten(
        load_huggingface.load_params(folder, whole, mesh, field=FIELD, cast=True)
    )
    abstract = abstract_teacher(config, policy, mesh)
    for path, target in sharding.flatten(abstract.params).items():
        if flat[path].shape != target.shape:

            def cut(array: jax.Array, shape: tuple[int, ...] = target.shape) -> jax.Array:
                return array[tuple(map(slice, shape))]

            flat[path] = jax.jit(cut, out_shardings=target.sharding)(flat.pop(path))
    return Model(abstract.decoder, unflatten_dict(flat, sep="/"))
