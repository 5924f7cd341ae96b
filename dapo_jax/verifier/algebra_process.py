"""Algebra in a process of its own, and `is_equivalent` on top of it."""

import atexit
import collections
import hashlib
import os
import threading
import time
from collections.abc import Callable

from dapo_jax.runtime.workers.parent import WorkerProcess
from dapo_jax.verifier.equivalence import decide
from dapo_jax.verifier.verifier import dapo, math, math_box, math_label
from dapo_jax.verifier.work_budget import WORK

ALGEBRA = "dapo_jax.verifier.algebra_worker"
MOST_REMEMBERED = 100_000
SECONDS = 2.0  # for one verdict of `is_equivalent`, a worker's start not counted
MODES = {"any": math, "box": math_box, "label": math_label, "dapo": dapo}


class Memory:
    """Replies by question, shared by the processes of a pool; the oldest are forgotten."""

    def __init__(self):
        self._replies: collections.OrderedDict[bytes, dict] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> dict | None:
        with self._lock:
            return self._replies.get(key)

    def put(self, key: bytes, reply: dict) -> None:
        with self._lock:
            self._replies[key] = reply
            if len(self._replies) > MOST_REMEMBERED:
                self._replies.popitem(last=False)


class RemoteAlgebra:
    """The `Algebra` that asks a worker process, started when it is first needed.

    A verdict has work to spend, over all its questions; what is remembered costs what it cost
    before, so that verdicts don't depend on what was asked earlier. A late worker is killed and
    the verdict raises TimeoutError; one that died, of whatever, is replaced and asked again.

    Attributes:
        deadline: of the verdict under way, in time.monotonic() seconds.
        work: units that the verdict may still spend.
        asked, remembered, undecided, kills: what was asked of workers, what was known, what was
            neither proven equal nor different, and workers killed.
    """

    def __init__(self, memory: Memory):
        self._memory, self._process, self._closed = memory, None, False
        self.deadline, self.work = float("inf"), WORK
        self.asked = self.remembered = self.undecided = self.kills = 0

    def begin(self, seconds: float) -> None:
        """Of a new verdict."""
        self.deadline, self.work = time.monotonic() + seconds, WORK

    def same_value(self, prediction: str, answer: str) -> bool:
        return self._ask("same_value", prediction, answer)

    def same_equation(self, prediction: str, answer: str) -> bool:
        return self._ask("same_equation", prediction, answer)

    def same_region(self, prediction: str, answer: str) -> bool:
        return self._ask("same_region", prediction, answer)

    def _ask(self, question: str, prediction: str, answer: str) -> bool:
        job = {"question": question, "prediction": prediction, "answer": answer, "work": self.work}
        texts = repr((question, prediction, answer)).encode("utf-8", "backslashreplace")
        key = hashlib.blake2b(texts, digest_size=16).digest()
        reply = self._memory.get(key)
        if reply is not None and reply["work"] <= self.work:
            self.remembered += 1
        else:
            reply = self._reply_to(job)
            self.asked += 1
            if "undecided" not in reply or self.work == WORK:  # more work may decide it
                self._memory.put(key, reply)
        self.work -= reply["work"]
        self.undecided += "undecided" in reply
        return reply["same"]

    def _reply_to(self, job: dict) -> dict:
        for last in (False, True):
            try:
                reply = self._started().ask(job, self.deadline)
                return {name: reply[name] for name in reply.keys() | {"same", "work"}}
            except TimeoutError:
                self._drop()
                raise
            except (OSError, ValueError, KeyError, TypeError):
                self._drop()
                if last:
                    raise OSError("the worker died twice") from None
        raise AssertionError

    def _started(self) -> WorkerProcess:
        if self._closed:
            raise OSError("closed")
        if self._process is None:
            left = self.deadline - time.monotonic()
            self._process = WorkerProcess(ALGEBRA)
            self.deadline = time.monotonic() + left  # the interpreter's start is not the text's
            if self._closed:
                self._drop()
                raise OSError("closed")
        return self._process

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.kills += 1
            process.kill()

    def close(self) -> None:
        """Ends the process, also one that another thread is just starting."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()


class _Shared:
    """The one process behind `is_equivalent`; a forked child makes its own."""

    def __init__(self):
        self.lock, self.algebra = threading.Lock(), RemoteAlgebra(Memory())

    def close(self) -> None:
        self.algebra.close()


_shared = _Shared()


def _forget_parents() -> None:
    global _shared
    _shared = _Shared()


os.register_at_fork(after_in_child=_forget_parents)
atexit.register(lambda: _shared.close())


def is_equivalent(prediction: str, answer: str, require: str = "any") -> bool:
    """Whether a response's answer means the same as the gold answer. Never raises for texts.

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
    """Whether two answers, already taken out of their responses, mean the same."""
    return _with_algebra(lambda algebra: decide(mine, other, algebra))


def _with_algebra(question: Callable[[RemoteAlgebra], bool]) -> bool:
    with _shared.lock:
        _shared.algebra.begin(SECONDS)
        try:
            return question(_shared.algebra)
        except Exception:  # late, dead or not understood: not known to be the same
            return False
