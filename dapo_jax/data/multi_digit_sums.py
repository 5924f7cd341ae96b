"""Sums of numbers up to 99, and worked examples that answer at once or call a calculator.

A problem reads `47+85+6=`. An answer is the number after the marker: `#### 138`. A call of
`environments.games.Calculator` is the sum itself, and the answer follows the value that it returns.
Everything about item i of a split depends on the key (seed, split, i) alone.
"""

import zlib

import numpy as np

from dapo_jax.config.experiment import Data, Examples
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


class Problems:
    """Problems of a split, by index: a random-access source of grain."""

    def __init__(self, data: Data, split: str, seed: int):
        self._split = split
        self._seed = seed
        heldout = split == "heldout"
        self._length = data.heldout_count() if heldout else data.train_problems

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Problem:
        return make_problem(self._split, self._seed, int(index))


def make_worked_example(seed: int, index: int, examples: Examples) -> tuple[str, list[str]]:
    """Return a worked example of the training split: problem text and turns, even ones written."""
    problem = make_problem("train", seed, index)
    answer = f"#### {problem.answer}"
    rng = np.random.default_rng([seed, zlib.crc32(b"worked sums"), index])
    if rng.random() < examples.direct_share:
        return problem.text, [answer]
    return problem.text, [problem.text, problem.answer, answer]
