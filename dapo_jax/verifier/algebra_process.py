"""Verdicts from a process that can be killed, and `is_equivalent` on top of it."""

from collections.abc import Sequence

from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.verifier.verifier import BATCH_SECONDS, Question, Ruling

WORKER = "dapo_jax.verifier.algebra_worker"
SECONDS = 2.0  # limit of one verdict of `is_equivalent`, without a worker's start
MODES = {"any": "math", "box": "math_box", "label": "math_label", "dapo": "dapo"}


def ask(
    worker: RestartingWorker, questions: Sequence[Question], seconds: float
) -> list[Ruling | Exception]:
    """Return the verdicts of a worker, or why there is none; `how` says how it was decided.

    A late worker is killed, and each question is asked again alone; a worker that died is replaced.

    Args:
        worker: a process of `algebra_worker`.
        seconds: limit of one verdict, without a worker's start.
    """
    results: list[Ruling | Exception] = []
    while len(results) < len(questions):
        left = questions[len(results) :]
        job = {"questions": [question._asdict() for question in left]}
        try:
            replies = worker.ask(job, seconds + BATCH_SECONDS * (len(left) > 1))["replies"]
        except Exception as error:
            if len(questions) == 1:
                return [error]
            return results + [result for one in left for result in ask(worker, [one], seconds)]
        for question, reply in zip(left, replies, strict=False):
            results.append(_read_reply(worker, question, reply, seconds))
    return results


def _read_reply(
    worker: RestartingWorker, question: Question, reply: dict, seconds: float
) -> Ruling | Exception:
    if "needs" in reply:  # a job outside the limit of time, once in a process
        job = {"questions": [question._asdict()]}
        try:
            (reply,) = worker.ask(job, seconds, first=reply["needs"])["replies"]
        except Exception as error:
            return error
    return RuntimeError(reply["failure"]) if "failure" in reply else Ruling(**reply)


_worker = RestartingWorker(WORKER)


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
    return _is_right(Question(MODES[require], prediction, answer))


def same_answer(mine: str, other: str) -> bool:
    """Test the mathematical equivalence of two answers that were already extracted."""
    return mine == other or _is_right(Question("answer", mine, other))


def _is_right(question: Question) -> bool:
    (result,) = ask(_worker, [question], SECONDS)
    # Late, dead or not understood: not known to be the same.
    return isinstance(result, Ruling) and result.correct
