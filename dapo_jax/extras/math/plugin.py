"""The mathematical verifiers as a plug-in: verdicts, and readings of gold answers before a run."""

from collections.abc import Sequence
from typing import Any

from dapo_jax.config.experiment import Reward
from dapo_jax.extras.math.algebra_process import WORKER, same_answer, verify
from dapo_jax.extras.math.answer_shape import read
from dapo_jax.extras.math.equivalence import LONGEST_COMPARED, gold_answer
from dapo_jax.extras.math.expression_tree import Refused
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.names import has_words
from dapo_jax.extras.math.normalisation import FORBIDDEN, normalise
from dapo_jax.extras.math.numerals import read_integer, read_number
from dapo_jax.extras.math.units import split_unit
from dapo_jax.extras.math.verifier import BY_VALUE, Question, Settings
from dapo_jax.rewards.functions import ResponseCall
from dapo_jax.rewards.spelling import spelling
from dapo_jax.rewards.verifying import Reading, Verifying, Workers, verdict_of
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.types.structs import Verdict

# Texts in which each verifier looks for an answer.
FORMS = {"final_number": "#### {}", "math": r"\boxed{{{}}}", "math_box": r"\boxed{{{}}}"}
FORMS |= dict.fromkeys(("math_label", "dapo"), "Answer: {}")


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
        return Reading("integer", str(integer))
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


class MathVerifying(Verifying):
    """Verifier behind the names `final_number`, `math`, `math_box`, `math_label` and `dapo`."""

    together = 64

    def __init__(self, reward: Reward, extras: Any):
        super().__init__(reward, extras)
        self._settings = Settings(reward.verifier, extras.math.percent, extras.math.unfinished)

    def open(self) -> Workers:
        return (RestartingWorker(WORKER),)

    def verify(self, workers: Workers, calls: Sequence[ResponseCall]) -> list[Verdict]:
        questions = [Question(call.response, call.answer, call.prompt) for call in calls]
        results = verify(workers[0], self._settings, questions, self.reward.timeout_seconds)
        return list(map(verdict_of, results))

    def same_answer(self, answer: str, other: str) -> bool:
        return same_answer(answer, other)

    def read_gold(self, gold: str) -> Reading:
        return read_gold(self.reward.verifier, gold)

    def responses_to(self, gold: str) -> dict[str, str]:
        name, number = self.reward.verifier, read_number(normalise(gold))
        responses = {"gold in its form": in_form(name, gold), "gold alone": gold}
        responses["a wrong number"] = in_form(name, str(-1 if number is None else number + 1))
        if number is not None and number.denominator == 1:
            responses["gold, not worked out"] = in_form(name, f"{number + 1}-1")
        return responses
