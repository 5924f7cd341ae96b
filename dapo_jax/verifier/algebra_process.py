"""Algebra in a process of its own, and `is_equivalent` on top of it."""

import collections
import hashlib
import time
from collections.abc import Callable

from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.verifier.equivalence import decide
from dapo_jax.verifier.verifier import dapo, math, math_box, math_label

WORKER = "dapo_jax.verifier.algebra_worker"
WORK = 400_000  # units of a verdict; a unit is about a microsecond
MAX_REMEMBERED = 100_000
SECONDS = 2.0  # limit of one verdict of `is_equivalent`, without a worker's start
MODES = {"any": math, "box": math_box, "label": math_label, "dapo": dapo}


class Memory:
    """Replies by question, for many verdicts and threads; the oldest are forgotten."""

    def __init__(self):
        # Single operations on it are atomic, so that no lock has to survive a fork.
        self._replies: collections.OrderedDict[bytes, dict] = collections.OrderedDict()

    def get(self, key: bytes) -> dict | None:
        return self._replies.get(key)

    def put(self, key: bytes, reply: dict) -> None:
        self._replies[key] = reply
        if len(self._replies) > MAX_REMEMBERED:
            self._replies.popitem(last=False)


class RemoteAlgebra:
    """`Algebra` of one verdict; it asks a worker process.

    The verdict has work to spend, over all its questions. A remembered reply costs what it cost
    before, so that verdicts don't depend on what was asked earlier. A late worker is killed and
    the verdict raises TimeoutError; one that died is replaced and asked again.

    Args:
        worker: a process of `algebra_worker`.
        seconds: limit of the verdict, without a worker's start.

    Attributes:
        asked, remembered, undecided: counts of questions to the worker, of questions that the
            memory answered, and of those that were neither proven equal nor different.
    """

    def __init__(self, worker: RestartingWorker, memory: Memory, seconds: float):
        self._worker, self._memory, self._work = worker, memory, WORK
        self._deadline = time.monotonic() + seconds
        self.asked = self.remembered = self.undecided = 0

    def same(self, kind: str, prediction: str, answer: str) -> bool:
        texts = repr((kind, prediction, answer)).encode("utf-8", "backslashreplace")
        key = hashlib.blake2b(texts, digest_size=16).digest()
        reply = self._memory.get(key)
        if reply is not None and reply["work"] <= self._work:
            self.remembered += 1
        else:
            reply = self._reply(kind=kind, prediction=prediction, answer=answer)
            self.asked += 1
            if "undecided" not in reply or self._work == WORK:  # more work may decide it
                self._memory.put(key, reply)
        self._work -= reply["work"]
        self.undecided += "undecided" in reply
        return reply["same"]

    def _reply(self, **job: str) -> dict:
        starts = self._worker.start_seconds
        reply = self._worker.ask(job | {"work": self._work}, self._deadline - time.monotonic())
        self._deadline += self._worker.start_seconds - starts
        return reply


_worker, _memory = RestartingWorker(WORKER), Memory()


def is_equivalent(prediction: str, answer: str, require: str = "any") -> bool:
    """Test the mathematical equivalence of answer and gold answer; never raise for texts.

    >>> is_equivalent(r"... so \\boxed{\\tfrac{3}{4}}.", "0.75")
    True
    >>> is_equivalent("Answer: 3.14", r"\\pi", require="label")  # no tolerance
    False

    Args:
        prediction: a model's response, or just its answer. Hostile: it is never evaluated, and
            what needs algebra is decided in a process with a limit on memory and time.
        answer: trusted.
        require: which markers of the response count, 'any', 'box' or 'label'; 'dapo' is the
            scorer of DAPO's released code.
    """
    judge = MODES[require]
    return _with_algebra(lambda algebra: judge(prediction, answer, algebra).correct)


def same_answer(mine: str, other: str) -> bool:
    """Test the mathematical equivalence of two answers that were already extracted."""
    return _with_algebra(lambda algebra: decide(mine, other, algebra))


def _with_algebra(judge: Callable[[RemoteAlgebra], bool]) -> bool:
    try:
        return judge(RemoteAlgebra(_worker, _memory, SECONDS))
    except Exception:  # late, dead or not understood: not known to be the same
        return False
