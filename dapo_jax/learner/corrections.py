"""Corrections for tokens drawn by a policy other than the one that learns.

Two ratios to the sampler's probability: an importance weight multiplies a token's coefficient, a
rejection takes it out. Rejected tokens stay in the counts of the loss weights, so that a batch
with many of them moves the policy less. Every microbatch holds whole responses and is seen once,
so nothing here is computed twice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.algorithms import Algorithm
from dapo_jax.learner.losses import clamp_log, mean_over_responses, sum_over_responses


def any_in_response(
    found: Bool[Array, "R T"], segment_ids: Int[Array, "R T"], trained: Bool[Array, "R T"]
) -> Bool[Array, "R T"]:
    """True on every token of a response with such a trained token."""
    return sum_over_responses(found.astype(jnp.float32), segment_ids, trained) > 0


POOLS = {  # log-ratios of tokens -> of what is bounded
    "token": lambda log_ratio, segment_ids, trained: log_ratio,
    "product": sum_over_responses,
    "sequence": mean_over_responses,
    "worst": lambda log_ratio, segment_ids, trained: log_ratio,  # one outside takes out all
}


def importance_weights(
    algorithm: Algorithm,
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    trained: Bool[Array, "R T"],
) -> Float[Array, "R T"]:
    """min(p_old / p_sampler, cap), constant: truncated importance sampling (Ionides, 2008).

    The ratio is the token's, or the product or geometric mean over its response.
    """
    log_ratio = POOLS[algorithm.importance_ratio](
        old_logprobs - sampler_logprobs, segment_ids, trained
    )
    return jnp.minimum(jnp.exp(clamp_log(log_ratio)), algorithm.importance_cap)


def rejections(
    algorithm: Algorithm,
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    trained: Bool[Array, "R T"],
) -> tuple[Bool[Array, "R T"], Bool[Array, "R T"]]:
    """Tokens whose ratio to the sampler is below, and above, its bounds.

    IcePop (2510.18855) and masked importance sampling bound the token's; OPSM (2512.02556) drops
    responses of negative advantage that the policy as it is trained has left behind.
    """
    learner = jax.lax.stop_gradient(logprobs) if algorithm.rejection_of == "new" else old_logprobs
    pool = POOLS[algorithm.rejection]
    ratio = jnp.exp(clamp_log(pool(learner - sampler_logprobs, segment_ids, trained)))
    below = ratio < algorithm.rejection_low
    above = ratio > (algorithm.rejection_high or jnp.inf)
    if algorithm.rejection == "worst":
        below, above = (any_in_response(one, segment_ids, trained) for one in (below, above))
    counted = trained & (advantages < 0) if algorithm.rejection_sign == "negative" else trained
    return below & counted, above & counted & ~below
