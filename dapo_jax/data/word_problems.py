"""Word problems of one to three steps, with worked answers: the source `word_problems`.

    Mia has 5 bags with 12 pens each. She gives 7 pens to Ben. How many pens are left in the end?
    5*12=60
    60-7=53
    #### 53

The key (seed, split, index) alone decides a problem. Held-out problems share no combination of
story and numbers with the others.
"""

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.structs import Problem

HELDOUT_SHARE = 8  # 1 of 8 combinations of story and numbers is held out
NAMES = (
    "Mia Ben Anna Tom Sara Leo Nina Paul Emma Max Lily Sam Ella Noah Ruth Adam Clara Jack Rosa Omar"
).split()
THINGS = (
    "pens apples books coins cards stamps shells marbles cookies eggs balls stickers beads nuts "
    "plums keys cups stones flowers toys"
).split()
HOLDERS = "bags boxes baskets packs jars rows".split()
# Stories as (sentence, operation on the number so far, and the sentence's number).
BEGINNINGS = (
    "{name} has {a} {things}.",
    "{name} owns {a} {things}.",
    "There are {a} {things} on the table of {name}.",
    "{name} finds {a} {things} at home.",
)
PRODUCTS = (
    "{name} has {a} {holders} with {b} {things} each.",
    "{name} buys {a} {holders} of {b} {things}.",
    "{name} fills {a} {holders}. Each of them holds {b} {things}.",
)
EVENTS = (
    ("{name} gets {c} more.", "+"),
    ("{friend} brings {c} more {things}.", "+"),
    ("Then {name} buys another {c} {things}.", "+"),
    ("{name} gives {c} {things} to {friend}.", "-"),
    ("{name} loses {c} of them.", "-"),
    ("{friend} takes {c} {things} away.", "-"),
)
ENDINGS = (
    "How many {things} does {name} have now?",
    "How many {things} are there now?",
    "How many {things} are left in the end?",
)
# Questions about a friend: the friend's number, then the number of both.
COMPARISONS = (
    ("{friend} has {c} {things} more.", "+"),
    ("{friend} has {c} {things} fewer.", "-"),
    ("{friend} has {c} times as many.", "*"),
)
TOGETHER = "How many {things} do {name} and {friend} have together?"
SHARES = "{name} puts them into {c} {holders} of the same size. How many {things} are in each?"


class WordProblem(NamedTuple):
    """A problem, and the calculations that solve it, as `('5*12', 60)`."""

    text: str
    steps: tuple[tuple[str, int], ...]

    @property
    def answer(self) -> str:
        return str(self.steps[-1][1])


def _calculate(left: int, sign: str, right: int) -> tuple[str, int]:
    results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
    return f"{left}{sign}{right}", results[sign]


def _pick(rng: np.random.Generator, choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def _draw(rng: np.random.Generator) -> tuple[WordProblem, str]:
    """Return a problem, and its story with numbers and without names."""
    name, friend = rng.choice(NAMES, 2, replace=False)
    words = {"name": name, "friend": friend}
    words |= {"things": _pick(rng, THINGS), "holders": _pick(rng, HOLDERS)}
    steps: list[tuple[str, int]] = []
    a, b = int(rng.integers(5, 60)), 0
    beginning = _pick(rng, BEGINNINGS)
    total = a
    if rng.random() < 0.5:
        beginning = _pick(rng, PRODUCTS)
        a, b = int(rng.integers(2, 10)), int(rng.integers(2, 10))
        steps.append(_calculate(a, "*", b))
        total = a * b
    kind = _pick(rng, ("event", "event", "comparison", "share"))
    divisors = [d for d in range(2, 10) if total % d == 0 and total > d]
    if kind == "share" and divisors:
        ending, sign, c = SHARES, "/", _pick(rng, divisors)
    elif kind == "comparison":
        sentence, sign = _pick(rng, COMPARISONS)
        ending = f"{sentence} {TOGETHER}"
        c = rng.integers(2, 6 if sign == "*" else max(3, total))
    else:
        sentence, sign = _pick(rng, EVENTS)
        ending = f"{sentence} {_pick(rng, ENDINGS)}"
        c = rng.integers(2, max(3, total))
    steps.append(_calculate(total, sign, int(c)))
    if kind == "comparison":
        steps.append(_calculate(total, "+", steps[-1][1]))
    story = f"{beginning} {ending}"
    return WordProblem(story.format(a=a, b=b, c=c, **words), tuple(steps)), f"{story} {a} {b} {c}"


def make_word_problem(split: str, seed: int, index: int) -> WordProblem:
    """Return problem `index` of a split: 'train', 'heldout', or 'examples' (more of 'train')."""
    rng = np.random.default_rng([seed, zlib.crc32(split.encode()), index])
    while True:
        problem, story = _draw(rng)
        is_heldout = zlib.crc32(story.encode()) % HELDOUT_SHARE == 0
        if is_heldout == (split == "heldout"):
            return problem


def make_problem(split: str, seed: int, index: int) -> Problem:
    """Return the problem without its steps."""
    problem = make_word_problem(split, seed, index)
    return Problem(f"{split}-{index}", problem.text, problem.answer, "word_problems")


def make_examples(count: int, seed: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place, row) of worked examples for a supervised run."""
    for index in range(count):
        problem = make_word_problem("examples", seed, index)
        worked = "".join(f"{text}={result}\n" for text, result in problem.steps)
        row = {"prompt": problem.text, "response": f"{worked}#### {problem.answer}"}
        yield f"example {index}", row
