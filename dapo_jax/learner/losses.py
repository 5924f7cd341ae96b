"""Policy, KL and value losses per token, and the loss weights of responses.

`loss = sum(loss_weights * token_loss)`. The weights are computed once per optimizer minibatch, from
counts over the whole minibatch, so microbatches, devices and rows cannot change the loss. To add a
ratio, region, weight, KL estimator or aggregate, write a function here, add it to the dict below
its kind and to the choices in `config/algorithm.py`. `policy.py` adds up the terms.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import rel_entr
from jaxtyping import Array, Bool, Float, Int

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.learner.advantages import pair_up
from dapo_jax.runtime.user_code import choose

LOG_RATIO_LIMIT = 20.0
KL_LIMIT = 10.0
WEIGHT_LIMIT = 0.999 * np.exp(LOG_RATIO_LIMIT)  # just below exp(LOG_RATIO_LIMIT)


def clamp_log(log_ratio: Array) -> Array:
    """Clip a log-ratio so that its exp is finite."""
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# --- ratios: (log-ratio, 0 on untrained tokens; segments; trained) -> log-ratio --------------


def sum_over_responses(
    values: Float[Array, "R T"], segment_ids: Int[Array, "R T"], trained: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """Return, for each token, the sum over the trained tokens of its response."""

    def of_row(values, segments):
        return jax.ops.segment_sum(values, segments, len(segments) + 1)[segments]

    return jax.vmap(of_row)(jnp.where(trained, values, 0.0), segment_ids)


def mean_over_responses(
    values: Float[Array, "R T"], segment_ids: Int[Array, "R T"], trained: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
    """Return, for each token, the mean over its response (GSPO, 2507.18071, equation 7)."""
    counts = sum_over_responses(jnp.ones_like(values), segment_ids, trained)
    return sum_over_responses(values, segment_ids, trained) / jnp.maximum(counts, 1)


def token_log_ratio(log_ratio: Array, segment_ids: Array, trained: Array) -> Array:
    """Return log p(token) - log p_old(token)."""
    return log_ratio


RATIOS = {
    "token": token_log_ratio,
    "sequence": mean_over_responses,
    "product": sum_over_responses,
    "geometric": token_log_ratio,  # policy_loss averages after the region has bounded each token
    # A ratio of 1: the plain policy gradient.
    "none": lambda log_ratio, segment_ids, trained: jnp.zeros_like(log_ratio),
}

# --- trust regions: (algorithm, ratio, p, p_old) -> (is below, is above, bounded ratio) -------


def ratio_region(algorithm: Algorithm, ratio: Array, p: Array, old: Array) -> tuple:
    """Bound the ratio by 1 - low and 1 + high (PPO, 1707.06347; two bounds: DAPO, 2503.14476)."""
    low = 1 - algorithm.clip_low
    high = 1 + algorithm.clip_high
    # Strict comparisons: a ratio equal to a bound keeps its gradient (clip 0 makes 1 a bound).
    return ratio < low, ratio > high, jnp.clip(ratio, low, high)


def log_ratio_region(algorithm: Algorithm, ratio: Array, p: Array, old: Array) -> tuple:
    """Bound the ratio by exp(-low) and exp(high) (GMPO, 2507.20673)."""
    low = np.exp(-algorithm.clip_low)
    high = np.exp(algorithm.clip_high)
    return ratio < low, ratio > high, jnp.clip(ratio, low, high)


def tv_region(algorithm: Algorithm, ratio: Array, p: Array, old: Array) -> tuple:
    """Bound p - p_old, the token's part of the total variation (DPPO, 2602.04879)."""
    return p - old < -algorithm.clip_low, p - old > algorithm.clip_high, ratio


def kl_region(algorithm: Algorithm, ratio: Array, p: Array, old: Array) -> tuple:
    """Bound the KL from (p_old, 1 - p_old) to (p, 1 - p): by low if p fell, else by high (DPPO)."""
    old = jnp.minimum(old, 1.0)  # rounding can exceed 1
    p = jnp.minimum(p, 1.0)
    rest = jnp.maximum(1 - p, jnp.finfo(p.dtype).eps)  # a p that rounds to 1 has a finite KL
    kl = rel_entr(old, p) + rel_entr(1 - old, rest)
    return (p < old) & (kl > algorithm.clip_low), (p > old) & (kl > algorithm.clip_high), ratio


