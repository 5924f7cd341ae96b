"""Muon for the matrices of layers, scaled so that AdamW's settings hold (arXiv 2502.16982)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from dapo_jax.config.experiment import Optimizer
from dapo_jax.model.param_paths import stacked_axes, summed_axes
from dapo_jax.runtime import sharding
from dapo_jax.runtime.nonfinite import path_name

MOMENTUM = 0.95
UPDATE_RMS = 0.2  # root mean square of an update, as AdamW's usually is
# Newton-Schulz iterations alone: without momentum, a new state each time costs nothing.
NEWTON_SCHULZ = optax.contrib.scale_by_muon(
    beta=0.0,
    nesterov=False,
    weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1),
)


def takes_muon(settings: Optimizer, path: str) -> bool:
    """Return True if Muon trains the parameter: a matrix of layers, not embeddings or the head."""
    return settings.name == "muon" and path.endswith("/kernel")


def moments(settings: Optimizer, path: str) -> int:
    """Return the number of moments of a parameter."""
    return 1 if takes_muon(settings, path) else 2


def with_muon(
    settings: Optimizer, adam: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return `adam` for vectors, embeddings and the head, and Muon for the matrices of layers."""

    def label(path: tuple, _: Any) -> str:
        return "muon" if takes_muon(settings, path_name(path)) else "adamw"

    def is_leaf(node: Any) -> bool:  # an array that may be boxed with its axis names
        return not isinstance(node, dict)

    labels = functools.partial(jax.tree_util.tree_map_with_path, label, is_leaf=is_leaf)

    def orthogonalise_all(updates: Any, _: Any) -> Any:
        return jax.tree_util.tree_map_with_path(_orthogonalise, updates)

    muon = optax.chain(optax.trace(MOMENTUM, nesterov=True), optax.stateless(orthogonalise_all))
    return optax.partition({"muon": muon, "adamw": adam}, labels)


def _newton_schulz(matrices: Float[Array, "n rows columns"]) -> Float[Array, "n rows columns"]:
    updates, _ = NEWTON_SCHULZ.update(matrices, NEWTON_SCHULZ.init(matrices))
    return jnp.asarray(updates)


def _orthogonalise(path: tuple, momentum: Array) -> Array:
    """Return the momentum of a parameter with each matrix of its stack made orthogonal.

    The devices of a replica exchange parts of matrices for whole ones and back. Left alone, the
    compiler would gather whole stacks on each device.
    """
    axes, shape = stacked_axes(path_name(path)), momentum.shape
    inputs = axes + summed_axes(path_name(path))
    rows, columns = math.prod(shape[axes:inputs]), math.prod(shape[inputs:])
    stack = momentum.reshape(*(shape[:axes] or (1,)), rows, columns)
    experts = ["experts"] * (axes - 1)
    name = "expert_matrices" if experts else "matrices"
    pad = [(0, -len(stack) % sharding.active_pieces(0, name)), *[(0, 0)] * (stack.ndim - 1)]
    # An all-to-all exchanges one axis for another, so tensor and the other axes take turns.
    free: list[Any] = [PartitionSpec.UNCONSTRAINED] * 2
    stack = sharding.constrain(jnp.pad(stack, pad), "mlp", *experts, *free)
    stack = sharding.constrain(stack, name, *experts, None, None)
    orthogonalise = jax.vmap(_newton_schulz) if experts else _newton_schulz
    stack = UPDATE_RMS * math.sqrt(max(rows, columns)) * orthogonalise(stack)
    stack = sharding.constrain(stack, name, *experts, None, None)
    stack = sharding.constrain(stack, "mlp", *experts, *free)
    return stack[: len(stack) - pad[0][1]].reshape(shape)
