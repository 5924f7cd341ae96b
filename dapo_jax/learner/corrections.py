"""Corrections for tokens that a policy other than the trained one sampled.

An importance weight multiplies a token's loss, a rejection sets it to 0. Rejected tokens stay in
the counts of the loss weights, so a batch with many of them moves the policy less.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.learner.losses import clamp_log, mean_over_responses, sum_over_responses


def any_in_response(
    flags: Bool[Array, "R T"], segment_ids: Int[Array, "R T"], trained: Bool[Array, "R T"]
) -> Bool[Array, "R T"]:
    """Return True on all tokens of a response if one of its trained tokens is flagged."""
    return sum_over_responses(flags.astype(jnp.float32), segment_ids, trained) > 0


POOLS = {  # log-ratio per token -> the log-ratio that is bounded
    "token": lambda log_ratio, segment_ids, trained: log_ratio,
    "product": sum_over_responses,
    "sequence": mean_over_responses,
    "worst": lambda log_ratio, segment_ids, trained: (
        log_ratio
    ),  # a token out of bounds rejects its response
}


def importance_weights(
    algorithm: Algorithm,
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    trained: Bool[Array, "R T"],
) -> Float[Array, "R T"]:
    """Return min(p_old / p_sampler, cap): truncated importance sampling (Ionides, 2008).

    The ratio is that of the token, or the product or geometric mean over its response. The weight
    has no gradient.
    """
    log_ratio = POOLS[algorithm.importance_ratio](
        old_logprobs - sampler_logprobs, segment_ids, trained
    )
    return jnp.minimum(jnp.exp(clamp_log(log_ratio)), algorithm.importance_cap)


def rejections(
    algorithm: Algorithm,
    log_ratios: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    trained: Bool[Array, "R T"],
    rejectable: Bool[Array, "R T"],  # trained tokens that may be rejected
) -> tuple[Bool[Array, "R T"], Bool[Array, "R T"]]:
    """Return masks of tokens with a ratio to the sampler below and above the bounds.

    IcePop (2510.18855) and masked importance sampling bound the ratio of a token. OPSM (2512.02556)
    rejects responses of negative advantage that have become unlikely under the trained policy.
    """
    ratio = jnp.exp(clamp_log(POOLS[algorithm.rejection](log_ratios, segment_ids, trained)))
    below = ratio < algorithm.rejection_low
    above = ratio > (algorithm.rejection_high or jnp.inf)
    if algorithm.rejection == "worst":
        below = any_in_response(below, segment_ids, trained)
        above = any_in_response(above, segment_ids, trained)
    return below & rejectable, above & rejectable & ~below
