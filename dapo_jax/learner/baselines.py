"""Baselines and scales: from the rewards of groups of responses to a value per response.

`advantages.py` lays them along the tokens. Host arithmetic in float64.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int

STD_EPSILON = 1e-6

# --- baselines: (rewards, groups) -> [B] ------------------------------------------------------


def group_means(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the group of each response, and the size of that group."""
    _, member = np.unique(groups, return_inverse=True)
    size = np.bincount(member)
    return (np.bincount(member, values) / size)[member], size[member]


def centre_in_groups(rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> np.ndarray:
    """R - group mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return rewards - group_means(rewards, groups)[0]


def normalise_in_groups(
    rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]
) -> np.ndarray:
    """(R - mean) / (std + 1e-6) in each group, std with ddof = 1.

    GRPO, arXiv 2402.03300, section 4.1.2; ddof and epsilon as in DAPO's released code.

    >>> normalise_in_groups(np.array([1.0, -1, -1, -1]), np.array([7, 7, 7, 7]))
    array([ 1.4999985, -0.4999995, -0.4999995, -0.4999995])
    """
    centred = centre_in_groups(rewards, groups)
    mean_square, size = group_means(centred**2, groups)
    return centred / (np.sqrt(mean_square * size / np.maximum(size - 1, 1)) + STD_EPSILON)


def leave_one_out(rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> np.ndarray:
    """R - mean of the group's other rewards (RLOO, arXiv 2402.14740, section 2.2).

    >>> leave_one_out(np.array([1.0, 0, 0]), np.array([7, 7, 7]))
    array([ 1. , -0.5, -0.5])
    """
    mean, size = group_means(rewards, groups)
    return rewards - (mean * size - rewards) / np.maximum(size - 1, 1)


def batch_centre(rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]) -> np.ndarray:
    """R - mean over the rollout batch: REINFORCE with a constant baseline."""
    return rewards - rewards.mean()


def centre_by_length(
    rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"], lengths: Int[np.ndarray, "B"]
) -> np.ndarray:
    """R - sum(n R) / sum(n) over the group, n tokens a response (OPO, arXiv 2505.23585).

    >>> centre_by_length(np.array([1.0, 0]), np.array([7, 7]), np.array([1, 3]))
    array([ 0.75, -0.25])
    """
    weighted, length = (group_means(one, groups)[0] for one in (lengths * rewards, lengths))
    return rewards - weighted / np.maximum(length, STD_EPSILON)


def pass_at_k_advantages(
    correct: Bool[np.ndarray, "B"], groups: Int[np.ndarray, "B"], k: int
) -> np.ndarray:
    """Analytic advantages of pass@k training (arXiv 2508.10751, equations 14 and 15).

    A set of k of the group's G responses is right where one of them is. With m = 1 - C(wrong, k) /
    C(G, k), the share of right sets, a right response has (1 - m) / s and a wrong one (1 - m -
    C(wrong - 1, k - 1) / C(G - 1, k - 1)) / s, s = sqrt(m (1 - m)); 0 where all sets are alike.
    """
    wrong_share, size = group_means(1.0 - correct, groups)
    wrong = np.rint(wrong_share * size)

    def none_right(wrong: np.ndarray, size: np.ndarray, k: int) -> np.ndarray:
        """C(wrong, k) / C(size, k), as a product that no factorial overflows."""
        factors = [np.maximum(wrong - i, 0) / np.maximum(size - i, 1) for i in range(k)]
        return np.prod(factors, axis=0)

    m = 1 - none_right(wrong, size, k)
    spread_of_sets = np.sqrt(m * (1 - m))
    sets_of_wrong = none_right(wrong - 1, size - 1, k - 1)
    gain = np.where(correct, 1 - m, 1 - m - sets_of_wrong)
    return np.where(spread_of_sets > 0, gain / np.maximum(spread_of_sets, STD_EPSILON), 0.0)


def best_minus_second(
    rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]
) -> Float[np.ndarray, "B"]:
    """Best minus second best reward for the group's best response, else 0 (arXiv 2503.19595).

    The gradient of the expected maximum over the group; of several best ones nothing is gained.
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
    """A / (std + 1e-6) of the batch's rewards, ddof = 1 (Lite PPO, arXiv 2508.08221)."""
    return advantages / (rewards.std(ddof=min(1, len(rewards) - 1)) + STD_EPSILON)


def over_mean(advantages: np.ndarray, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A / group mean, 0 where that is not above 0 (MaxRL, arXiv 2602.02710)."""
    mean = group_means(rewards, groups)[0]
    above = mean > STD_EPSILON  # where rounding alone keeps it from 0
    return np.where(above, advantages / np.where(above, mean, 1.0), 0.0)


def over_informative(advantages: np.ndarray, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A * groups / groups whose rewards differ (GPG, arXiv 2504.02546)."""
    members = [rewards[groups == group] for group in np.unique(groups)]
    return advantages * len(members) / max(1, sum(np.ptp(own) > 0 for own in members))


SCALES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "none": lambda advantages, rewards, groups: advantages,
    "batch": over_batch_std,
    "mean": over_mean,
    "informative": over_informative,
}