def unbounded(algorithm: Algorithm, ratio: Array, p: Array, old: Array) -> tuple:
    """Apply no bounds."""
    never = jnp.zeros_like(ratio, bool)
    return never, never, ratio


REGIONS = {
    "ratio": ratio_region,
    "log_ratio": log_ratio_region,
    "tv": tv_region,
    "kl": kl_region,
    "none": unbounded,
}

# --- weights of the gradient of log p: (algorithm, ratio, A > 0) -> weight --------------------


def sapo_weight(algorithm: Algorithm, ratio: Array, positive: Array) -> Array:
    """Return d/d(log p) of (4 / t) sigmoid(t (ratio - 1)) (SAPO, 2511.20347); 1 at ratio 1."""
    t = jnp.where(positive, algorithm.decay_positive, algorithm.decay_negative)
    return 4 * jax.nn.sigmoid(t * (ratio - 1)) * jax.nn.sigmoid(t * (1 - ratio)) * ratio


def gamma_weight(algorithm: Algorithm, ratio: Array, positive: Array) -> Array:
    """Return ratio^k exp(d (1 - ratio)) with power k, decay d (VESPO, 2602.10693); 1 at ratio 1."""
    k = jnp.where(positive, algorithm.power_positive, algorithm.power_negative)
    d = jnp.where(positive, algorithm.decay_positive, algorithm.decay_negative)
    return jnp.exp(k * jnp.log(jnp.maximum(ratio, 1e-30)) + d * (1 - ratio))


WEIGHTS = {
    "ratio": lambda algorithm, ratio, positive: ratio,  # the gradient of A * ratio
    "sapo": sapo_weight,
    "gamma": gamma_weight,
    # 2503.14286
    "topr": lambda algorithm, ratio, positive: jnp.where(positive, 1.0, jnp.minimum(ratio, 1.0)),
}

# --- KL to another policy: (logprobs, reference logprobs) -> estimate per token ---------------


def k1(logprobs: Array, reference_logprobs: Array) -> Array:
    """Return log p - log ref: unbiased; use it in rewards, as a loss its gradient has mean 0."""
    return logprobs - reference_logprobs


def k2(logprobs: Array, reference_logprobs: Array) -> Array:
    """Return (log p - log ref)^2 / 2: as a loss it has the gradient of the KL, if on policy."""
    return jnp.square(logprobs - reference_logprobs) / 2


def k3(logprobs: Array, reference_logprobs: Array) -> Array:
    """Return exp(d) - d - 1, d = log ref - log p, at most 10 (GRPO, arXiv 2402.03300, eq. 4)."""
    d = clamp_log(reference_logprobs - logprobs)
    return jnp.clip(jnp.expm1(d) - d, -KL_LIMIT, KL_LIMIT)


def k3_with_gradient_of_k2(logprobs: Array, reference_logprobs: Array) -> Array:
    """Return the value of k3 with the gradient of k2."""
    gradient = k2(logprobs, reference_logprobs)
    value = k3(logprobs, reference_logprobs)
    return gradient + jax.lax.stop_gradient(value - gradient)


def distance(logprobs: Array, reference_logprobs: Array) -> Array:
    """Return |log p - log ref|; its gradient is the sign (KL-Cov, 2505.22617, listing 1)."""
    d = logprobs - reference_logprobs
    return d * jax.lax.stop_gradient(jnp.sign(d))  # the gradient of jnp.abs is 1 at 0


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_with_gradient_of_k2, "abs": distance}


def estimate_kl(algorithm: Algorithm, logprobs: Array, reference_logprobs: Array) -> Array:
    """Return the KL per token by the estimator of the algorithm."""
    estimator = choose(KL_ESTIMATORS, "algorithm.kl_estimator", algorithm.kl_estimator)
    return estimator(logprobs, reference_logprobs)


