"""Baselines and scales: functions from the rewards of a batch to a value per response.

All arithmetic is on the host, in float64. `advantages.py` broadcasts the values to tokens.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

STD_EPSILON = 1e-6

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


def centre_by_length(
    rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"], lengths: Int[np.ndarray, "B"]
) -> np.ndarray:
    """Return R - sum(n R) / sum(n) over the group, n tokens per response (OPO, 2505.23585).

    >>> centre_by_length(np.array([1.0, 0]), np.array([7, 7]), np.array([1, 3]))
    array([ 0.75, -0.25])
    """
    weighted, _ = group_means(lengths * rewards, groups)
    length, _ = group_means(lengths, groups)
    return rewards - weighted / np.maximum(length, STD_EPSILON)


def pass_at_k_advantages(
    correct: Bool[np.ndarray, "B"], groups: Int[np.ndarray, "B"], k: int
) -> np.ndarray:
    """Return the analytic advantages of pass@k training (arXiv 2508.10751, eqs. 14 and 15).

    A set of k of the group's G responses is correct if one of them is. The fraction of correct sets
    is m = 1 - C(wrong, k) / C(G, k). With s = sqrt(m (1 - m)) a correct response has the advantage
    (1 - m) / s, an incorrect one (1 - m - C(wrong - 1, k - 1) / C(G - 1, k - 1)) / s; 0 if s = 0.
    """
    wrong_share, size = group_means(1.0 - correct, groups)
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
    """Return A * groups / groups with unequal rewards (GPG, arXiv 2504.02546)."""
    members = [rewards[groups == group] for group in np.unique(groups)]
    return advantages * len(members) / max(1, sum(np.ptp(own) > 0 for own in members))


SCALES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "none": lambda advantages, rewards, groups: advantages,
    "batch": over_batch_std,
    "mean": over_mean,
    "informative": over_informative,
}
