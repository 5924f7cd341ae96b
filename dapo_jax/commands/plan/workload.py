"""Workloads: lengths and verdicts of responses, assumed by a law or recorded by a run."""

import dataclasses
import json
import math
import pathlib
from typing import NamedTuple, Protocol

import numpy as np

from dapo_jax.runtime.settings import ConfigError, require

LARGEST_CONCENTRATION = 1e6  # of a Beta: every problem as hard as the next
PROMPT = 2**32  # tells a prompt's key from those of the responses to it


class Drawn(NamedTuple):
    """Lengths and verdicts of a group. Arrays [G]."""

    tokens: np.ndarray  # int, end token included
    truncated: np.ndarray  # bool: cut off by the budget
    correct: np.ndarray  # bool


class Workload(Protocol):
    """Source of groups, keyed by the step and the place in the data."""

    def prompt_tokens(self, index: int) -> int:
        """Length of the prompt at a place in the data."""
        ...

    def draw(self, step: int, index: int, samples: int) -> Drawn:
        """Group that a step would draw for a place in the data."""
        ...


@dataclasses.dataclass(frozen=True)
class AssumedWorkload:
    """Workload of log-normal lengths, cut off at the limit, and a Beta of right answers.

    Attributes:
        median_tokens, spread: of responses before the cut; the spread is that of the logarithm.
        right: a and b of the Beta from which each problem's chance of a right answer comes. A
            response that is cut off is wrong.

    Raises `ConfigError` for a number that no law has.
    """

    median_tokens: float
    spread: float
    max_response_tokens: int
    prompt_median_tokens: float = 150.0
    prompt_spread: float = 0.5
    max_prompt_tokens: int = 2048
    right: tuple[float, float] = (1.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:-2]:
            value = getattr(self, field.name)
            require(value > 0, f"law.{field.name}", value, "above 0")
        require(min(self.right) > 0, "law.right", self.right, "two numbers above 0")

    def prompt_tokens(self, index: int) -> int:
        """Log-normal length of a prompt; at least 1."""
        rng = np.random.default_rng([self.seed, PROMPT, index])
        drawn = rng.lognormal(math.log(self.prompt_median_tokens), self.prompt_spread)
        return int(np.clip(drawn, 1, self.max_prompt_tokens))

    def draw(self, step: int, index: int, samples: int) -> Drawn:
        """Independent lengths; answers that share the problem's chance."""
        rng = np.random.default_rng([self.seed, step, index])
        lengths = rng.lognormal(math.log(self.median_tokens), self.spread, samples)
        truncated = lengths > self.max_response_tokens
        correct = (rng.random(samples) < rng.beta(*self.right)) & ~truncated
        tokens = np.clip(np.ceil(lengths), 1, self.max_response_tokens).astype(int)
        return Drawn(tokens, truncated, correct)


def kept_fraction(right: tuple[float, float], samples: int) -> float:
    """Share of groups that are neither all right nor all wrong: 1 - E[p^G] - E[(1 - p)^G]."""

    def expected_power(a: float, b: float) -> float:
        logs = (math.lgamma(x + samples) - math.lgamma(x) for x in (a, a + b))
        first, second = logs
        return math.exp(first - second)

    a, b = right
    return 1 - expected_power(a, b) - expected_power(b, a)


def right_from_kept(accuracy: float, kept: float, samples: int) -> tuple[float, float]:
    """Beta with mean `accuracy` that keeps the share `kept` of groups of `samples`.

    Raises `ConfigError` where no Beta keeps so many.
    """
    require(0 < accuracy < 1, "law.accuracy", accuracy, "between 0 and 1")
    low, high = 1e-6, LARGEST_CONCENTRATION
    most = kept_fraction((accuracy * high, (1 - accuracy) * high), samples)
    allowed = (
        f"above 0 and at most {most:.3g}, which {samples} samples of accuracy {accuracy} keep "
        "where every problem is as hard as the next"
    )
    require(0 < kept <= most, "law.kept", kept, allowed)
    for _ in range(100):
        middle = math.sqrt(low * high)
        fewer = kept_fraction((accuracy * middle, (1 - accuracy) * middle), samples) < kept
        low, high = (middle, high) if fewer else (low, middle)
    return accuracy * high, (1 - accuracy) * high


class _Recorded(NamedTuple):
    prompt_tokens: int
    drawn: Drawn
    fair: bool  # no surplus: those finish fast


def _read_step(path: pathlib.Path) -> dict[int, _Recorded]:
    """Groups of a rollouts file by their place in the data."""
    lines: dict[int, list[dict]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        lines.setdefault(line["index"], []).append(line)
    groups = {}
    for index, group in lines.items():
        group.sort(key=lambda line: line["sample"])
        columns = (np.array([line[name] for line in group]) for name in Drawn._fields)
        groups[index] = _Recorded(
            group[0]["prompt_tokens"], Drawn(*columns), not group[0]["surplus"]
        )
    return groups


class RecordedWorkload:
    """Workload of the groups that a run judged (`rollouts/`), drawn again at random by step.

    A later step than the last recorded one is as that; an earlier one than the first, as that.

    Args:
        folder: of the run; it needs `log.rollouts`.
        replay: a place in the data that the step judged gives just what it gave there.

    Raises `ConfigError` where the folder holds none.
    """

    def __init__(self, folder: pathlib.Path | str, *, replay: bool = False, seed: int = 0):
        paths = sorted(pathlib.Path(folder).glob("rollouts/step_*.jsonl"))
        try:
            steps = {int(path.stem.removeprefix("step_")): _read_step(path) for path in paths}
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{folder}: its rollouts can't be read: {error!r}") from None
        self._steps = {step: groups for step, groups in steps.items() if groups}
        if not self._steps:
            raise ConfigError(f"{folder}: holds no rollouts; run it with config.log.rollouts=true")
        self._replay, self._seed = replay, seed
        self._fair = {
            step: [group for group in groups.values() if group.fair] or list(groups.values())
            for step, groups in self._steps.items()
        }
        self._prompts = {
            index: group.prompt_tokens
            for groups in self._steps.values()
            for index, group in groups.items()
        }
        self._seen = sorted(self._prompts.values())

    def prompt_tokens(self, index: int) -> int:
        """Recorded length; elsewhere one of the recorded."""
        if index in self._prompts:
            return self._prompts[index]
        return int(np.random.default_rng([self._seed, PROMPT, index]).choice(self._seen))

    def draw(self, step: int, index: int, samples: int) -> Drawn:
        """A recorded group, its responses in random order; with more samples, some repeated."""
        earlier = (number for number in self._steps if number <= step + 1)
        recorded = max(earlier, default=min(self._steps))
        group = self._steps[recorded].get(index)
        if self._replay and group is not None and len(group.drawn.tokens) == samples:
            return group.drawn
        rng = np.random.default_rng([self._seed, step, index])
        groups = self._fair[recorded]
        drawn = groups[rng.integers(len(groups))].drawn
        size = len(drawn.tokens)
        order = rng.permutation(size) if samples <= size else rng.integers(size, size=samples)
        return Drawn(*(column[order[:samples]] for column in drawn))
