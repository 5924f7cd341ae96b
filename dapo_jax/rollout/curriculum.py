"""Pools of problems by difficulty: a problem without a learning signal is requested more rarely.

With `rollout.curriculum = 'pools'`, a problem whose group was all right or all wrong rests. When
its turn in the data order comes, it is requested only with the probability
`rollout.resting_rate`; a group with a signal makes it active again. The pools before a step and
the position decide.
"""

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from dapo_jax.config.experiment import Reward
from dapo_jax.rollout.dynamic_sampling import carries_signal
from dapo_jax.types.structs import Group, Prompt

MAX_PASSED_OVER = 10_000  # in a row; then the next prompt is requested
PURPOSE = zlib.crc32(b"curriculum")

Pools = Mapping[str, bool]  # resting problems by digest: whether all responses were right


def update_pools(pools: Pools, groups: Iterable[Group], reward: Reward) -> dict[str, bool]:
    """Return the pools after groups were scored; broken groups are not among them."""
    updated = dict(pools)
    for group in groups:
        updated.pop(group.prompt.digest, None)
        if not carries_signal(group, reward):
            updated[group.prompt.digest] = bool(group.correct.any())
    return updated


class RestingPrompts:
    """Prompt stream that skips solved or hopeless problems most of the time.

    Args:
        rate: probability that a resting problem is requested, keyed by seed and position.
    """

    def __init__(self, prompts: Iterator[Prompt], pools: Pools, rate: float, seed: int):
        self._prompts, self._pools, self._rate, self._seed = prompts, pools, rate, seed
        self.passed_over = 0

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        """Return the next active prompt, or a resting one whose turn has come."""
        for prompt in itertools.islice(self._prompts, MAX_PASSED_OVER):
            key = [self._seed, PURPOSE, prompt.index]
            rests = prompt.digest in self._pools
            if not rests or np.random.default_rng(key).random() < self._rate:
                return prompt
            self.passed_over += 1
        return next(self._prompts)
