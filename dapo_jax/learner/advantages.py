"""Advantage estimators: from the rewards of a rollout batch to a value per token.

An estimator sees the WHOLE rollout batch (`Feedback`) and returns advantages aligned with the
tokens, 0 off the responses. Host arithmetic in float64, rounded once by `estimate`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from dapo_jax.algorithms import Algorithm
from dapo_jax.learner.baselines import (
    SCALES,
    STD_EPSILON,
    batch_centre,
    best_minus_second,
    centre_by_length,
    centre_in_groups,
    leave_one_out,
    normalise_in_groups,
    pass_at_k_advantages,
)
from dapo_jax.structs import present

WHITEN_EPSILON = 1e-8


@dataclasses.dataclass(frozen=True)
class Feedback:
    """Rewards, masks and values of a rollout batch: everything an advantage estimator reads.

    Off the responses `token_rewards` are 0; `values` may be anything there.

    `rewards` and `token_rewards` hold the KL penalty where the algorithm puts it in the reward;
    the reward of a response stands on its last token.
    """

    response_index: Int[np.ndarray, "*M R T"]  # -1 off the responses
    groups: Int[np.ndarray, "B"]
    correct: Bool[np.ndarray, "B"]
    trained: Bool[np.ndarray, "*M R T"]  # tokens that may carry loss: not filtered, not weighed 0
    rewards: Float[np.ndarray, "B"]
    token_rewards: Float[np.ndarray, "*M R T"]
    values: Float[np.ndarray, "*M R T"] | None = None
    reward_parts: Float[np.ndarray, "K B"] | None = None  # weighted, without the KL penalty
    part_weights: Float[np.ndarray, "K"] | None = None
    reference_log_ratios: Float[np.ndarray, "B"] | None = None  # sum over a response, old - ref
    teacher_log_ratios: Float[np.ndarray, "*M R T"] | None = None  # teacher - old, as values are

    @property
    def on_response(self) -> Bool[np.ndarray, "*M R T"]:
        return self.response_index >= 0

    @property
    def lengths(self) -> Int[np.ndarray, "B"]:
        """All tokens of each response."""
        return np.bincount(self.response_index[self.on_response], minlength=len(self.groups))

    @property
    def tokens(self) -> Int[np.ndarray, "B"]:
        """Trained ones of each response."""
        return np.bincount(self.response_index[self.trained], minlength=len(self.groups))

    @functools.cached_property
    def _next_places(self) -> Int[np.ndarray, "*M R T"]:
        """Place of the first token of any response at or after each; T where none is left."""
        on, length = self.on_response, self.response_index.shape[-1]
        places = np.where(on, np.arange(length), length)
        return np.minimum.accumulate(places[..., ::-1], axis=-1)[..., ::-1]

    @functools.cached_property
    def continues(self) -> Bool[np.ndarray, "*M R T"]:
        """Mask of tokens with a later one of their response in the row, and of what is observed
        between the two."""
        index, length = self.response_index, self.response_index.shape[-1]
        padded = np.concatenate([index, np.full_like(index[..., :1], -1)], axis=-1)
        places = np.where(self.on_response, np.arange(length), -1)
        before = np.maximum.accumulate(places, axis=-1)  # -1 reads the padding
        after = np.full_like(before, length)
        after[..., :-1] = self._next_places[..., 1:]
        left, right = (np.take_along_axis(padded, at, axis=-1) for at in (before, after))
        return (left >= 0) & (left == right)

    def following(self, values: Float[np.ndarray, "*M R T"]) -> Float[np.ndarray, "*M R T"]:
        """Value of the next token of the same response, observations skipped; 0 after the last."""
        places = np.zeros_like(self._next_places)
        places[..., :-1] = np.minimum(self._next_places[..., 1:], places.shape[-1] - 1)
        return np.where(self.continues, np.take_along_axis(values, places, axis=-1), 0.0)

    def discounted_sums(
        self, values: Float[np.ndarray, "*M R T"], discounts: Float[np.ndarray, "*M R T"] | float
    ) -> Float[np.ndarray, "*M R T"]:
        """`discounted_sums` over the tokens of responses; observations take no discount."""
        values = np.where(self.on_response, values, 0.0)
        discounts = np.where(self.on_response, discounts, 1.0)
        return np.where(self.on_response, discounted_sums(values, discounts, self.continues), 0.0)


def _sum_over_responses(values: np.ndarray, index: np.ndarray, responses: int) -> np.ndarray:
    on = index >= 0
    return np.bincount(index[on], np.float64(values[on]), responses)


def gather_feedback(
    response_index: Int[np.ndarray, "*M R T"],
    earned: Float[np.ndarray, "B"],
    *,
    earned_by_tokens: Float[np.ndarray, "*M R T"] | None = None,
    penalties: Float[np.ndarray, "*M R T"] | None = None,
    log_ratios: Float[np.ndarray, "*M R T"] | None = None,
    trained: Bool[np.ndarray, "*M R T"] | None = None,
    **known: np.ndarray | None,
) -> Feedback:
    """Feedback from what responses earned and what each of their tokens cost.

    Args:
        earned: rewards before the penalties.
        earned_by_tokens: the share of `earned` that single tokens have; the last has the rest.
        penalties: what stands off the responses is ignored, here as in `log_ratios`.
        log_ratios: old minus reference log-probs.
        trained: None means every token of the responses.
        known: the remaining fields of `Feedback`.
    """
    on, rewards, token_rewards = response_index >= 0, earned, np.zeros(response_index.shape)
    if penalties is not None:
        token_rewards[on] = -np.float64(penalties[on])
        rewards = earned - _sum_over_responses(penalties, response_index, len(earned))
    if log_ratios is not None:
        sums = _sum_over_responses(log_ratios, response_index, len(earned))
        known["reference_log_ratios"] = sums
    fields: dict[str, Any] = {"trained": on if trained is None else trained, **known}
    feedback = Feedback(response_index, rewards=rewards, token_rewards=token_rewards, **fields)
    last, rest = on & ~feedback.continues, earned
    if earned_by_tokens is not None:
        token_rewards[on] += earned_by_tokens[on]
        rest = earned - _sum_over_responses(earned_by_tokens, response_index, len(earned))
    token_rewards[last] += rest[response_index[last]]
    return feedback


def broadcast_to_tokens(
    per_response: Float[np.ndarray, "B"], response_index: Int[np.ndarray, "*M R T"]
) -> Float[np.ndarray, "*M R T"]:
    """The value of each token's response; 0 off the responses (index -1)."""
    return np.append(per_response, 0.0)[response_index]  # index -1 reads the last entry


