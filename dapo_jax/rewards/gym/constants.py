"""Constants that win a task without work: each task is probed with some when it is opened."""

import collections
from collections.abc import Callable
from typing import Any

ITEMS = 16  # of a task that are probed
SLACK = 3  # items that a constant may win by chance
WON = 0.9  # score from which an item counts as won

# Tasks of release 0.1.25 that a constant wins: one compares the first digits, the other only
# whether there is an answer.
WON_BY_CONSTANTS = frozenset({"coin_flip", "game_of_life_halting"})

QUESTION = "the question's own text"
CONSTANTS = (
    *("", " ", "\n", ".", ",", "-", "=", "0", "1", "-1", "2", "10", "0.5", "1/2", "0,0", "0 0"),
    *("(0, 0)", "i", "NaN", "inf", "-inf", "1e999", "[]", "[[]]", "[NaN]", "{}", "()", "null"),
    *("None", "True", "False", "Yes", "No", "A", "B", "ABC", "I do not know.", "The answer is 42."),
    QUESTION,
)


def _plain(text: str) -> str | float:
    """Value by which gold answers are counted: 1 and 1.0 are one."""
    try:
        return float(text)
    except ValueError:
        return text.strip().casefold()


def won_constant(
    items: list[dict[str, Any]], score: Callable[[str, dict[str, Any]], float]
) -> str | None:
    """Constant that wins more items than it should, and how many; None without one.

    The most frequent gold answer is a constant too, so that as much may be won by any: half of
    the items of a task whose answer is yes or no.

    Args:
        score: the score of an answer to an item, as a response gets it.
    """
    golds = [item.get("answer") for item in items]
    counts = collections.Counter(_plain(str(gold)) for gold in golds if gold is not None)
    most = max(counts.values(), default=0) + SLACK
    for constant in CONSTANTS:
        answers = [item["question"] if constant is QUESTION else constant for item in items]
        pairs = zip(answers, items, strict=True)
        won = sum(score(answer, item) >= WON for answer, item in pairs)
        if won > most:
            shown = constant if constant is QUESTION else repr(constant)
            return f"{shown} wins {won} of its {len(items)} items"
    return None
