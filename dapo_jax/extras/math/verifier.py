"""Verifiers by name: extraction of a response's answer and comparison with the gold answer.

All of it reads text that a model wrote and evaluates none of it. It runs in worker processes
(`algebra_process`), which can be killed.
"""

import dataclasses
import functools
from typing import NamedTuple

from dapo_jax.data.extraction import Extraction, extract
from dapo_jax.extras.math.algebra import WORK
from dapo_jax.extras.math.answer_conventions import as_percentage, asked_value, is_unfinished
from dapo_jax.extras.math.equivalence import Decision, decide, gold_answer
from dapo_jax.extras.math.problem import read_problem
from dapo_jax.rewards.spelling import dapo, final_number
from dapo_jax.types.contracts import Verifier, VerifierResult

LOAD = {"load": "sympy"}  # job of a worker, outside the time of a verdict
BATCH_SECONDS = 0.25  # after which a worker leaves the rest of a batch to the next one


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

        def decide_text(text: str) -> Decision:
            nonlocal work
            decision = decide(text, gold, problem, closes, work)
            work = decision.work
            return decision

        decision = decide_text(value)
        if extraction.how == "label" and self.require == "label" and decision.same:
            box = extract(response.rpartition("</think>")[2][extraction.end :], "box")
            if box.how != "no_marker":
                decision = decision._replace(same=decide_text(box.text or "").same)
        if not decision.same and self.settings.percent == "as_asked":
            number = as_percentage(value, prompt)
            decision = decision if number is None else decide_text(number)
        if (asked := asked_value(value, prompt)) is not None:
            decision = decide_text(asked) if asked else decision._replace(same=False)
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