# --- one value per response ------------------------------------------------------------------


def _of_responses(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> "Estimator":
    def estimator(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
        advantages = function(feedback.rewards, feedback.groups)
        scale = SCALES[algorithm.advantage_scale]
        scaled = scale(advantages, feedback.rewards, feedback.groups)
        return broadcast_to_tokens(scaled, feedback.response_index)

    return estimator


def length_weighted_centre(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """`centre_by_length`, by all tokens of a response."""

    def centre(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        return centre_by_length(rewards, groups, feedback.lengths)

    return _of_responses(centre)(algorithm, feedback)


def reward_parts(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Sum of weight * z-score in its group over the reward's parts, whitened over responses.

    GDPO, arXiv 2601.05242, equations 4 to 6.
    """
    parts = present(feedback.reward_parts, "reward_parts")
    weights = np.abs(present(feedback.part_weights, "part_weights"))  # their sign is in the parts
    scores = [normalise_in_groups(part, feedback.groups) for part in parts]
    total = np.sum(weights[:, None] * np.array(scores), axis=0)
    whitened = (total - total.mean()) / (total.std(ddof=min(1, len(total) - 1)) + STD_EPSILON)
    return broadcast_to_tokens(whitened, feedback.response_index)


def pass_at_k(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """`pass_at_k_advantages` of `pass_k` responses."""
    gains = pass_at_k_advantages(feedback.correct, feedback.groups, algorithm.pass_k)
    return broadcast_to_tokens(gains, feedback.response_index)


# --- one value per token ---------------------------------------------------------------------


def discounted_sums(
    values: Float[np.ndarray, "*M R T"],
    discounts: Float[np.ndarray, "*M R T"] | float,
    continues: Bool[np.ndarray, "*M R T"],
) -> Float[np.ndarray, "*M R T"]:
    """s[t] = v[t] + d[t] * s[t + 1] within a response: a reverse scan that resets between them."""
    factors = np.where(continues, discounts, 0.0)
    sums = np.array(values, np.float64)
    for t in range(sums.shape[-1] - 2, -1, -1):
        sums[..., t] += factors[..., t] * sums[..., t + 1]
    return sums


def reward_to_go(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Discounted sum of the token rewards from here on (REINFORCE++, arXiv 2501.03262)."""
    return feedback.discounted_sums(feedback.token_rewards, algorithm.gamma)


def generalised_advantages(
    algorithm: Algorithm, feedback: Feedback, lambdas: np.ndarray | float
) -> np.ndarray:
    """GAE (arXiv 1506.02438, equation 16); the value after the last token of a response is 0."""
    values, gamma = present(feedback.values, "values"), algorithm.gamma
    values = np.where(feedback.on_response, values, 0.0)
    errors = feedback.token_rewards + gamma * feedback.following(values) - values
    return feedback.discounted_sums(errors, gamma * np.asarray(lambdas))


def gae(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """GAE with `lambda_policy`."""
    return generalised_advantages(algorithm, feedback, algorithm.lambda_policy)


def length_adaptive_gae(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """GAE with lambda = max(0, 1 - 1 / (alpha n)), n the response's tokens (VAPO, 2504.05118)."""
    index = feedback.response_index
    length = np.maximum(_sum_over_responses(np.ones(index.shape), index, len(feedback.rewards)), 1)
    lambdas = np.maximum(0.0, 1 - 1 / (algorithm.lambda_alpha * length))
    return generalised_advantages(algorithm, feedback, broadcast_to_tokens(lambdas, index))


# --- imitation and preference ----------------------------------------------------------------


def one(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Coefficient 1: imitation of the trained responses."""
    return np.where(feedback.on_response, 1.0, 0.0)


def zero(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """Coefficient 0: no estimate from rewards, beside a teacher's."""
    return np.zeros(feedback.response_index.shape)


def pair_up(correct: np.ndarray, groups: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[pairs, 2] response numbers: each group's i-th right with its i-th wrong response.

    Responses without a trained token are in no pair, and none is in two.
    """
    pairs = []
    for group in np.unique(groups):
        member = (groups == group) & (tokens > 0)
        right, wrong = np.flatnonzero(member & correct), np.flatnonzero(member & ~correct)
        pairs += list(zip(right, wrong, strict=False))
    return np.array(pairs, int).reshape(-1, 2)


def preference_margins(feedback: Feedback) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of responses, and the margin of each in nats: logp - ref, right minus wrong."""
    pairs = pair_up(feedback.correct, feedback.groups, feedback.tokens)
    ratios = present(feedback.reference_log_ratios, "reference_log_ratios")
    right, wrong = ratios[pairs].T
    return pairs, right - wrong


def preference(algorithm: Algorithm, feedback: Feedback) -> np.ndarray:
    """+-beta sigmoid(-beta margin): minus the gradient of DPO's loss (arXiv 2305.18290, eq. 7)."""
    pairs, margins = preference_margins(feedback)
    beta = algorithm.preference_beta
    pull = beta * np.exp(-np.logaddexp(0.0, beta * margins))
    coefficients = np.zeros(len(feedback.rewards))
    coefficients[pairs] = pull[:, None] * np.array([1.0, -1.0])
    return broadcast_to_tokens(coefficients, feedback.response_index)


Estimator = Callable[[Algorithm, Feedback], np.ndarray]

ESTIMATORS: dict[str, Estimator] = {
    "group_zscore": _of_responses(normalise_in_groups),
    "group_centre": _of_responses(centre_in_groups),
    "leave_one_out": _of_responses(leave_one_out),
    "length_weighted_centre": length_weighted_centre,
    "reward_parts": reward_parts,
    "pass_at_k": pass_at_k,
    "best_minus_second": _of_responses(best_minus_second),
    "batch_centre": _of_responses(batch_centre),
    "reward": _of_responses(lambda rewards, groups: rewards),
    "reward_to_go": reward_to_go,
    "gae": gae,
    "length_adaptive_gae": length_adaptive_gae,
    "one": one,
    "preference": preference,
    "zero": zero,
}


def whiten(values: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8) over the batch's trained tokens, var with ddof = 1; else 0.

    Tokens without loss would shift and scale what the others are told.
    """
    chosen = values[trained]
    if chosen.size < 2:
        return np.zeros_like(values)
    scale = 1 / np.sqrt(chosen.var(ddof=1) + WHITEN_EPSILON)
    return np.where(trained, (values - chosen.mean()) * scale, 0.0)


def estimate(algorithm: Algorithm, feedback: Feedback) -> tuple[np.ndarray, np.ndarray | None]:
    """Advantages, and the returns that a critic learns (never whitened; None without values)."""
    advantages = ESTIMATORS[algorithm.advantage](algorithm, feedback)
    if algorithm.whiten:
        advantages = whiten(advantages, feedback.trained)
    if feedback.teacher_log_ratios is not None:
        # E[(log p_teacher - log p) grad log p] is minus the gradient of KL(p || p_teacher).
        pull = algorithm.distillation_coefficient * np.float64(feedback.teacher_log_ratios)
        advantages = advantages + np.where(feedback.trained, pull, 0.0)
    if feedback.values is None:
        return advantages.astype(np.float32), None
    gains = generalised_advantages(algorithm, feedback, algorithm.lambda_value)
    returns = np.where(feedback.on_response, gains + feedback.values, 0.0)
    return advantages.astype(np.float32), returns.astype(np.float32)
