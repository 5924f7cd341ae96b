"""Verifiers by name: extraction of a response's answer and comparison with the gold answer.

All of it reads text that a model wrote and evaluates none of it. It runs in worker processes
(`algebra_process`), which can be killed.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

from dapo_jax.extras.math.algebra import WORK
from dapo_jax.extras.math.answer_conventions import as_percentage, asked_value, is_unfinished
from dapo_jax.extras.math.equivalence import Decision, decide, gold_answer
from dapo_jax.extras.math.extraction import LONGEST_ANSWER, Extraction, extract
from dapo_jax.extras.math.numerals import read_integer
from dapo_jax.extras.math.problem import read_problem
from dapo_jax.types.contracts import Verifier, VerifierResult

LONGEST_NUMBER = 400  # characters; longer "numbers" are not answers
LOAD = {"load": "sympy"}  # job of a worker, outside the time of a verdict
BATCH_SECONDS = 0.25  # after which a worker leaves the rest of a batch to the next one

# DAPO's released code: a label near the end, and Minerva's normalisation (arXiv 2206.14858, D.1).
CHARACTERS_READ = 300  # from the end of a response
_LABEL = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WRITTEN = r"an ~|a ~|.$~$|\$~|\ ~| ~|mbox~text|,\text{and}~,|\text{and}~,|\text{m}~\text{}"
_REPLACED = [pair.split("~") for pair in _WRITTEN.split("|")]  # in this order
_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s} "
    "\\text{.} \\text{\ns} \\text{}^2 \\text{}^3 \\text{\n} \\text{} \\mathrm{th} ^\\circ "
    '^{\\circ} \\; ,\\! {,} " \\dots'
).split(" ")
_INNER = (
    (re.compile(r".*?\$(.*?)\$.*", re.DOTALL), r"$\1$"),
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),  # greedy, unlike the others
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


class Question(NamedTuple):
    """Arguments of a `Verifier`."""

    response: str
    gold: str
    prompt: str = ""


class Settings(NamedTuple):
    """A verifier, and its settings in `config.extras.math`."""

    verifier: str  # one of `VERIFIERS`, or 'answer' if responses are extracted answers
    percent: str = "exact"
    unfinished: str = "right"


def final_number(response: str, gold: str, prompt: str) -> VerifierResult:
    """Compare exactly the integer behind the last `####` with the gold answer."""
    _, marker, after = response.rpartition("####")
    extracted = after.strip()
    if not marker or not extracted or len(after) > LONGEST_NUMBER:
        return VerifierResult(False, None, "no_marker")
    number = read_integer(extracted)
    correct = number is not None and number == read_integer(gold.strip())
    return VerifierResult(correct, extracted, "direct")


def spelling(answer: str) -> str:
    """Return the normalised spelling of an answer; equal spellings are equal answers."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _REMOVED:
        answer = answer.replace(old, "")
    for pattern, new in _INNER:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def dapo(response: str, gold: str, prompt: str) -> VerifierResult:
    """Score as DAPO's released code: the last 'Answer:' near the end, and equal spellings."""
    answers = _LABEL.findall(response[-CHARACTERS_READ:])
    if not answers:
        return VerifierResult(False, None, "no_marker")
    correct = spelling(answers[-1]) == spelling(gold)
    return VerifierResult(correct, answers[-1][:LONGEST_ANSWER], "direct")


@dataclasses.dataclass(frozen=True)
class MathVerifier:
    """Verifier that compares by mathematical equivalence.

    `require`: the markers that count, as in `extract`; 'nothing': the response is an answer. With
    'label', a box behind the label has to hold the same answer.
    """

    require: str
    settings: Settings

    def __call__(self, response: str, gold: str, prompt: str) -> VerifierResult:
        if self.require == "nothing":
            extraction = Extraction(response, "answer")
        else:
            gold = gold_answer(gold)
            if prompt.rstrip().endswith("<think>"):
                response = "<think>" + response
            extraction = extract(response, self.require)
        if extraction.text is None:
            return VerifierResult(False, None, extraction.how)
        value, problem = extraction.text.strip(), read_problem(prompt)
        closes, work = self.settings.unfinished == "right", WORK

        def judged(text: str) -> Decision:
            nonlocal work
            decision = decide(text, gold, problem, closes, work)
            work = decision.work
            return decision

        decision = judged(value)
        if extraction.how == "label" and self.require == "label" and decision.same:
            box = extract(response.rpartition("</think>")[2][extraction.end :], "box")
            if box.how != "no_marker":
                decision = decision._replace(same=judged(box.text or "").same)
        if not decision.same and self.settings.percent == "as_asked":
            number = as_percentage(value, prompt)
            decision = decision if number is None else judged(number)
        if (asked := asked_value(value, prompt)) is not None:
            decision = judged(asked) if asked else decision._replace(same=False)
        if decision.same and not closes and is_unfinished(decision, prompt):
            return VerifierResult(False, value, "unfinished")
        return VerifierResult(decision.same, value, decision.how)


BY_SPELLING: dict[str, Verifier] = {"final_number": final_number, "dapo": dapo}
BY_VALUE = {"math": "any", "math_box": "box", "math_label": "label"}  # name: markers that count
VERIFIERS = ("final_number", *BY_VALUE, "dapo")


@functools.cache
def make_verifier(settings: Settings) -> Verifier:
    """Return the verifier that the settings choose."""
    if settings.verifier in BY_SPELLING:
        return BY_SPELLING[settings.verifier]
    return MathVerifier(BY_VALUE.get(settings.verifier, "nothing"), settings)