def future_weights(
    algorithm: Algorithm,
    log_ratio: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
) -> Float[Array, "R T"]:
    """Return FIPO's factors of advantages (2603.19835): exp of the discounted log-ratios to come.

    clip(exp(sum over k >= t of gamma^(k - t) (log p_k - log p_old,k)), 1 - clip, 1 + clip), with
    the sum over the tokens of the response from t on; the log-ratios are 0 on untrained tokens.
    """
    same = segment_ids[:, :-1] == segment_ids[:, 1:]
    discounts = jnp.pad(algorithm.future_kl_discount * same, ((0, 0), (0, 1)))

    def add(later: tuple, earlier: tuple) -> tuple:
        (factor, total), (own_factor, own) = later, earlier
        return factor * own_factor, own + own_factor * total

    pairs = discounts.astype(log_ratio.dtype), log_ratio
    _, sums = jax.lax.associative_scan(add, pairs, reverse=True, axis=1)
    clip = algorithm.future_kl_clip
    return jnp.clip(jnp.exp(clamp_log(sums)), 1 - clip, 1 + clip)


def policy_loss(
    algorithm: Algorithm,
    logprobs: Float[Array, "R T"],
    old_logprobs: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    mask: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
) -> tuple[Float[Array, "R T"], dict[str, Float[Array, "R T"]]]:
    """Return the loss per token; its gradient is -A * weight(ratio) * grad(log p) in the region.

    Outside the region the loss is constant, with the ratio at the region's bound. For PPO's region
    this is max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347, equation 7; two bounds:
    DAPO, arXiv 2503.14476, equation 8). For A < 0 a dual clip c bounds the ratio by c (arXiv
    1912.09729, equation 4).

    >>> old = jnp.log(jnp.array([[0.5, 0.5]]))
    >>> new = jnp.log(jnp.array([[0.6, 0.7]]))  # ratios 1.2 and 1.4; the second is clipped to 1.28
    >>> dapo, ones = dapo_jax.preset("dapo"), jnp.ones((1, 2))
    >>> loss, info = policy_loss(dapo, new, old, ones, ones, jnp.ones((1, 2), int))
    >>> np.asarray(loss).round(2).tolist(), info["clipped_high"].tolist()
    ([[-1.2000000476837158, -1.2799999713897705]], [[0.0, 1.0]])

    Args:
        mask: positive on trained tokens; on all others loss and gradient are exactly 0.
        segment_ids: number of the response within its row, for ratios of whole responses.

    Returns:
        the loss, and a dict with "ratio" (before any bound) and "clipped_low", "clipped_high",
        "clipped_dual" (1 on tokens whose gradient that bound removed).
    """
    trained = mask > 0
    # Mask before exp: padding may hold NaN, and NaN * 0 is NaN.
    logprobs = jnp.where(trained, logprobs, 0.0)
    old_logprobs = jnp.where(trained, old_logprobs, 0.0)
    fixed = jax.lax.stop_gradient(logprobs)
    pool = choose(RATIOS, "algorithm.ratio", algorithm.ratio)
    log_ratio = pool(fixed - old_logprobs, segment_ids, trained)
    ratio = jnp.exp(clamp_log(log_ratio))
    region = choose(REGIONS, "algorithm.region", algorithm.region)
    below, above, bounded = region(algorithm, ratio, jnp.exp(fixed), jnp.exp(old_logprobs))
    if algorithm.region_sides == "sign":
        below &= advantages < 0
        above &= advantages > 0
    bounded = jnp.where(below | above, bounded, ratio)
    capped = jnp.zeros_like(below)
    if algorithm.dual_clip:
        capped = (advantages < 0) & (bounded > algorithm.dual_clip)
        bounded = jnp.where(capped, algorithm.dual_clip, bounded)
    if algorithm.ratio == "geometric":
        bounded = jnp.exp(mean_over_responses(jnp.log(bounded), segment_ids, trained))
    bounded = jnp.clip(bounded, algorithm.weight_low, algorithm.weight_high or None)
    weigh = choose(WEIGHTS, "algorithm.weight", algorithm.weight)
    weight = weigh(algorithm, bounded, advantages > 0)
    inside = ~(below | above | capped) & (weight < WEIGHT_LIMIT) & (weight > 1 / WEIGHT_LIMIT)
    # Its value is 1 and its gradient that of log p.
    differentiable = jnp.where(inside, jnp.exp(logprobs - fixed), 1.0)
    loss = jnp.where(trained, -advantages * weight * differentiable, 0.0)
    clipped = {"clipped_low": below, "clipped_high": above, "clipped_dual": capped}
    clipped = {name: (trained & cut).astype(jnp.float32) for name, cut in clipped.items()}
    return loss, clipped | {"ratio": ratio}


