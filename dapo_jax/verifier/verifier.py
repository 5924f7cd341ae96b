"""Verifiers by name: extraction of a response's answer and comparison with the gold answer.

All of it reads text that a model wrote and evaluates none of it. It runs in worker processes
(`algebra_worker`), which can be killed.
"""

from typing import NamedTuple

from dapo_jax.verifier.answer_conventions import as_percentage, asked_value, is_unfinished
from dapo_jax.verifier.equivalence import Algebra, decide, gold_answer
from dapo_jax.verifier.extraction import LONGEST_ANSWER, Extraction, extract
from dapo_jax.verifier.minerva import labelled_answer, spelling
from dapo_jax.verifier.numerals import read_integer

MARKER = "####"
LONGEST_NUMBER = 400  # characters; longer "numbers" are not answers
BATCH_SECONDS = 0.25  # after which a worker leaves the rest of a batch to the next one


class Question(NamedTuple):
    """Response to judge, and the settings that decide.

    verifier: a key of `VERIFIERS`, or 'answer' if `response` is an extracted answer. percent,
    unfinished: settings of the section `reward`.
    """

    verifier: str
    response: str
    answer: str
    prompt: str = ""
    percent: str = "exact"
    unfinished: str = "right"


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
    """Test the mathematical equivalence of the answer behind a tag, `####` or 'Answer:'.

    A box behind the label has to hold the same answer.
    """
    extraction = extract(response, "label")
    ruling = _same(extraction, answer, algebra)
    if extraction.how == "label" and ruling.correct:
        box = extract(response.rpartition("</think>")[2][extraction.end :], "box")
        is_same = box.how == "no_marker" or _same(box, answer, algebra).correct
        return ruling._replace(correct=is_same)
    return ruling


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


def judge(question: Question, algebra: Algebra) -> Ruling:
    """Return the verdict on a response, by value and by the conventions of the settings."""
    gold = gold_answer(question.answer)
    if question.verifier == "answer":
        return Ruling(decide(question.response, question.answer, algebra), question.response, "")
    response = question.response
    if question.verifier in BY_VALUE and question.prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    ruling = VERIFIERS[question.verifier](response, question.answer, algebra)
    value = ruling.extracted
    if question.verifier not in BY_VALUE or value is None:
        return ruling
    if not ruling.correct and question.percent == "as_asked":
        number = as_percentage(value, question.prompt)
        ruling = ruling._replace(correct=number is not None and decide(number, gold, algebra))
    if (asked := asked_value(value, question.prompt)) is not None:
        ruling = ruling._replace(correct=asked != "" and decide(asked, gold, algebra))
        value = asked or value
    if ruling.correct and question.unfinished == "wrong":
        if is_unfinished(value, gold, question.prompt):
            return Ruling(False, ruling.extracted, "unfinished")
    return ruling
