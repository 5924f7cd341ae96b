"""Verdicts from a process that can be killed, and `is_equivalent` on top of it.

`python -m dapo_jax.extras.math.algebra_process` is that process: a JSON line per batch.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from dapo_jax.extras.math.algebra import WORK
from dapo_jax.extras.math.expression_tree import Budget
from dapo_jax.extras.math.expressions import parse
from dapo_jax.extras.math.sympy_stage import closed_form
from dapo_jax.extras.math.verifier import BATCH_SECONDS, LOAD, Question, Settings, make_verifier
from dapo_jax.runtime.workers.child import limit_process, serve
from dapo_jax.runtime.workers.parent import BUSY_FACTOR, Limits, RestartingWorker
from dapo_jax.types.contracts import VerifierResult

WORKER = "dapo_jax.extras.math.algebra_process"
BATCH_CHARACTERS = 50_000  # of answers; JSON takes up to 12 bytes for one, of 1 MiB for a reply
SECONDS = 2.0  # limit of one verdict of `is_equivalent`, without a worker's start
MAX_UNDECIDED = 3
MODES = {"any": "math", "box": "math_box", "label": "math_label", "dapo": "dapo"}


def verify(
    worker: RestartingWorker, settings: Settings, questions: Sequence[Question], seconds: float
) -> list[VerifierResult | Exception]:
    """Return the results of a verifier in a worker process, or why there is none.

    A late worker is killed, and each question is asked again alone; a worker that died is replaced.
    A question that is late alone is asked once more, with a longer limit. `ComputedTooLong` says
    that its text is the cause, since it used up the time limit as CPU time.

    `seconds`: limit of one verdict, without a worker's start.
    """
    # On an idle core the limit of CPU time comes first, and says that the text is the cause.
    first = Limits(seconds + BATCH_SECONDS, computing=seconds)
    limits = first._replace(late_seconds=BUSY_FACTOR * seconds)
    results: list[VerifierResult | Exception] = []
    while len(results) < len(questions):
        left = questions[len(results) :]
        job = {"settings": settings, "questions": left}
        loaded = LOAD if any(_needs_sympy(settings, question) for question in left) else None
        try:
            job_limits = limits if len(left) == 1 else first
            replies = worker.ask(job, job_limits, first=loaded)["replies"]
        except Exception as error:
            if len(questions) == 1:
                return [error]
            alone = [verify(worker, settings, [question], seconds) for question in left]
            return results + [result for (result,) in alone]
        results += map(_read_reply, replies)
    return results


def _needs_sympy(settings: Settings, question: Question) -> bool:
    """Test for a sum or an integral in gold, or in a response that may leave it undone."""
    text = question.gold + question.response * (settings.unfinished != "wrong")
    return "\\int" in text or "\\sum" in text


def _read_reply(reply: list | str) -> VerifierResult | Exception:
    if isinstance(reply, str):
        return MemoryError(reply) if reply.startswith("MemoryError") else RuntimeError(reply)
    return VerifierResult(*reply)


_worker = RestartingWorker(WORKER)
_undecided: Counter[str] = Counter()  # comparisons by answer


def is_equivalent(prediction: str, answer: str, require: str = "any") -> bool:
    """Test the mathematical equivalence of answer and gold answer; never raise for texts.

    >>> is_equivalent(r"... so \\boxed{\\tfrac{3}{4}}.", "0.75")
    True
    >>> is_equivalent("Answer: 3.14", r"\\pi", require="label")  # no tolerance
    False

    Args:
        prediction: a model's response, or just its answer. Hostile: it is never evaluated, and
            it is read in a process with a limit on memory and time.
        answer: trusted.
        require: which markers of the response count, 'any', 'box' or 'label'; 'dapo' is the
            scorer of DAPO's released code.
    """
    result = _ask(Settings(MODES[require]), Question(prediction, answer))
    # Late, dead or not understood: not known to be the same.
    return isinstance(result, VerifierResult) and result.correct


def same_answer(given: str, other: str) -> bool:
    """Test the mathematical equivalence of two answers that were already extracted.

    An answer that was undecided beside `MAX_UNDECIDED` others equals only its own text, so that a
    vote among many such answers takes linear time.
    """
    if given == other or max(_undecided[given], _undecided[other]) >= MAX_UNDECIDED:
        return given == other
    result = _ask(Settings("answer"), Question(given, other))
    if not isinstance(result, VerifierResult) or result.decided == "undecided":
        _undecided.update((given, other))
    return isinstance(result, VerifierResult) and result.correct


def _ask(settings: Settings, question: Question) -> VerifierResult | Exception:
    return verify(_worker, settings, [question], SECONDS)[0]


def make_answer() -> Callable[[dict], dict]:
    """Return the function that answers `{"settings", "questions"}` with `{"replies"}`.

    The replies are to the first questions, at least to one of them. A reply has the fields of a
    `VerifierResult` or is the text of an error. `LOAD` imports sympy.
    """
    limit_process()

    def answer(job: dict) -> dict:
        if job == LOAD:
            for text in (r"\int_0^1 x^2 dx", r"\sum_{k=1}^{\infty} k^{-2}"):
                closed_form(parse(text), Budget(WORK))
            return {}
        verifier = make_verifier(Settings(*job["settings"]))
        until, replies, characters = time.monotonic() + BATCH_SECONDS, [], 0
        for fields in job["questions"]:
            try:
                replies.append(verifier(*Question(*fields)))
            except Exception as error:
                replies.append(repr(error)[:200])
            characters += sum(len(part) for part in replies[-1] if isinstance(part, str))
            if time.monotonic() > until or characters > BATCH_CHARACTERS:
                break
        return {"replies": replies}

    return answer


if __name__ == "__main__":
    serve(make_answer)
