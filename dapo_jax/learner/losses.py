"""Ratios, clips, KL and value losses per token, and the weights that make everything a sum.

`loss = sum(loss_weights * token_loss)`. The weights are computed once per optimizer minibatch from
counts over the whole minibatch, on all devices, so the split into microbatches, devices and rows
can't change the loss. A new ratio, KL estimator or aggregate is a function here, an entry in the
dict under its kind, its name in `algorithms.py` and a case in
`tests/learner/test_losses.py`; `policy.py` adds the terms up.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.algorithms import Algorithm
from dapo_jax.learner.advantages import pair_up

LOG_RATIO_LIMIT, KL_LIMIT = 20.0, 10.0


def clamp_log(log_ratio: Array) -> Array:
    """A log-ratio that exp survives."""
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# --- ratios: (log-ratio, 0 where untrained; segments; trained) -> ratio ---------------------


def token_ratio(log_ratio: Float[Array, "R T"], segment_ids: Array, trained: Array) -> Array:
    """p(token) / p_old(token)."""
    return jnp.exp(clamp_log(log_ratio))


def sequence_ratio(
    log_ratio: Float[Array, "R T"], segment_ids: Int[Array, "R T"], trained: Bool[Array, "R T"]
) -> Array:
    """exp(mean log-ratio) of each token's response (GSPO, arXiv 2507.18071, equation 7)."""

    def mean_of_row(values, segments, mask):
        sums = jax.ops.segment_sum(values, segments, len(segments) + 1)
        counts = jax.ops.segment_sum(mask.astype(values.dtype), segments, len(segments) + 1)
        return (sums / jnp.maximum(counts, 1))[segments]

    return jnp.exp(clamp_log(jax.vmap(mean_of_row)(log_ratio, segment_ids, trained)))


def no_ratio(log_ratio: Float[Array, "R T"], segment_ids: Array, trained: Array) -> Array:
    """1, with the gradient of log p: the plain policy gradient."""
    return jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))


RATIOS = {"token": token_ratio, "sequence": sequence_ratio, "none": no_ratio}

# --- KL to the reference: (logprobs, reference logprobs) -> estimate per token ---------------


def k1(logprobs: Array, reference_logprobs: Array) -> Array:
    """log p - log ref: unbiased, of either sign; for rewards: in a loss its gradient has mean 0."""
    return logprobs - reference_logprobs


def k2(logprobs: Array, reference_logprobs: Array) -> Array:
    """(log p - log ref)^2 / 2: in a loss its gradient is that of the KL, on policy."""
    return jnp.square(logprobs - reference_logprobs) / 2


def k3(logprobs: Array, reference_logprobs: Array) -> Array:
    """exp(d) - d - 1 with d = log ref - log p (GRPO, arXiv 2402.03300, equation 4), at most 10."""
    d = clamp_log(reference_logprobs - logprobs)
    return jnp.clip(jnp.expm1(d) - d, -KL_LIMIT, KL_LIMIT)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

# --- policy loss ----------------------------------------------------------------------------


