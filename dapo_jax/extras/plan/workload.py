"""Workloads: assumed lengths and verdicts of responses."""

import dataclasses
import math
from typing import NamedTuple, Protocol

import numpy as np

from dapo_jax.commands.command_line import check_flag

MAX_CONCENTRATION = 1e6  # of a Beta: all problems are equally hard
PROMPT = 2**32  # in place of a step in the key of a prompt's length


class Drawn(NamedTuple):
    """Lengths and verdicts of a group. Arrays [G]."""

    tokens: np.ndarray  # int, with the end token
    truncated: np.ndarray  # bool: cut off at the limit
    correct: np.ndarray  # bool


class Workload(Protocol):
    """Source of groups, keyed by the step and the index in the data."""

    def prompt_tokens(self, index: int) -> int: ...

    def draw(self, step: int, index: int, samples: int) -> Drawn: ...


@dataclasses.dataclass(frozen=True)
class AssumedWorkload:
    """Workload with log-normal lengths, cut off at the limit, and Beta-distributed accuracy.

    Responses that are cut off are wrong.

    Attributes:
        median_tokens: of responses before the cut.
        spread: standard deviation of the logarithm of the length.
        beta: a and b of the Beta distribution of a problem's accuracy.
    """

    median_tokens: float
    spread: float
    max_response_tokens: int
    prompt_median_tokens: float = 150.0
    prompt_spread: float = 0.5
    max_prompt_tokens: int = 2048
    beta: tuple[float, float] = (1.0, 1.0)
    seed: int = 0

    def prompt_tokens(self, index: int) -> int:
        rng = np.random.default_rng([self.seed, PROMPT, index])
        drawn = rng.lognormal(math.log(self.prompt_median_tokens), self.prompt_spread)
        return int(np.clip(drawn, 1, self.max_prompt_tokens))

    def draw(self, step: int, index: int, samples: int) -> Drawn:
        rng = np.random.default_rng([self.seed, step, index])
        lengths = rng.lognormal(math.log(self.median_tokens), self.spread, samples)
        truncated = lengths > self.max_response_tokens
        correct = (rng.random(samples) < rng.beta(*self.beta)) & ~truncated
        tokens = np.clip(np.ceil(lengths), 1, self.max_response_tokens).astype(int)
        return Drawn(tokens, truncated, correct)


def kept_fraction(beta: tuple[float, float], samples: int) -> float:
    """Return the fraction of mixed groups, 1 - E[p^G] - E[(1 - p)^G] for p from a Beta."""

    def expected_power(a: float, b: float) -> float:
        rising = math.lgamma(a + samples) - math.lgamma(a)
        return math.exp(rising - (math.lgamma(a + b + samples) - math.lgamma(a + b)))

    a, b = beta
    return 1 - expected_power(a, b) - expected_power(b, a)


def beta_from_kept(accuracy: float, kept: float, samples: int) -> tuple[float, float]:
    """Return the Beta of mean `accuracy` with the fraction `kept` of mixed groups of `samples`.

    Raises `ConfigError` if there is none.
    """

    def beta_of(concentration: float) -> tuple[float, float]:
        return accuracy * concentration, (1 - accuracy) * concentration

    low, high = 1e-6, MAX_CONCENTRATION
    most = kept_fraction(beta_of(high), samples)
    allowed = (
        f"above 0 and at most {most:.3g}: that of {samples} samples of accuracy {accuracy} "
        "if all problems are equally hard"
    )
    check_flag(0 < kept <= most, "kept", kept, allowed)
    for _ in range(100):
        middle = math.sqrt(low * high)
        if kept_fraction(beta_of(middle), samples) < kept:
            low = middle
        else:
            high = middle
    return beta_of(high)