# --- corrections for tokens that a policy other than the trained one sampled --------------------
# An importance weight multiplies a token's loss, a rejection sets it to 0. Rejected tokens stay in
# the counts of the loss weights, so a batch with many of them moves the policy less.


def any_in_response(
    flags: Bool[Array, "R T"], segment_ids: Int[Array, "R T"], trained: Bool[Array, "R T"]
) -> Bool[Array, "R T"]:
    """Return True on all tokens of a response if one of its trained tokens is flagged."""
    return sum_over_responses(flags.astype(jnp.float32), segment_ids, trained) > 0


def importance_weights(
    algorithm: Algorithm,
    old_logprobs: Float[Array, "R T"],
    sampler_logprobs: Float[Array, "R T"],
    segment_ids: Int[Array, "R T"],
    trained: Bool[Array, "R T"],
) -> Float[Array, "R T"]:
    """Return p_old / p_sampler, between floor and cap (truncated, Ionides, 2008).

    The ratio is that of the token, or the product or geometric mean over its response. The weight
    has no gradient.
    """
    ratio = RATIOS[algorithm.importance_ratio]
    log_ratio = ratio(old_logprobs - sampler_logprobs, segment_ids, trained)
    weights = jnp.exp(clamp_log(log_ratio))
    return jnp.clip(weights, algorithm.importance_floor, algorithm.importance_cap)


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
    pool = RATIOS.get(algorithm.rejection, token_log_ratio)  # "worst" bounds the ratio of a token
    ratio = jnp.exp(clamp_log(pool(log_ratios, segment_ids, trained)))
    below = ratio < algorithm.rejection_low
    above = ratio > (algorithm.rejection_high or jnp.inf)
    if algorithm.rejection == "worst":
        below = any_in_response(below, segment_ids, trained)
        above = any_in_response(above, segment_ids, trained)
    return below & rejectable, above & rejectable & ~below


def choose_by_covariance(
    algorithm: Algorithm,
    logprobs: Float[np.ndarray, "*M R T"],
    advantages: Float[np.ndarray, "*M R T"],
    places: Int[np.ndarray, "n"],  # of the minibatch's trained tokens in the flat arrays
    random: np.random.Generator,
) -> Bool[np.ndarray, "*M R T"]:
    """Choose the tokens of Clip-Cov or KL-Cov (2505.22617, section 4).

    A token's covariance is (log p - mean) (A - mean). 'kl' chooses the largest ones, 'clip' chooses
    at random between the bounds: the fraction of the tokens, rounded down, at least one.
    """
    pairs = np.stack([np.float64(array.ravel()[places]) for array in (logprobs, advantages)])
    covariances = np.prod(pairs - pairs.mean(axis=1, keepdims=True), axis=0)
    candidates = np.argsort(-covariances, kind="stable")
    if algorithm.covariance == "clip":
        low, high = algorithm.covariance_low, algorithm.covariance_high
        candidates = random.permutation(np.flatnonzero((low < covariances) & (covariances < high)))
    count = max(1, int(algorithm.covariance_fraction * len(places)))
    chosen = np.zeros(advantages.size, bool)
    chosen[places[candidates[:count]]] = True
    return chosen.reshape(advantages.shape)


def drop_low_entropies(
    algorithm: Algorithm, places: Int[np.ndarray, "n"], entropies: Float[np.ndarray, "*M R T"]
) -> Int[np.ndarray, "k"]:
    """Return the places of all but the tokens of highest entropy (2506.01939, equation 5).

    `top_entropy_fraction` of the tokens, rounded up, stay. The others have no gradient, but stay in
    the counts of the loss weights.
    """
    kept = math.ceil(algorithm.top_entropy_fraction * len(places))
    return places[np.argsort(-entropies.ravel()[places], kind="stable")[kept:]]


