"""Importance ratios, the clipped policy loss, and the loss weights that make everything a sum.

`loss = sum(loss_weights * token_loss)`. The weights are computed once per optimizer minibatch from
its own global counts, so microbatches, devices, packing and masks can't change the loss.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.algorithms import Algorithm

LOG_RATIO_LIMIT = 20.0

# --- ratios: (logprobs, old_logprobs) -> ratio ----------------------------------------------


def token_ratio(logprobs: Float[Array, "R T"], old_logprobs: Float[Array, "R T"]) -> Array:
    """p(token) / p_old(token); the log-ratio is clamped to +-20 before exp."""
    return jnp.exp(jnp.clip(logprobs - old_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def no_ratio(logprobs: Float[Array, "R T"], old_logprobs: Float[Array, "R T"]) -> Array:
    """1, with the gradient of log p: the plain policy gradient."""
    return jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))


RATIOS = {"token": token_ratio, "none": no_ratio}

# --- policy loss ----------------------------------------------------------------------------


def policy_loss(
    algorithm: Algorithm,
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    mask: Float[Array, "R T"],
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """Clipped surrogate per token, and which tokens it clipped.

    m = max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, equation 7; the two bounds
    of DAPO, arXiv 2503.14476, equation 8), and for A < 0 min(m, -A c) where a dual clip c is set
    (arXiv 1912.09729, equation 4).

    Args:
        mask: above 0 where a token is trained; elsewhere loss and gradient are exactly 0.

    Returns:
        the loss and {"clipped_low", "clipped_high"}: 1 where that side cut the gradient.
    """
    trained = mask > 0
    # Select before the exp: whatever stands on padding must not reach it (NaN times 0 is NaN).
    logprobs = jnp.where(trained, logprobs, 0.0)
    old_logprobs = jnp.where(trained, old_logprobs, 0.0)
    ratio = RATIOS[algorithm.ratio](logprobs, old_logprobs)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    # Strict comparisons: on a bound (a clip of 0 puts r = 1 there) the gradient is still whole.
    bounded = jnp.where(ratio < low, low, jnp.where(ratio > high, high, ratio))
    loss = jnp.maximum(-advantages * ratio, -advantages * bounded)
    if algorithm.dual_clip:
        capped = jnp.minimum(loss, -advantages * algorithm.dual_clip)
        loss = jnp.where(advantages < 0, capped, loss)
    clipped = {
        "clipped_low": (trained & (advantages < 0) & (ratio < low)).astype(jnp.float32),
        "clipped_high": (trained & (advantages > 0) & (ratio > high)).astype(jnp.float32),
    }
    return jnp.where(trained, loss, 0.0), clipped


# --- loss weights: (trained tokens n and group of each response, budget) -> weight of a token ---


def _responses(tokens: np.ndarray) -> int:
    """Responses with at least one trained token: the others leave every mean."""
    return max(1, int(np.count_nonzero(tokens)))


def token_mean(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / N_tok: every trained token of the minibatch weighs the same (DAPO's released code)."""
    return np.full(len(tokens), 1.0 / max(1, tokens.sum()))


def token_mean_per_group(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / N_tok of the group / groups: DAPO's equation 8, an expectation over prompts."""
    _, member = np.unique(groups, return_inverse=True)
    totals = np.bincount(member, tokens)
    return 1.0 / np.maximum(totals, 1)[member] / max(1, np.count_nonzero(totals))


def sequence_mean(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / n_i / B: a mean over tokens, then over responses (GRPO)."""
    return 1.0 / np.maximum(tokens, 1) / _responses(tokens)


def sequence_sum(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / B: a sum over tokens, then a mean over responses (REINFORCE, RLOO)."""
    return np.full(len(tokens), 1.0 / _responses(tokens))


def token_sum_over_budget(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / L_max / B: as `sequence_sum`, over the response budget (Dr. GRPO, arXiv 2503.20783)."""
    return np.full(len(tokens), 1.0 / budget / _responses(tokens))


LOSS_WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "token_mean": token_mean,
    "token_mean_per_group": token_mean_per_group,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "token_sum_over_budget": token_sum_over_budget,
}


def response_weights(
    algorithm: Algorithm,
    tokens: np.ndarray,
    groups: np.ndarray,
    truncated: np.ndarray,
    budget: int,
) -> np.ndarray:
    """Loss weight of each response's tokens, [B] float64, over one optimizer minibatch.

    Overlong filtering takes truncated responses out of the numerator and of every count.

    Args:
        tokens: [B] response tokens.
        groups: [B] a number that responses to one prompt share.
        truncated: [B] bool.
        budget: max_response_tokens.
    """
    trained = np.where(truncated & algorithm.overlong_filtering, 0, tokens)
    return np.where(trained > 0, LOSS_WEIGHTS[algorithm.aggregate](trained, groups, budget), 0.0)
