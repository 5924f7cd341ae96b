"""Verifiers by name: extraction of a response's answer and comparison with the gold answer.

All of it runs on text that a model wrote, in time linear in that text, and evaluates none of it;
only `algebra` computes with expressions, in a process that can be killed.
"""

from typing import NamedTuple

from dapo_jax.verifier.equivalence import Algebra, decide, gold_answer
from dapo_jax.verifier.extraction import LONGEST_ANSWER, Extraction, extract
from dapo_jax.verifier.minerva import labelled_answer, spelling
from dapo_jax.verifier.numerals import read_integer

MARKER = "####"
LONGEST_NUMBER = 400  # characters; longer "numbers" are not answers


class Ruling(NamedTuple):
    """Verdict, the extracted answer (None: not found) and how it was found, or why not."""

    correct: bool
    extracted: str | None
    how: str


def final_number(response: str, answer: str, algebra: Algebra) -> Ruling:
    """Compare exactly the integer behind the last `####` with the gold answer."""
    _, marker, after = response.rpartition(MARKER)
    extracted = after.strip()
    if not marker or not extracted or len(after) > LONGEST_NUMBER:
        return Ruling(False, None, "no_marker")
    number = read_integer(extracted)
    return Ruling(number is not None and number == read_integer(answer.strip()), extracted, "hash")


def _same(extraction: Extraction, answer: str, algebra: Algebra) -> Ruling:
    if extraction.text is None:
        return Ruling(False, None, extraction.how)
    return Ruling(
        decide(extraction.text, gold_answer(answer), algebra),
        extraction.text.strip(),
        extraction.how,
    )


def math(response: str, answer: str, algebra: Algebra) -> Ruling:
    """Test the mathematical equivalence; any marker counts, and a single short line."""
    return _same(extract(response), answer, algebra)


def math_box(response: str, answer: str, algebra: Algebra) -> Ruling:
    """Test the mathematical equivalence of the content of the last box."""
    return _same(extract(response, "box"), answer, algebra)


def math_label(response: str, answer: str, algebra: Algebra) -> Ruling:
    """Test the mathematical equivalence of the answer behind a tag, `####` or 'Answer:'."""
    return _same(extract(response, "label"), answer, algebra)


def dapo(response: str, answer: str, algebra: Algebra) -> Ruling:
    """Score as DAPO's released code: the same string after Minerva's normalisation."""
    extracted = labelled_answer(response)
    if extracted is None:
        return Ruling(False, None, "no_marker")
    return Ruling(spelling(extracted) == spelling(answer), extracted[:LONGEST_ANSWER], "label")


BY_VALUE = ("math", "math_box", "math_label")  # the others compare spellings
# name: function (response, gold answer, algebra) -> ruling
VERIFIERS = {
    "final_number": final_number,
    "math": math,
    "math_box": math_box,
    "math_label": math_label,
    "dapo": dapo,
}
