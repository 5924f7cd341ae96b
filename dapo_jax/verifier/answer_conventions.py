r"""Conventions of right answers beyond their value; a run chooses each (`reward`).

`is_unfinished`: the value is right but was not worked out, as arithmetic that the gold answer has
done, or a piece of the problem copied. `as_percentage`: 20\% for 20 where the problem asks for
percent.
"""

import math
import re

from dapo_jax.verifier.answer_shape import Node, read
from dapo_jax.verifier.equivalence import compact, has_words
from dapo_jax.verifier.normalisation import normalise
from dapo_jax.verifier.numerals import read_number
from dapo_jax.verifier.units import split_unit

_OPERATION = re.compile(
    r"[-+*/^!|]|\\(?!(?:pi|text|infty|theta|alpha|beta|circ)(?![A-Za-z]))[A-Za-z]+"
    r"|\d ?[A-Za-z(]|\) ?[\w(]"
)
_FRACTION = re.compile(
    r"[-+]? ?(?:\\frac ?\{? ?(\d+) ?\}? ?\{? ?(\d+) ?\}?|(\d+) ?/ ?(\d+))", re.ASCII
)
_MIXED = re.compile(r"[-+]? ?\d+ ?(\\frac.*|(?<= )\d+ ?/ ?\d+)", re.ASCII)
_ASKS_PERCENT = re.compile(r"per\s?cent|\\?%", re.IGNORECASE)


def _values(node: Node) -> list[str]:
    """Texts of a shape's values, units left out."""
    if node.kind == "value":
        return [split_unit(node.text)[0]]
    return [text for item in node.items for text in _values(item)]


def _is_finished(text: str) -> bool:
    """Test for a plain number; fractions in lowest terms, in mixed numbers proper."""
    text = text.removesuffix("%").strip()
    mixed = _MIXED.fullmatch(text)
    fraction = _FRACTION.fullmatch(mixed[1] if mixed else text)
    if fraction is None:
        return read_number(text) is not None and "/" not in text and r"\frac" not in text
    above, below = map(int, filter(None, fraction.groups()))
    return below > 1 and math.gcd(above, below) == 1 and not (mixed and above > below)


def is_unfinished(prediction: str, answer: str, problem: str) -> bool:
    """Test for an equivalent answer that leaves work undone which the gold answer has done.

    Unfinished is arithmetic where every value of gold is a plain number (a fraction that can be
    reduced is arithmetic too), or an expression copied from the problem, unless gold is spelled so.

    Args:
        prediction, answer: answers extracted from a response and a gold text.
        problem: as the policy saw it.
    """
    mine, gold = normalise(prediction), normalise(answer)
    if compact(mine) == compact(gold):
        return False
    ours, theirs = read(mine), read(gold)
    if ours.kind == "relation" and theirs.kind != "relation":  # x = value, or a chain
        ours = next((item for item in ours.items if _is_finished(item.text)), ours)
    values, gold_values = _values(ours), _values(theirs)
    copied = compact(mine) in compact(normalise(problem))
    if all(map(_is_finished, values)):  # 3/20 of the problem is not the decimal asked for
        return copied and any(map(_FRACTION.fullmatch, values)) > any(
            map(_FRACTION.fullmatch, gold_values)
        )
    if all(map(_is_finished, gold_values)) and not any(map(has_words, values)):
        return any(map(_OPERATION.search, values))
    return copied and bool(_OPERATION.search(mine))


def as_percentage(prediction: str, problem: str) -> str | None:
    """Answer without its percent sign, where the problem asks for percent; else None."""
    text = normalise(prediction)
    return text.removesuffix("%") if text.endswith("%") and _ASKS_PERCENT.search(problem) else None
