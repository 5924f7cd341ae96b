"""AdamW as an optax chain, and the learning rate of a rollout step."""

import math
from typing import Any

import jax
import optax

from dapo_jax.config.experiment import Optimizer
from dapo_jax.model.layers import ADAPTER_NAMES

MATRICES = ("kernel", "embedding", "head", "score", *ADAPTER_NAMES)


def _is_matrix(params: Any) -> Any:
    """True for matrices; norms and biases are not decayed."""

    def is_matrix(path: tuple, _: Any) -> bool:
        return any(getattr(part, "key", None) in MATRICES for part in path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(settings: Optimizer) -> optax.GradientTransformation:
    """Global-norm clipping, Adam's direction, decoupled weight decay. The caller applies -lr.

    The learning rate stays outside because its schedule counts rollout steps, while the chain is
    called once per optimizer step.
    """
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps),
        optax.add_decayed_weights(settings.weight_decay, mask=_is_matrix),
    )


# What follows the warm-up: share of the remaining steps that is behind -> share of the peak.
SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (from 0): a linear warm-up, then the schedule.

    No step is wasted at rate 0: the first has peak / warmup_steps, and a schedule that falls to 0
    would reach it one step after the last.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return settings.learning_rate * SCHEDULES[settings.schedule](done)