def policy_loss(
    algorithm: Algorithm,
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """Clipped surrogate per token, and which tokens it clipped.

    m = max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, equation 7; the two bounds
    of DAPO, arXiv 2503.14476, equation 8), and for A < 0 min(m, -A c) where a dual clip c is set
    (arXiv 1912.09729, equation 4). Without `clip`, m = -A r.

    >>> old = jnp.log(jnp.array([[0.5, 0.5]]))
    >>> new = jnp.log(jnp.array([[0.6, 0.7]]))  # grown by 1.2 and 1.4, of which 1.28 is kept
    >>> dapo, ones = dapo_jax.preset("dapo"), jnp.ones((1, 2))
    >>> loss, clipped = policy_loss(dapo, new, old, ones, ones, jnp.ones((1, 2), int))
    >>> np.asarray(loss).round(2).tolist(), clipped["clipped_high"].tolist()
    ([[-1.2000000476837158, -1.2799999713897705]], [[0.0, 1.0]])

    Args:
        mask: above 0 where a token is trained; elsewhere loss and gradient are exactly 0.
        segment_ids: the response of a token within its row, for ratios of whole responses.

    Returns:
        the loss and {"clipped_low", "clipped_high", "clipped_dual"}: 1 where that bound cut the
        gradient.
    """
    trained = mask > 0
    # Select before the exp: whatever stands on padding must not reach it (NaN times 0 is NaN).
    log_ratio = jnp.where(trained, logprobs, 0.0) - jnp.where(trained, old_logprobs, 0.0)
    ratio = RATIOS[algorithm.ratio](log_ratio, segment_ids, trained)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    below, above = (algorithm.clip & (ratio < low), algorithm.clip & (ratio > high))
    # Strict comparisons: on a bound (a clip of 0 puts r = 1 there) the gradient is still whole.
    bounded = jnp.where(below, low, jnp.where(above, high, ratio))
    loss = jnp.maximum(-advantages * ratio, -advantages * bounded)
    capped = jnp.zeros_like(below)
    if algorithm.dual_clip:
        cap = -advantages * algorithm.dual_clip
        capped = (advantages < 0) & (loss > cap)
        loss = jnp.where(capped, cap, loss)
    clipped = {
        "clipped_low": (trained & (advantages < 0) & below).astype(jnp.float32),
        "clipped_high": (trained & (advantages > 0) & above).astype(jnp.float32),
        "clipped_dual": (trained & capped).astype(jnp.float32),
    }
    return jnp.where(trained, loss, 0.0), clipped


def importance_weights(
    trainer_logprobs: Array, sampler_logprobs: Array, cap: float
) -> Float[Array, "R T"]:
    """min(p_trainer / p_sampler, cap), not differentiated: truncated importance sampling.

    Corrects tokens that were drawn by a sampler whose arithmetic differs from the trainer's.
    """
    log_ratio = clamp_log(jax.lax.stop_gradient(trainer_logprobs) - sampler_logprobs)
    return jnp.minimum(jnp.exp(log_ratio), cap)


def value_loss(
    values: Float[Array, "R T"],
    old_values: Float[Array, "R T"],
    returns: Float[Array, "R T"],
    clip: float,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """1/2 max((V - R)^2, (V clipped to V_old +- clip - R)^2), and where the clip decided.

    A clip of 0 leaves the first alone. As in PPO's released code (openai/baselines, ppo2).
    """
    error = jnp.square(values - returns)
    if not clip:
        return error / 2, jnp.zeros_like(error)
    # Clipping the difference would round, and so move, also values within the clip.
    limited = jnp.clip(values, old_values - clip, old_values + clip)
    limited_error = jnp.square(limited - returns)
    cut = (limited_error > error).astype(jnp.float32)
    return jnp.maximum(error, limited_error) / 2, cut


# --- loss weights: (trained tokens n and group of each response, budget) -> weight of a token ---


def _responses(tokens: np.ndarray) -> int:
    """Responses with at least one trained token: the others leave every mean."""
    return max(1, int(np.count_nonzero(tokens)))


def token_mean(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / N_tok: every trained token of the minibatch weighs the same (DAPO's released code).

    >>> token_mean(np.array([1, 3]), np.array([0, 0]), 8)  # responses of 1 and 3 tokens
    array([0.25, 0.25])
    """
    return np.full(len(tokens), 1.0 / max(1, tokens.sum()))


def token_mean_per_group(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / N_tok of the group / groups: DAPO's equation 8, an expectation over prompts."""
    _, member = np.unique(groups, return_inverse=True)
    totals = np.bincount(member, tokens)
    return 1.0 / np.maximum(totals, 1)[member] / max(1, np.count_nonzero(totals))


def sequence_mean(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / n_i / B: a mean over tokens, then over responses (GRPO).

    >>> sequence_mean(np.array([1, 4]), np.array([0, 0]), 8)  # the long one's tokens weigh less
    array([0.5  , 0.125])
    """
    return 1.0 / np.maximum(tokens, 1) / _responses(tokens)


def sequence_sum(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / B: a sum over tokens, then a mean over responses (REINFORCE, RLOO)."""
    return np.full(len(tokens), 1.0 / _responses(tokens))


def pair_sum(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / pairs: a sum over tokens, then a mean over pairs of responses (DPO)."""
    return 2 * sequence_sum(tokens, groups, budget)


def token_sum_over_budget(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """1 / L_max / B: as `sequence_sum`, over the response budget (Dr. GRPO, arXiv 2503.20783)."""
    return np.full(len(tokens), 1.0 / budget / _responses(tokens))


LOSS_WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "token_mean": token_mean,
    "token_mean_per_group": token_mean_per_group,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "token_sum_over_budget": token_sum_over_budget,
    "pair_sum": pair_sum,
}

# --- which responses carry loss: (correct, groups, tokens) -> [B] bool ------------------------


def in_pairs(correct: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The responses that `advantages.pair_up` pairs."""
    chosen = np.zeros(len(tokens), bool)
    chosen[pair_up(correct, groups, tokens).ravel()] = True
    return chosen


TRAINED_RESPONSES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "all": lambda correct, groups, tokens: np.ones(len(tokens), bool),
    "correct": lambda correct, groups, tokens: correct,
    "pairs": in_pairs,
}


def response_weights(
    algorithm: Algorithm,
    tokens: Int[np.ndarray, "B"],
    groups: Int[np.ndarray, "B"],
    correct: Bool[np.ndarray, "B"],
    budget: int,
) -> Float[np.ndarray, "B"]:
    """Loss weight of each response's trained tokens, over one optimizer minibatch.

    Args:
        tokens: trained ones; 0 takes a response out of the numerator and of every count.
        groups: a number that responses to one prompt share.
        budget: max_response_tokens.
    """
    chosen = TRAINED_RESPONSES[algorithm.trained_responses](correct, groups, tokens)
    trained = np.where(chosen, tokens, 0)
    return np.where(trained > 0, LOSS_WEIGHTS[algorithm.aggregate](trained, groups, budget), 0.0)
