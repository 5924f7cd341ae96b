"""Word problems of one or two steps, with worked answers.

The source `word_problems` has small numbers and answers of plain text:

    Mia has 5 bags with 4 pens each. Mia gives 7 pens to Ben. How many pens are left in the end?
    5*4=20
    20-7=13
    #### 13

The source `calculator_problems` has numbers of up to three digits. Half of its examples are
conversations: the assistant writes `5*4=`, and the user replies `20`, as the environment
`calculator` does.

The key (seed, split, index) alone decides a problem. Held-out problems are other combinations of
story and numbers.
"""

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Data
from dapo_jax.data.sources import Generated
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Problem

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
# Questions about a friend, who has more, fewer, or a multiple.
COMPARISONS = (
    ("{friend} has {c} {things} more.", "+"),
    ("{friend} has {c} {things} fewer.", "-"),
    ("{friend} has {c} times as many.", "*"),
)
QUESTION = "How many {things} does {friend} have?"
SHARES = "{name} puts them into {c} {holders} of the same size. How many {things} are in each?"


class Numbers(NamedTuple):
    """Ranges of the numbers of a story, each from the first to below the second."""

    start: tuple[int, int]
    factors: tuple[int, int]
    change: tuple[int, int]
    multiple: tuple[int, int]
    share: tuple[int, int]


NUMBERS = {
    "word_problems": Numbers((3, 21), (2, 7), (2, 10), (2, 4), (2, 10)),
    "calculator_problems": Numbers((100, 1000), (12, 40), (20, 300), (3, 20), (3, 20)),
}
CALLS_SHARE = 0.5  # of the examples of calculator_problems


class WordProblem(NamedTuple):
    """A problem and its solution."""

    text: str
    steps: tuple[tuple[str, int], ...]  # calculations, as ('5*12', 60)
    answer: str


def _calculate(left: int, sign: str, right: int) -> tuple[str, int]:
    results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
    return f"{left}{sign}{right}", results[sign]


def _pick(rng: np.random.Generator, choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def _draw(rng: np.random.Generator, numbers: Numbers) -> tuple[WordProblem, str]:
    """Return a problem, and its story with numbers and without names."""
    words = dict(zip(("name", "friend"), rng.choice(NAMES, 2, replace=False), strict=True))
    words |= {"things": _pick(rng, THINGS), "holders": _pick(rng, HOLDERS)}
    a, b = int(rng.integers(*numbers.start)), 0
    beginning, total, steps = _pick(rng, BEGINNINGS), a, []
    if rng.random() < 0.5:
        beginning = _pick(rng, PRODUCTS)
        a, b = int(rng.integers(*numbers.factors)), int(rng.integers(*numbers.factors))
        steps, total = [_calculate(a, "*", b)], a * b
    kind = _pick(rng, ("event", "event", "comparison", "share"))
    divisors = [d for d in range(*numbers.share) if total % d == 0 and total > d]
    fewest, limit = numbers.change
    c = int(rng.integers(fewest, max(fewest + 1, min(total, limit))))
    if kind == "share" and divisors:
        ending, sign, c = SHARES, "/", int(_pick(rng, divisors))
    elif kind == "comparison":
        sentence, sign = _pick(rng, COMPARISONS)
        ending = f"{sentence} {QUESTION}"
        c = int(rng.integers(*numbers.multiple)) if sign == "*" else c
    else:
        sentence, sign = _pick(rng, EVENTS)
        ending = f"{sentence} {_pick(rng, ENDINGS)}"
    steps.append(_calculate(total, sign, c))
    story = f"{beginning} {ending}"
    text, answer = story.format(a=a, b=b, c=c, **words), str(steps[-1][1])
    return WordProblem(text, tuple(steps), answer), f"{story} {a} {b} {c}"


def make_word_problem(source: str, split: str, seed: int, index: int) -> WordProblem:
    """Return problem `index` of a split: 'train', 'heldout', or 'examples' (more of 'train')."""
    rng = np.random.default_rng([seed, zlib.crc32(split.encode()), index])
    while True:
        problem, story = _draw(rng, NUMBERS[source])
        if (zlib.crc32(story.encode()) % HELDOUT_SHARE == 0) == (split == "heldout"):
            return problem


def make_problem(source: str, split: str, seed: int, index: int) -> Problem:
    """Return the problem without its steps."""
    problem = make_word_problem(source, split, seed, index)
    return Problem(f"{split}-{index}", problem.text, problem.answer, source)


def make_rows(source: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield worked examples for a supervised run. Raises `ConfigError` for another source."""
    require(source in NUMBERS, "data.source", source, f"{' or '.join(NUMBERS)}")
    for index in range(count):
        problem = make_word_problem(source, "examples", seed, index)
        end = f"#### {problem.answer}"
        response: Any = "".join(f"{text}={result}\n" for text, result in problem.steps) + end
        rng = np.random.default_rng([seed, zlib.crc32(b"calls"), index])
        if source == "calculator_problems" and rng.random() < CALLS_SHARE:
            turns = [*(t for text, n in problem.steps for t in (f"{text}=", str(n))), end]
            roles = ["assistant", "user"] * len(turns)
            response = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
        yield {"prompt": problem.text, "response": response}


def open_problems(field: str, name: str, data: Data, seed: int, split: str) -> Generated:
    """Return the problems of a split. Raises `ConfigError` for a name with arguments."""
    require(name in NUMBERS, field, name, f"{' or '.join(NUMBERS)}, without arguments")
    return Generated(data.count(split), lambda i: make_problem(name, split, seed, i))
