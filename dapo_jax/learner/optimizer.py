"""AdamW as an optax chain, and the learning rate of a rollout step."""

import math
from typing import Any

import jax
import optax

from dapo_jax.config.experiment import Optimizer
from dapo_jax.model.layers import ADAPTER_NAMES

MATRICES = ("kernel", "embedding", "head", "score", *ADAPTER_NAMES)


def _is_matrix(params: Any) -> Any:
    """Return a mask of the matrices: norms and biases are not decayed."""

    def is_matrix(path: tuple, _: Any) -> bool:
        return any(getattr(part, "key", None) in MATRICES for part in path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(settings: Optimizer) -> optax.GradientTransformation:
    """Return AdamW without the learning rate: clipping by global norm, Adam, weight decay.

    The caller multiplies by -lr, because the schedule counts rollout steps, not optimizer steps.
    """
    return optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        optax.scale_by_adam(settings.beta1, settings.beta2, settings.eps),
        optax.add_decayed_weights(settings.weight_decay, mask=_is_matrix),
    )


# Schedule after the warm-up: completed fraction of the steps -> fraction of the peak.
SCHEDULES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """Return the learning rate of `step` (from 0): a linear warm-up, then the schedule.

    No step has rate 0: the first has peak / warmup_steps, and a decay reaches 0 after the last.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return settings.learning_rate * SCHEDULES[settings.schedule](done)
