"""Answers that a scorer may see: finite numbers, and bounded work.

A scorer was written for people who try. NaN is near every number to one of them, and another turns
a cube 99,999,999 times because the answer says so. What a right answer never holds stops here.
"""

import re

MAX_NESTED = 20  # brackets within brackets; answers of the package's tasks nest 3 deep
MAX_CALLS = 20  # names before a bracket, as in exp(
MAX_PIECES = 300  # pieces between blanks, commas and line ends: numbers, words, moves
MAX_TURNS = 1000  # sum of all numbers where the task gives no answer: they count moves
ROOM = 4  # times as much as the gold answer has

_OPENING, _CLOSING = "([{", ")]}"
_CALL = re.compile(r"[^\W\d_][(\[{]")
_PIECE = re.compile(r"[^\s,;]+")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_OTHER_LETTER = re.compile(r"[^\W\d_eij]", re.IGNORECASE)  # than those in 1e5 and 2 + 3i
_NOT_FINITE = re.compile(
    r"(?<![^\W\d_])s?(?:nan|inf(?:inity)?)\d*[ij]?(?![^\W_])|∞|\\infty|\de[+-]?\d{3}", re.IGNORECASE
)
_DIGITS = re.compile(r"\d+")


def _nesting(text: str) -> int:
    """Depth of the deepest bracket, closed or not."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in _OPENING) - (sign in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def _turns(text: str) -> int:
    """Sum of the numbers in a text; of a long one its first digits are enough."""
    return sum(int(digits[:9]) for digits in _DIGITS.findall(text))


def is_number(gold: str) -> bool:
    """True of a gold answer that consists of numbers: real or complex ones, or several."""
    return not _OTHER_LETTER.search(_COMMAND.sub("", gold))


def unfit(answer: str, gold: str | None) -> str | None:
    """Reason why no scorer sees an answer; None where it may.

    Args:
        gold: the item's answer; None for a task that accepts many.
    """
    if gold is not None and answer.strip() == gold.strip():
        return None
    known = gold or ""
    if gold is not None and is_number(gold) and _NOT_FINITE.search(answer):
        return "it is not a finite number"
    if _nesting(answer) > max(MAX_NESTED, _nesting(known)):
        return f"its brackets nest deeper than {MAX_NESTED}"
    if len(_CALL.findall(answer)) > max(MAX_CALLS, ROOM * len(_CALL.findall(known))):
        return f"it calls more than {MAX_CALLS} functions"
    if len(_PIECE.findall(answer)) > max(MAX_PIECES, ROOM * len(_PIECE.findall(known))):
        return f"it has more than {MAX_PIECES} pieces"
    if gold is None and _turns(answer) > MAX_TURNS:
        return f"its numbers add up to more than {MAX_TURNS}"
    return None
