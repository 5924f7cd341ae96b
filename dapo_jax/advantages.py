"""Advantage estimators: from the rewards of a rollout batch to a value per token.

An estimator takes the scored batch, the reward of every response and the group it belongs to, over
the WHOLE rollout batch, and returns advantages aligned with the tokens (0 off the responses).
Host arithmetic in float64, rounded once.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from dapo_jax.structs import ScoredBatch

STD_EPSILON = 1e-6

Estimator = Callable[[ScoredBatch, np.ndarray, np.ndarray], np.ndarray]


def spread(
    per_response: Float[np.ndarray, "B"], response_index: Int[np.ndarray, "*M R T"]
) -> Float[np.ndarray, "*M R T"]:
    """The value of each token's response; 0 off the responses (index -1)."""
    extended = np.append(per_response, 0.0)  # index -1 reads the last entry
    return extended[response_index].astype(np.float32)


def normalise_in_groups(
    rewards: Float[np.ndarray, "B"], groups: Int[np.ndarray, "B"]
) -> Float[np.ndarray, "B"]:
    """(R - mean) / (std + 1e-6) in each group, std with ddof = 1.

    GRPO, arXiv 2402.03300, section 4.1.2; ddof and epsilon as in DAPO's released code.
    """
    _, member = np.unique(groups, return_inverse=True)
    size = np.bincount(member)
    centred = rewards - (np.bincount(member, rewards) / size)[member]
    variance = np.bincount(member, centred**2) / np.maximum(size - 1, 1)
    return centred / (np.sqrt(variance)[member] + STD_EPSILON)


def group_zscore(scored: ScoredBatch, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Every token of a response gets the response's z-score in its group."""
    return spread(normalise_in_groups(rewards, groups), scored.rollouts.response_index)


def one(scored: ScoredBatch, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Coefficient 1: imitation of the given responses."""
    return spread(np.ones(len(rewards)), scored.rollouts.response_index)


ESTIMATORS: dict[str, Estimator] = {"group_zscore": group_zscore, "one": one}
