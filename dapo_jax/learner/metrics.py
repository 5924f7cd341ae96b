"""Metrics of the updates of a step, and of what they learn from. docs/metrics.md explains them."""

import numpy as np

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.learner.advantages import Feedback, preference_margins
from dapo_jax.learner.batches import Mean
from dapo_jax.runtime.nonfinite import is_reason
from dapo_jax.types.structs import mean_or_zero, present

MIN_VARIANCE = 1e-12


def feedback_metrics(
    algorithm: Algorithm, feedback: Feedback, advantages: np.ndarray, returns: np.ndarray | None
) -> dict[str, float]:
    """Return the spread of advantages; also metrics of a critic and of preference pairs.

    Args:
        advantages, returns: of each token, [*M, R, T]; returns are None without a critic.
    """
    trained = feedback.trained
    values = {"advantage_std": float(advantages[trained].std()) if trained.any() else 0.0}
    if returns is not None and trained.any():
        old_values = present(feedback.values, "values")[trained]
        variance = float(returns[trained].var())
        unexplained = float((returns[trained] - old_values).var())
        # Equal returns have no variance to explain.
        explained = 1 - unexplained / variance if variance > MIN_VARIANCE else 0.0
        values["explained_variance"] = explained
    if feedback.reference_log_ratios is not None and algorithm.trained_responses == "pairs":
        _, margins = preference_margins(feedback)
        values |= preference_metrics(margins, algorithm.preference_beta)
    return values


def preference_metrics(margins: np.ndarray, beta: float) -> dict[str, float]:
    """Return DPO's mean loss and the accuracy of pairs by their margins; 0 counts half."""
    return {
        "preference_loss": mean_or_zero(np.logaddexp(0.0, -beta * margins)),
        "preference_accuracy": mean_or_zero((np.sign(margins) + 1) / 2),
    }


def add_up(updates: list[dict[str, Mean]]) -> dict[str, float]:
    """Return the means of a step over its updates; a reason to skip an update only if above 0."""
    means = {}
    for name in updates[0] if updates else ():
        mean = sum((update[name] for update in updates[1:]), updates[0][name]).value()
        if mean or not is_reason(name):
            means[name] = mean
    return means