def drop_far_tokens(
    algorithm: Algorithm,
    places: Int[np.ndarray, "n"],
    log_ratios: Float[np.ndarray, "*M R T"],  # of the policy before the step to the sampler
    advantages: Float[np.ndarray, "*M R T"],
) -> Int[np.ndarray, "k"]:
    """Return the places of the tokens that M2PO masks (2510.01161, algorithm 1).

    Only the tokens that PPO's clip can cut may be masked: A > 0 and ratio > 1, or A < 0 and
    ratio < 1. Those of largest squared log-ratio are, until the mean of the others is at most
    `second_moment_limit`.
    """
    pushed = places[log_ratios.ravel()[places] * advantages.ravel()[places] > 0]
    squares = np.square(np.float64(log_ratios.ravel()[pushed]))
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, 1 + len(pushed))
    return pushed[order[means > algorithm.second_moment_limit]]


def value_loss(
    values: Float[Array, "R T"],
    old_values: Float[Array, "R T"],
    returns: Float[Array, "R T"],
    clip: float,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Return 1/2 max((V - R)^2, (V clipped to V_old +- clip - R)^2) and a mask of clipped tokens.

    A clip of 0 disables clipping. As in PPO's released code (openai/baselines, ppo2).
    """
    error = jnp.square(values - returns)
    if not clip:
        return error / 2, jnp.zeros_like(error)
    # Clip V, not V - V_old: the difference would round values inside the clip as well.
    limited = jnp.clip(values, old_values - clip, old_values + clip)
    limited_error = jnp.square(limited - returns)
    cut = (limited_error > error).astype(jnp.float32)
    return jnp.maximum(error, limited_error) / 2, cut


# --- loss weights: (trained tokens n_i and group of each response, budget) -> weight per token ---


def _count_trained(tokens: np.ndarray) -> int:
    """Count the responses with a trained token, at least 1; the others are in no mean."""
    return max(1, int(np.count_nonzero(tokens)))


def token_mean_per_group(tokens: np.ndarray, groups: np.ndarray, budget: int) -> np.ndarray:
    """Return 1 / N_tok of the group / groups: DAPO's equation 8, an expectation over prompts."""
    _, member = np.unique(groups, return_inverse=True)
    totals = np.bincount(member, tokens)
    return 1.0 / np.maximum(totals, 1)[member] / _count_trained(totals)


LOSS_WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray | float]] = {
    # A mean over the trained tokens of the minibatch (DAPO's released code).
    "token_mean": lambda tokens, groups, budget: 1.0 / max(1, tokens.sum()),
    "token_mean_per_group": token_mean_per_group,
    # A mean over tokens, then over responses (GRPO).
    "sequence_mean": lambda tokens, groups, budget: (
        1.0 / np.maximum(tokens, 1) / _count_trained(tokens)
    ),
    # A sum over tokens, then a mean over responses (REINFORCE, RLOO).
    "sequence_sum": lambda tokens, groups, budget: 1.0 / _count_trained(tokens),
    # The same over the response budget L_max (Dr. GRPO, 2503.20783).
    "token_sum_over_budget": lambda tokens, groups, budget: 1.0 / budget / _count_trained(tokens),
    # A sum over tokens, then a mean over pairs of responses (DPO).
    "pair_sum": lambda tokens, groups, budget: 2.0 / _count_trained(tokens),
}

# --- trained responses: (correct, groups, tokens) -> [B] bool ---------------------------------


def in_pairs(correct: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Select the responses that `advantages.pair_up` pairs."""
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
    tokens: Int[np.ndarray, "B"],  # number of trained tokens
    groups: Int[np.ndarray, "B"],  # number of the prompt
    correct: Bool[np.ndarray, "B"],
    budget: int,  # max_response_tokens
) -> Float[np.ndarray, "B"]:
    """Return the loss weight of the trained tokens of each response of an optimizer minibatch.

    A response without trained tokens is in no sum and no count.
    """
    chosen = TRAINED_RESPONSES[algorithm.trained_responses](correct, groups, tokens)
    trained = np.where(chosen, tokens, 0)
    weigh = choose(LOSS_WEIGHTS, "algorithm.aggregate", algorithm.aggregate)
    return np.where(trained > 0, weigh(trained, groups, budget), 0.0)
