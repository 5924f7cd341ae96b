"""Advantage estimators: functions from the rewards of a rollout batch to a value per token.

An estimator receives the WHOLE rollout batch (`Feedback`) and returns advantages aligned with the
tokens, 0 outside the responses. All arithmetic is on the host in float64; `estimate` rounds once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.runtime.user_code import choose
from dapo_jax.types.errors import require
from dapo_jax.types.structs import ROUNDING, present

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8

# --- baselines: (rewards, groups) -> [B] ------------------------------------------------------


def group_means(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the size of the group of each response."""
    _, member = np.unique(groups, return_inverse=True)
    size = np.bincount(member)
    return (np.bincount(member, values) / size)[member], size[member]


def centre_in_groups(rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> np.ndarray:
    """Return R - group mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return rewards - group_means(rewards, groups)[0]


def normalise_in_groups(
    rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]
) -> np.ndarray:
    """Return (R - mean) / (std + 1e-6) of each group, std with ddof = 1.

    GRPO, arXiv 2402.03300, section 4.1.2; ddof and epsilon as in DAPO's released code.

    >>> normalise_in_groups(np.array([1.0, -1, -1, -1]), np.array([7, 7, 7, 7]))
    array([ 1.4999985, -0.4999995, -0.4999995, -0.4999995])
    """
    centred = centre_in_groups(rewards, groups)
    mean_square, size = group_means(centred**2, groups)
    return centred / (np.sqrt(mean_square * size / np.maximum(size - 1, 1)) + STD_EPSILON)


def leave_one_out(rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> np.ndarray:
    """Return R - mean of the group's other rewards (RLOO, arXiv 2402.14740, section 2.2).

    >>> leave_one_out(np.array([1.0, 0, 0]), np.array([7, 7, 7]))
    array([ 1. , -0.5, -0.5])
    """
    mean, size = group_means(rewards, groups)
    return rewards - (mean * size - rewards) / np.maximum(size - 1, 1)


def batch_centre(rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> np.ndarray:
    """Return R - mean over the rollout batch: REINFORCE with a constant baseline."""
    return rewards - rewards.mean()


def best_minus_second(
    rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]
) -> Float[np.ndarray, "B"]:
    """Return best - second best reward for the best response, else 0 (arXiv 2503.19595).

    This is the gradient of the expected maximum over the group.
    """
    gains = np.zeros(len(rewards))
    for group in np.unique(groups):
        member = np.flatnonzero(groups == group)
        order = member[np.argsort(rewards[member], kind="stable")]
        if len(order) > 1:
            gains[order[-1]] = rewards[order[-1]] - rewards[order[-2]]
    return gains


# --- scales of a centred advantage: (advantages, rewards, groups) -> [B] ----------------------


def over_batch_std(advantages: np.ndarray, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return A / (std + 1e-6) of the batch's rewards, ddof = 1 (Lite PPO, arXiv 2508.08221)."""
    return advantages / (rewards.std(ddof=min(1, len(rewards) - 1)) + STD_EPSILON)


def over_mean(advantages: np.ndarray, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return A / group mean, 0 for a mean of at most 1e-6 (MaxRL, arXiv 2602.02710)."""
    mean = group_means(rewards, groups)[0]
    above = mean > STD_EPSILON  # a mean of 0 may be rounded to slightly above
    return np.where(above, advantages / np.where(above, mean, 1.0), 0.0)


def over_informative(advantages: np.ndarray, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Divide advantages by the share of groups with unequal rewards (GPG, 2504.02546)."""
    members = [rewards[groups == group] for group in np.unique(groups)]
    informative = sum(np.ptp(own) > ROUNDING * np.abs(own).max() for own in members)
    return advantages * len(members) / max(1, informative)


SCALES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "none": lambda advantages, rewards, groups: advantages,
    "batch": over_batch_std,
    "mean": over_mean,
    "informative": over_informative,
}


# --- the input of estimators ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Feedback:
    """Rewards, masks and values of a rollout batch: everything an advantage estimator reads.

    `rewards` and `token_rewards` include the KL penalty if the algorithm puts it in the reward. The
    reward of a response is on its last token. Outside responses `token_rewards` is 0 and `values`
    is undefined.
    """

    response_index: Int[np.ndarray, "*M R T"]  # below 0 outside responses
    groups: Int[np.ndarray, "B"]
    correct: Bool[np.ndarray, "B"]
    trained: Bool[np.ndarray, "*M R T"]  # tokens that can have a loss
    rewards: Float[np.ndarray, "B"]
    token_rewards: Float[np.ndarray, "*M R T"]
    values: Float[np.ndarray, "*M R T"] | None = None
    reward_parts: Float[np.ndarray, "K B"] | None = None  # weighted, without the KL penalty
    part_weights: Float[np.ndarray, "K"] | None = None
    reference_log_ratios: Float[np.ndarray, "B"] | None = None  # old - reference, by response
    teacher_log_ratios: Float[np.ndarray, "*M R T"] | None = None  # teacher - old
    energies: Float[np.ndarray, "*M R T"] | None = None  # by `logprobs.energies_of`
    sampler_log_ratios: Float[np.ndarray, "*M R T"] | None = None  # old - sampler

    @property
    def on_response(self) -> Bool[np.ndarray, "*M R T"]:
        return self.response_index >= 0

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        """Number of tokens of each response."""
        return np.bincount(self.response_index[self.on_response], minlength=len(self.groups))

    @property
    def tokens(self) -> Int[np.ndarray, "B"]:
        """Number of trained tokens of each response."""
        return np.bincount(self.response_index[self.trained], minlength=len(self.groups))

    @functools.cached_property
    def places(self) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """Response of each sampled token, in the order of the rows, and its number there from 0."""
        index = self.response_index[self.on_response]
        order, numbers = np.argsort(index, kind="stable"), np.empty_like(index)
        numbers[order] = np.arange(len(index)) - np.searchsorted(index[order], index[order])
        return index, numbers

    def by_response(self, values: Float[np.ndarray, "*M R T"]) -> Float[np.ndarray, "B N"]:
        """Return a row for the sampled tokens of each response, past observations, then zeros."""
        rows = np.zeros((len(self.groups), self.lengths.max(initial=1)))
        rows[self.places] = values[self.on_response]
        return rows

    def at_tokens(self, rows: Float[np.ndarray, "B N"]) -> Float[np.ndarray, "*M R T"]:
        """Return the values of such rows at the tokens; 0 outside responses."""
        placed = np.zeros(self.response_index.shape)
        placed[self.on_response] = rows[self.places]
        return placed


class Estimates(NamedTuple):
    """Advantages of a rollout batch, and the targets of its critic (never whitened)."""

    advantages: Float[np.ndarray, "*M R T"]
    returns: Float[np.ndarray, "*M R T"] | None = None


def _sum_over_responses(values: np.ndarray, index: np.ndarray, responses: int) -> np.ndarray:
    on = index >= 0
    return np.bincount(index[on], np.float64(values[on]), responses)


def gather_feedback(
    response_index: Int[np.ndarray, "*M R T"],
    earned: Float[np.ndarray, "B"],  # rewards before the penalties
    *,
    earned_by_tokens: Float[np.ndarray, "*M R T"] | None = None,
    penalties: Float[np.ndarray, "*M R T"] | None = None,
    log_ratios: Float[np.ndarray, "*M R T"] | None = None,
    trained: Bool[np.ndarray, "*M R T"] | None = None,
    **others: np.ndarray | None,
) -> Feedback:
    """Make a `Feedback` from rewards per response and penalties per token.

    `earned_by_tokens` is the part of `earned` assigned to tokens; the last token gets the rest.
    Values outside the responses are ignored. `others` are the remaining fields of `Feedback`.
    """
    on = response_index >= 0
    rewards = earned
    token_rewards = np.zeros(response_index.shape)
    if penalties is not None:
        token_rewards[on] = -np.float64(penalties[on])
        rewards = earned - _sum_over_responses(penalties, response_index, len(earned))
    if log_ratios is not None:
        sums = _sum_over_responses(log_ratios, response_index, len(earned))
        others["reference_log_ratios"] = sums
    fields: dict[str, Any] = {"trained": on if trained is None else trained, **others}
    feedback = Feedback(response_index, rewards=rewards, token_rewards=token_rewards, **fields)
    rest = earned
    if earned_by_tokens is not None:
        token_rewards[on] += earned_by_tokens[on]
        rest = earned - _sum_over_responses(earned_by_tokens, response_index, len(earned))
    index, number = feedback.places
    token_rewards[on] += np.where(number == feedback.lengths[index] - 1, rest[index], 0.0)
    return feedback


def broadcast_to_tokens(
    per_response: Float[np.ndarray, "B"], response_index: Int[np.ndarray, "*M R T"]
) -> Float[np.ndarray, "*M R T"]:
    """Give each token the value of its response; 0 outside responses (index -1)."""
    return np.append(per_response, 0.0)[np.maximum(response_index, -1)]  # -1 reads the last entry


# --- estimators with one value per response ---------------------------------------------------


def _per_response(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> "Estimator":
    return lambda algorithm, feedback: function(feedback.rewards, feedback.groups)


def length_weighted_centre(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return R - sum(n R) / sum(n) over the group, n tokens per response (OPO, 2505.23585)."""
    weighted, _ = group_means(feedback.lengths * feedback.rewards, feedback.groups)
    length, _ = group_means(feedback.lengths, feedback.groups)
    return feedback.rewards - weighted / np.maximum(length, STD_EPSILON)


def reward_parts(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return the weighted sum of the z-scores of the reward parts, whitened over responses.

    GDPO, arXiv 2601.05242, equations 4 to 6.
    """
    parts = present(feedback.reward_parts, "reward_parts")
    weights = np.abs(present(feedback.part_weights, "part_weights"))  # the parts have the sign
    scores = [normalise_in_groups(part, feedback.groups) for part in parts]
    total = np.sum(weights[:, None] * np.array(scores), axis=0)
    return (total - total.mean()) / (total.std(ddof=min(1, len(total) - 1)) + STD_EPSILON)


def pass_at_k(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return the analytic advantages of pass@k training (arXiv 2508.10751, eqs. 14 and 15).

    A set of k = `pass_k` of the group's G responses is correct if one of them is. The fraction of
    correct sets is m = 1 - C(wrong, k) / C(G, k). With s = sqrt(m (1 - m)) a correct response has
    the advantage (1 - m) / s, an incorrect one (1 - m - C(wrong - 1, k - 1) / C(G - 1, k - 1)) / s;
    0 if s = 0.
    """
    correct, k = feedback.correct, algorithm.pass_k
    wrong_share, size = group_means(1.0 - correct, feedback.groups)
    wrong = np.rint(wrong_share * size)

    def none_correct(wrong: np.ndarray, size: np.ndarray, k: int) -> np.ndarray:
        """Return C(wrong, k) / C(size, k) without computing a factorial."""
        factors = [np.maximum(wrong - i, 0) / np.maximum(size - i, 1) for i in range(k)]
        return np.prod(factors, axis=0)

    m = 1 - none_correct(wrong, size, k)
    std = np.sqrt(m * (1 - m))
    correct_sets_of_wrong = none_correct(wrong - 1, size - 1, k - 1)
    gain = np.where(correct, 1 - m, 1 - m - correct_sets_of_wrong)
    return np.where(std > 0, gain / np.maximum(std, STD_EPSILON), 0.0)


# --- estimators with one value per token ------------------------------------------------------


def discounted_sums(
    rows: Float[np.ndarray, "B N"], discounts: Float[np.ndarray, "B"] | float
) -> Float[np.ndarray, "B N"]:
    """Return s[t] = v[t] + d s[t + 1] for each response."""
    sums = np.array(rows)
    for t in range(sums.shape[1] - 2, -1, -1):
        sums[:, t] += discounts * sums[:, t + 1]
    return sums


def _returns(algorithm: Algorithm, feedback: Feedback) -> Float[np.ndarray, "B N"]:
    return discounted_sums(feedback.by_response(feedback.token_rewards), algorithm.gamma)


def reward_to_go(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return the discounted sum of the rewards from each token on (REINFORCE++, 2501.03262)."""
    return feedback.at_tokens(_returns(algorithm, feedback))


def token_baseline(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return each token's return minus its optimal token baseline (arXiv 2602.07078).

    The baseline of the t-th tokens of a group is sum(G W) / sum(W) over the responses that have
    one: G is the token's return, W the sum of the energies 1 - 2 p + sum p^2 of the response's
    first t tokens (the formula in verl's docs/algo/otb.md). As in the authors' code there, the
    baseline is 0 where only one response is left.
    """
    returns = _returns(algorithm, feedback)
    weights = np.cumsum(feedback.by_response(present(feedback.energies, "energies")), axis=1)
    exists = np.arange(returns.shape[1]) < feedback.lengths[:, None]
    _, member = np.unique(feedback.groups, return_inverse=True)

    def total(rows: np.ndarray) -> np.ndarray:
        sums = np.zeros(rows.shape)
        np.add.at(sums, member, np.where(exists, rows, 0.0))
        return sums[member]

    baselines = total(returns * weights) / np.maximum(total(weights), STD_EPSILON)
    return feedback.at_tokens(returns - np.where(total(exists) > 1, baselines, 0.0))


def generalised_advantages(
    algorithm: Algorithm, feedback: Feedback, lambdas: Float[np.ndarray, "B"] | float
) -> np.ndarray:
    """Return GAE (1506.02438, equation 16); the value after the last token of a response is 0."""
    rewards = feedback.by_response(feedback.token_rewards)
    values = feedback.by_response(present(feedback.values, "values"))
    following = np.pad(values[:, 1:], ((0, 0), (0, 1)))
    errors = rewards + algorithm.gamma * following - values
    return feedback.at_tokens(discounted_sums(errors, algorithm.gamma * lambdas))


def gae(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return GAE with `lambda_policy`."""
    return generalised_advantages(algorithm, feedback, algorithm.lambda_policy)


def length_adaptive_gae(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return GAE with lambda = max(0, 1 - 1 / (alpha n)) for n tokens (VAPO, 2504.05118)."""
    lengths = np.maximum(feedback.lengths, 1)
    lambdas = np.maximum(0.0, 1 - 1 / (algorithm.lambda_alpha * lengths))
    return generalised_advantages(algorithm, feedback, lambdas)


def pair_up(correct: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Pair the i-th correct with the i-th incorrect response of each group: [pairs, 2] indices.

    Responses without a trained token are in no pair.
    """
    pairs = []
    for group in np.unique(groups):
        member = (groups == group) & (tokens > 0)
        chosen = np.flatnonzero(member & correct)
        rejected = np.flatnonzero(member & ~correct)
        pairs += list(zip(chosen, rejected, strict=False))
    return np.array(pairs, int).reshape(-1, 2)


def preference_margins(feedback: Feedback) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of responses and their margins: log p - log ref of chosen minus rejected."""
    pairs = pair_up(feedback.correct, feedback.groups, feedback.tokens)
    ratios = present(feedback.reference_log_ratios, "reference_log_ratios")
    chosen, rejected = ratios[pairs].T
    return pairs, chosen - rejected


def preference(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return +-beta sigmoid(-beta margin), minus the gradient of DPO's loss (2305.18290, eq. 7)."""
    pairs, margins = preference_margins(feedback)
    beta = algorithm.preference_beta
    pull = beta * np.exp(-np.logaddexp(0.0, beta * margins))
    coefficients = np.zeros(len(feedback.rewards))
    coefficients[pairs] = pull[:, None] * np.array([1.0, -1.0])
    return coefficients


def real(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Return minus the gradient of REAL's loss (2602.05630) by the log-ratios s of responses.

    The loss of a group is log(1 + sum over correct of exp(-s / t)) + log(1 + sum over wrong of
    exp(s / t)), with temperature t and s the mean over tokens of log p - log p_sampler. Times the
    size of the group, since the aggregate averages over responses, and the paper over groups.
    """
    index, t, responses = feedback.response_index, algorithm.real_temperature, len(feedback.rewards)
    ratios = np.where(feedback.trained, present(feedback.sampler_log_ratios, "log-ratios"), 0.0)
    means = _sum_over_responses(ratios, index, responses) / np.maximum(feedback.tokens, 1)
    signs = np.where(feedback.correct, 1.0, -1.0)
    logits, coefficients = -signs * means / t, np.zeros(responses)
    for group in np.unique(feedback.groups):
        for sign in (1.0, -1.0):
            member = (feedback.groups == group) & (signs == sign) & (feedback.tokens > 0)
            total = np.logaddexp.reduce([0.0, *logits[member]])
            size = np.count_nonzero(feedback.groups == group)
            coefficients[member] = sign * size / t * np.exp(logits[member] - total)
    return coefficients


Estimator = Callable[[Algorithm, Feedback], np.ndarray]  # -> [B] or [*M R T]

ESTIMATORS: dict[str, Estimator] = {
    "group_zscore": _per_response(normalise_in_groups),
    "group_centre": _per_response(centre_in_groups),
    "leave_one_out": _per_response(leave_one_out),
    "length_weighted_centre": length_weighted_centre,
    "token_baseline": token_baseline,
    "reward_parts": reward_parts,
    "pass_at_k": pass_at_k,
    "best_minus_second": _per_response(best_minus_second),
    "real": real,
    "batch_centre": _per_response(batch_centre),
    "reward": _per_response(lambda rewards, groups: rewards),
    "reward_to_go": reward_to_go,
    "gae": gae,
    "length_adaptive_gae": length_adaptive_gae,
    # Imitation of the trained responses.
    "one": _per_response(lambda rewards, groups: np.ones(len(rewards))),
    "preference": preference,
    # Rewards are not used, only a teacher.
    "zero": _per_response(lambda rewards, groups: np.zeros(len(rewards))),
}


def whiten(values: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return (x - mean) / sqrt(var + 1e-8) over the trained tokens, var with ddof = 1; else 0.

    Tokens without loss must not shift and scale the advantages of the others.
    """
    chosen = values[trained]
    if chosen.size < 2:
        return np.zeros_like(values)
    scale = 1 / np.sqrt(chosen.var(ddof=1) + WHITEN_EPSILON)
    return np.where(trained, (values - chosen.mean()) * scale, 0.0)


def teach(algorithm: Algorithm, advantages: np.ndarray, feedback: Feedback) -> np.ndarray:
    """Return the advantages A with a teacher's say on each token, d = log p_teacher - log p_old.

    'reverse': A + c d, because E[d grad log p] is minus the gradient of KL(p || p_teacher).
    'evidence': A ((1 - c) + c clip(exp(sign(A) d), 1 - clip, 1 + clip)) (RLSD, 2604.03128).
    """
    share, clip = algorithm.distillation_coefficient, algorithm.distillation_clip
    gaps = np.float64(present(feedback.teacher_log_ratios, "teacher_log_ratios"))
    if algorithm.distillation == "reverse":
        return advantages + share * gaps
    # Clipped before exp, so that no ratio overflows.
    evidence = np.exp(np.clip(np.sign(advantages) * gaps, np.log1p(-clip), np.log1p(clip)))
    return advantages * ((1 - share) + share * evidence)


def estimate_exactly(algorithm: Algorithm, feedback: Feedback) -> Float[np.ndarray, "*M R T"]:
    """Return the advantages by the estimator alone, scaled, in float64; 0 outside responses."""
    field, name, index = "algorithm.advantage", algorithm.advantage, feedback.response_index
    advantages = np.asarray(choose(ESTIMATORS, field, name)(algorithm, feedback))
    allowed = f"a function that returns {index.shape} or {feedback.groups.shape} numbers"
    fits = advantages.shape in (index.shape, feedback.groups.shape)
    require(fits, field, name, f"{allowed}, not {advantages.shape}")
    if advantages.ndim == 1:
        scale = SCALES[algorithm.advantage_scale]
        scaled = scale(advantages, feedback.rewards, feedback.groups)
        advantages = broadcast_to_tokens(scaled, index)
    return np.where(feedback.on_response, advantages, 0.0)


def estimate(algorithm: Algorithm, feedback: Feedback) -> Estimates:
    """Compute the advantages of a rollout batch, and the targets of its critic."""
    advantages = estimate_exactly(algorithm, feedback)
    if algorithm.whiten:
        advantages = whiten(advantages, feedback.trained)
    if feedback.teacher_log_ratios is not None:
        advantages = np.where(feedback.trained, teach(algorithm, advantages, feedback), advantages)
    if feedback.values is None:
        return Estimates(advantages.astype(np.float32))
    gains = generalised_advantages(algorithm, feedback, algorithm.lambda_value)
    returns = np.where(feedback.on_response, gains + feedback.values, 0.0)
    return Estimates(advantages.astype(np.float32), returns.astype(np.float32))
