"""AdamW as an optax chain, and the learning rate of a rollout step."""

from typing import Any

import jax
import optax

from dapo_jax.config import Optimizer


def _is_matrix(params: Any) -> Any:
    """True for matrices; norms and biases are not decayed."""

    def is_matrix(path: tuple, _: Any) -> bool:
        return any(getattr(part, "key", None) in ("kernel", "embedding", "head") for part in path)

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


def learning_rate(settings: Optimizer, step: int) -> float:
    """Linear warm-up over `warmup_steps` rollout steps, then constant; the first is above 0."""
    if settings.warmup_steps == 0:
        return settings.learning_rate
    return settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
