"""Sums of numbers up to 99, and worked examples that answer at once or call a calculator.

A problem reads `47+85+6=`. An answer is the number after the marker: `#### 138`. A call of
`environments.builtin.Calculator` is the sum itself; the answer follows the value it returns.
Everything about item i of a split depends on the key (seed, split, i) alone.
"""

import zlib

import numpy as np

from dapo_jax.config.experiment import Examples
from dapo_jax.data.arithmetic import is_heldout
from dapo_jax.structs import Problem

DIGITS, MIN_TERMS, MAX_TERMS = 2, 2, 4


def make_problem(split: str, seed: int, index: int) -> Problem:
    """Return problem `index` of split 'train' or 'heldout'; no text occurs in both splits."""
    rng = np.random.default_rng([seed, zlib.crc32(b"sums"), zlib.crc32(split.encode()), index])
    while True:
        limits = 10 ** rng.integers(1, DIGITS + 1, rng.integers(MIN_TERMS, MAX_TERMS + 1))
        numbers = rng.integers(0, limits)
        text = "+".join(map(str, numbers)) + "="
        if is_heldout(text) == (split == "heldout"):
            return Problem(f"{split}-{index}", text, str(numbers.sum()), "multi_digit_sums")


def make_worked_example(seed: int, index: int, examples: Examples) -> tuple[str, list[str]]:
    """Return (problem text, turns) of the training split; every second turn is an observation."""
    problem = make_problem("train", seed, index)
    answer = f"#### {problem.answer}"
    rng = np.random.default_rng([seed, zlib.crc32(b"worked sums"), index])
    if rng.random() < examples.direct_share:
        return problem.text, [answer]
    return problem.text, [problem.text, problem.answer, answer]
