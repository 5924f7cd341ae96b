"""Difficulty of problems: pass rates that an evaluation wrote, and the range of them to train on.

A line of the file is a JSON object with the problem's identity and its pass rate, among others.
"""

import json
import math
from collections.abc import Iterable

from etils import epath

from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Problem


def parse_range(text: str) -> tuple[float, float]:
    """Return the ends of 'LOW..HIGH'. Raises ConfigError."""
    ends = text.split("..")
    try:
        low, high = map(float, ends)
    except ValueError:
        low, high = math.nan, math.nan
    allowed = "LOW..HIGH, pass rates from 0 to 1, as 0.1..0.9"
    require(0 <= low <= high <= 1, "data.difficulty", text, allowed)
    return low, high


def read_rates(path: str) -> dict[str, float]:
    """Return the pass rates in a file by `Problem.digest`. Raises ConfigError."""
    try:
        lines = epath.Path(path).read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return {row["identity"]: float(row["pass_rate"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"config.data.difficulty_file = {path!r}: must be a file that dapo-jax evaluate "
            f"--write_difficulty=FILE of this version wrote: {type(error).__name__}: {error}"
        ) from None


def within(
    problems: Iterable[Problem], rates: dict[str, float], low: float, high: float
) -> tuple[Problem, ...]:
    """Return the problems with a known pass rate from `low` to `high`."""
    rated = [(problem, rates.get(problem.digest, math.nan)) for problem in problems]
    return tuple(problem for problem, rate in rated if low <= rate <= high)
