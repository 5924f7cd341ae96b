"""Difficulty of problems: pass rates that an evaluation wrote, and the range of them to train on.

A line of the file is a JSON object with the problem's digest and its pass rate, among others.
"""

import hashlib
import json
import math
from collections.abc import Iterable

from etils import epath

from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.types.structs import Problem


def text_digest(text: str) -> str:
    """Return the key of a problem in a file of difficulties, by its text without a template."""
    fingerprint = Problem("", text, "", "").fingerprint
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


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
    """Return the pass rates in a file by digest. Raises ConfigError."""
    try:
        lines = epath.Path(path).read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return {row["digest"]: float(row["pass_rate"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"config.data.difficulty_file = {path!r}: must be a file of dapo-jax evaluate "
            f"--write_difficulty=FILE: {type(error).__name__}: {error}"
        ) from None


def within(
    problems: Iterable[Problem], rates: dict[str, float], low: float, high: float
) -> tuple[Problem, ...]:
    """Return the problems with a known pass rate from `low` to `high`."""
    rated = [(problem, rates.get(text_digest(problem.text), math.nan)) for problem in problems]
    return tuple(problem for problem, rate in rated if low <= rate <= high)
