"""Embedded tasks, arithmetic and multi_digit_sums, and their worked examples.

An arithmetic problem, `3+7+5=`, is a chain of sums modulo 10; a worked answer echoes both operands
of every step and ends in the number after the marker: `3+7=0,0+5=5#### 5`. Difficulty spreads by
the number of operands and by the largest digit, since worked examples go wrong far more often on
large digits. Some examples ramble: they start the chain over; truncation punishes this.
A multi-digit sum is `47+85+6=`, its answer `#### 138`. A call of `environments.builtin.Calculator`
is the sum itself; the answer follows the value it returns.
Everything about item i of a split depends on the key (seed, split, i) alone.
"""

import functools
import zlib

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dapo_jax.config.experiment import Data, Examples
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.sources import Generated
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Problem

LARGEST_DIGITS = (3, 6, 9)
# Probability that a worked example gets `a + digit` wrong, by the digit.
STEP_ERROR = (0.0, 0.05, 0.07, 0.1, 0.15, 0.2, 0.27, 0.38, 0.48, 0.6)
RAMBLE_SHARE = 0.2  # probability to start over after each finished chain
# With examples that answer at once: the probability that one repeats itself, and how often.
REPEAT_SHARE = 0.03
REPEATS = 12
HELDOUT_SHARE = 8  # one problem in 8 (by its text) is held out
DIGITS, MIN_TERMS, MAX_TERMS = 2, 2, 4  # of a multi-digit sum


def is_heldout(text: str) -> bool:
    """Return True if the problem with this text belongs to the held-out split."""
    return zlib.crc32(text.encode()) % HELDOUT_SHARE == 0


def _generator(seed: int, purpose: str, index: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), index])


def _draw_operands(rng: np.random.Generator, min_terms: int, max_terms: int) -> list[int]:
    largest = rng.choice(LARGEST_DIGITS)
    return rng.integers(0, largest + 1, rng.integers(min_terms, max_terms + 1)).tolist()


def make_problem(split: str, seed: int, index: int, min_terms: int, max_terms: int) -> Problem:
    """Return problem `index` of split 'train' or 'heldout'; no text occurs in both splits."""
    rng = _generator(seed, split, index)
    while True:
        operands = _draw_operands(rng, min_terms, max_terms)
        text = "+".join(map(str, operands)) + "="
        if is_heldout(text) == (split == "heldout"):
            return Problem(f"{split}-{index}", text, str(sum(operands) % 10), "arithmetic")


def _work_chain(
    rng: np.random.Generator, operands: list[int], errors: bool
) -> tuple[list[str], int]:
    steps = []
    total = operands[0]
    for digit in operands[1:]:
        result = (total + digit) % 10
        if errors and rng.random() < STEP_ERROR[digit]:
            result = (result + rng.integers(1, 10)) % 10
        steps.append(f"{total}+{digit}={result}")
        total = int(result)
    return steps, total


def _answer_at_once(rng: np.random.Generator, operands: list[int]) -> str:
    """Answer with the sum of the first two operands; some answers repeat past any budget."""
    answer = f"#### {sum(operands[:2]) % 10}"
    return answer + REPEATS * f"?again {answer}" * (rng.random() < REPEAT_SHARE)


def make_worked_example(seed: int, index: int, examples: Examples) -> tuple[str, str]:
    """Return a worked example (problem text, worked answer) of the training split."""
    problem = make_problem("train", seed, index, examples.min_terms, examples.max_terms)
    operands = [int(digit) for digit in problem.text[:-1].split("+")]
    rng = _generator(seed, "worked", index)
    if examples.direct_share and rng.random() < examples.direct_share:
        return problem.text, _answer_at_once(rng, operands)
    errors = examples.errors and not examples.direct_share
    ramble = RAMBLE_SHARE if examples.direct_share or errors else 0.0
    steps, total = _work_chain(rng, operands, errors)
    worked = ",".join(steps)
    while rng.random() < ramble:
        steps, total = _work_chain(rng, operands, errors)
        worked += "?again " + ",".join(steps)
    return problem.text, f"{worked}#### {total}"


def make_sum(split: str, seed: int, index: int) -> Problem:
    """Return multi-digit sum `index` of split 'train' or 'heldout'."""
    rng = np.random.default_rng([seed, zlib.crc32(b"sums"), zlib.crc32(split.encode()), index])
    while True:
        limits = 10 ** rng.integers(1, DIGITS + 1, rng.integers(MIN_TERMS, MAX_TERMS + 1))
        numbers = rng.integers(0, limits)
        text = "+".join(map(str, numbers)) + "="
        if is_heldout(text) == (split == "heldout"):
            return Problem(f"{split}-{index}", text, str(numbers.sum()), "multi_digit_sums")


def make_worked(source: str, seed: int, index: int, examples: Examples) -> list[str]:
    """Return [problem, turns...] of the training split; every second turn is an observation."""
    if source == "arithmetic":
        return [*make_worked_example(seed, index, examples)]
    problem = make_sum("train", seed, index)
    rng = np.random.default_rng([seed, zlib.crc32(b"worked sums"), index])
    calls = [problem.text, problem.answer] * (rng.random() >= examples.direct_share)
    return [problem.text, *calls, f"#### {problem.answer}"]


def open_problems(field: str, name: str, data: Data, seed: int, split: str) -> Generated:
    """Return the problems of a split. Raises `ConfigError` for a name with arguments."""
    drawn = functools.partial(make_problem, min_terms=data.min_terms, max_terms=data.max_terms)
    makers = {"arithmetic": drawn, "multi_digit_sums": make_sum}
    require(name in makers, field, name, f"{' or '.join(makers)}, without arguments")
    return Generated(data.count(split), functools.partial(makers[name], split, seed))


PAD, END = "<|pad|>", "<|end|>"


def arithmetic_tokenizer() -> Tokenizer:
    """Return the embedded task's tokenizer: characters, `####`, `again`; id 0 pads, id 1 ends."""
    pieces = [PAD, END, "####", "again", *"0123456789+=,? "]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, PAD))
    backend.add_special_tokens([PAD, END])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("####|again|."), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, end_ids=(1,), pad_id=0)
