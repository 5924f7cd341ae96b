"""Reports of a step's updates: means, quantiles of the ratios, traces of each response."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.learner.advantages import Feedback, preference_margins
from dapo_jax.learner.batches import NOT_SCORED, Mean, TrainBatch
from dapo_jax.learner.losses import policy_loss
from dapo_jax.learner.packing import take_tokens
from dapo_jax.runtime.nonfinite import is_reason
from dapo_jax.runtime.sharding import to_host
from dapo_jax.types.structs import Trace, mean_or_zero, present

MIN_VARIANCE = 1e-12
RATIO_HISTOGRAM = "ratio_histogram"
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
_SIZES = np.geomspace(1e-4, 20.0, 80)  # log-ratios in steps of 16 %
EDGES = np.concatenate([-_SIZES[::-1], _SIZES])
# Bounds that removed the gradient of a token; 0: none.
LOW = 1
HIGH = 2
DUAL = 3


def histogram(ratio: Float[Array, "R T"], trained: Float[Array, "R T"]) -> Mean:
    """Count the log-ratios of trained tokens between the edges: [len(EDGES) + 1]."""
    place = jnp.searchsorted(jnp.asarray(EDGES, ratio.dtype), jnp.log(ratio).ravel())
    counts = jax.ops.segment_sum(trained.ravel(), place, len(EDGES) + 1)
    return Mean(counts, trained.sum())


def quantiles(counts: np.ndarray) -> dict[str, float]:
    """Return the quantiles of the ratios by name, accurate to a bin; 1 if there is no token."""
    if not counts.sum():
        return dict.fromkeys(QUANTILES, 1.0)
    # The outermost bins have one edge, which stands for their middle.
    middles = np.concatenate([EDGES[:1], (EDGES[1:] + EDGES[:-1]) / 2, EDGES[-1:]])
    reached = np.cumsum(counts) / counts.sum()
    places = {name: np.searchsorted(reached, share) for name, share in QUANTILES.items()}
    return {name: float(np.exp(middles[place])) for name, place in places.items()}


def trace_ratios(
    algorithm: Algorithm, batch: TrainBatch, logprobs: Float[Array, "M R T"]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ([n] ratios, [n] bounds) of each response; empty for those of other minibatches."""
    rollouts = batch.scored.rollouts
    old = present(batch.scored.old_logprobs, "old_logprobs")
    old = jnp.where(old == NOT_SCORED, logprobs, old)
    arrays = (logprobs, old, batch.advantages, batch.loss_weights, rollouts.segment_ids)
    rows = [jnp.asarray(array).reshape(-1, logprobs.shape[-1]) for array in to_host(arrays)]
    _, info = policy_loss(algorithm, *rows)
    bounds = LOW * info["clipped_low"] + HIGH * info["clipped_high"]
    bounds = jnp.where(info["clipped_dual"] > 0, DUAL, bounds)
    index = np.asarray(rollouts.response_index)
    ratios = take_tokens(np.asarray(info["ratio"]), index)
    return list(zip(ratios, take_tokens(np.asarray(bounds), index), strict=True))


def trace_responses(
    advantages: Float[np.ndarray, "*U M R T"],
    response_index: np.ndarray,
    ratios: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> list[Trace]:
    """Return the trace of each response, ordered by index."""
    per_response = take_tokens(advantages, response_index)
    means = [float(values.mean()) if values.size else 0.0 for values in per_response]
    traced = {i: pair for i, pair in enumerate(ratios) if len(pair[0])}
    return [Trace(mean, *traced.get(i, ())) for i, mean in enumerate(means)]


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
