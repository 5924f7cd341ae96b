"""Traces of responses through an update: advantages, ratios and clips, for people to look at."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.algorithms import Algorithm
from dapo_jax.learner.batches import TrainBatch
from dapo_jax.learner.losses import policy_loss
from dapo_jax.learner.packing import take_tokens
from dapo_jax.runtime.sharding import to_host
from dapo_jax.structs import Trace, present

LOW, HIGH, DUAL = 1, 2, 3  # the bound that cut a token's gradient; 0: none


def trace_ratios(
    algorithm: Algorithm, batch: TrainBatch, logprobs: Float[Array, "M R T"]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """([n] ratios, [n] bounds that cut) by the index of the response; empty off this minibatch.

    Args:
        logprobs: of the policy that the update differentiated, from its own forward pass.
    """
    old, rollouts = present(batch.scored.old_logprobs, "old_logprobs"), batch.scored.rollouts
    arrays = logprobs, old, batch.advantages, batch.loss_weights, rollouts.segment_ids
    new, old, gains, weights, segments = (
        jnp.asarray(one).reshape(-1, logprobs.shape[-1]) for one in to_host(arrays)
    )
    _, seen = policy_loss(algorithm, new, old, gains, weights, segments)
    bounds = LOW * seen["clipped_low"] + HIGH * seen["clipped_high"]
    bounds = jnp.where(seen["clipped_dual"] > 0, DUAL, bounds)
    index, arrays = np.asarray(rollouts.response_index), (seen["ratio"], bounds)
    return list(zip(*(take_tokens(np.asarray(x), index) for x in arrays), strict=True))


def trace_responses(
    advantages: Float[np.ndarray, "*U M R T"],
    response_index: np.ndarray,
    ratios: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> list[Trace]:
    """A trace of each response, by its index.

    Args:
        ratios: of the minibatch that was looked at, as `trace_ratios` gives them.
    """
    taken = take_tokens(advantages, response_index)
    means = [float(one.mean()) if one.size else 0.0 for one in taken]
    seen = {i: pair for i, pair in enumerate(ratios) if len(pair[0])}
    return [Trace(mean, *seen.get(i, ())) for i, mean in enumerate(means)]
