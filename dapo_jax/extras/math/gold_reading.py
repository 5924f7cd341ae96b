"""Readings of gold answers: what a verifier makes of one, in words, before a run depends on it."""

from dapo_jax.extras.math.answer_shape import read
from dapo_jax.extras.math.equivalence import LONGEST_COMPARED, gold_answer
from dapo_jax.extras.math.expression_tree import Refused
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.minerva import spelling
from dapo_jax.extras.math.names import has_words
from dapo_jax.extras.math.normalisation import FORBIDDEN, normalise
from dapo_jax.extras.math.numerals import read_integer, read_number
from dapo_jax.extras.math.units import split_unit
from dapo_jax.extras.math.verifier import BY_VALUE
from dapo_jax.rewards.verifying import Reading

# Texts in which each verifier looks for an answer.
FORMS = {
    "final_number": "#### {}",
    "math": r"\boxed{{{}}}",
    "math_box": r"\boxed{{{}}}",
    "math_label": "Answer: {}",
    "dapo": "Answer: {}",
}


def in_form(verifier: str, answer: str) -> str:
    """Return the shortest response with an `answer` that a verifier finds."""
    return FORMS[verifier].format(answer)


def _read_value(text: str) -> Reading:
    if (number := read_number(text)) is not None:
        return Reading("number", str(number))
    value, unit = split_unit(text, trusted=True)
    if unit and read_number(value) is not None:
        return Reading("number with a unit", f"{value} {unit}")
    if has_words(text):
        return Reading("words", text)
    try:
        parse(text, folds=False)
    except Refused as error:
        return Reading("text", f"{text} ({error})")
    return Reading("expression", text)


def read_gold(verifier: str, gold: str) -> Reading:
    """Return the reading of a gold answer by a verifier.

    Args:
        verifier: a key of `verifier.VERIFIERS`.
    """
    if verifier == "final_number":
        if (integer := read_integer(gold.strip())) is None:
            return Reading("unreadable", "no integer")
        negative, digits = integer
        return Reading("integer", "-" * negative + digits)
    if verifier not in BY_VALUE:
        text = spelling(gold)
        return Reading("spelling", text) if text else Reading("unreadable", "nothing is left of it")
    text = normalise(gold_answer(gold))
    if not text or FORBIDDEN in text or len(text) > LONGEST_COMPARED:
        return Reading("unreadable", "empty, too long or with forbidden characters")
    node = read(text)
    if node.kind == "value":
        return _read_value(node.text)
    return Reading(node.kind, f"{len(node.items)} parts: {node.text}" if node.items else node.text)
