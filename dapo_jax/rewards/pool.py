"""Reward workers: threads that judge, and processes that can be killed for what is dangerous."""

import dataclasses
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.functions import GYM, HERE, compute, own_parts
from dapo_jax.runtime.workers.parent import WorkerProcess
from dapo_jax.structs import Verdict
from dapo_jax.verifier.algebra_process import Memory, RemoteAlgebra
from dapo_jax.verifier.answer_conventions import as_percentage, is_unfinished
from dapo_jax.verifier.equivalence import decide, gold_answer
from dapo_jax.verifier.verifier import BY_VALUE, VERIFIERS

WORKER = "dapo_jax.rewards.worker"
TRIES = 2  # a verdict must not depend on one worker's bad luck


class _Desk:
    """What one thread of the pool judges with: algebra, and processes for the functions of others.

    Attributes:
        kills: workers that had to be killed, those of the algebra aside.
    """

    def __init__(self, memory: Memory):
        self.algebra, self.kills = RemoteAlgebra(memory), 0
        self._processes: dict[tuple[str, ...], WorkerProcess] = {}
        self._closed = False

    def ask(self, kind: tuple[str, ...], job: dict, seconds: float) -> dict:
        """The reply of that kind of worker. Raises TimeoutError, OSError or ValueError."""
        for last in range(TRIES - 1, -1, -1):
            try:
                if self._closed:
                    raise OSError("closed")
                if kind not in self._processes:
                    # The user's own functions are found wherever this process finds them.
                    path = os.pathsep.join(filter(None, sys.path))
                    variables = os.environ | {"PYTHONPATH": path}
                    self._processes[kind] = WorkerProcess(WORKER, *kind, environment=variables)
                    if self._closed:  # while it was starting: `close` could not know of it
                        raise OSError("closed")
                return self._processes[kind].ask(job, time.monotonic() + seconds)
            except (TimeoutError, OSError, ValueError):
                process = self._processes.pop(kind, None)
                if process is not None:
                    self.kills += 1
                    process.kill()
                if not last:
                    raise
        raise AssertionError

    def close(self) -> None:
        self._closed = True
        self.algebra.close()
        for process in list(self._processes.values()):
            process.kill()


class RewardPool:
    """Judges responses beside the decoding: a thread per worker, and processes where needed.

    Raises `ConfigError` for a reward function that can't be found.
    """

    def __init__(self, reward: Reward):
        parts = own_parts(list(reward.weights()))  # a wrong name stops here, not in a worker
        self._reward, self._own, self._memory = reward, threading.local(), Memory()
        self._verify = VERIFIERS[reward.verifier]
        self._here = {name: parts[name] for name in parts if name.startswith(HERE)}
        self._names = [name for name in parts if name not in self._here]
        self._lock, self._desks, self._closed = threading.Lock(), [], False
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    @property
    def kills(self) -> int:
        """Workers that had to be killed since the start."""
        with self._lock:
            return sum(desk.kills + desk.algebra.kills for desk in self._desks)

    def submit(
        self, prompt: str, response: str, answer: str, source: str = "", metadata: str = ""
    ) -> Future[Verdict]:
        """The verdict on one response, later. Never fails: what went wrong is in the verdict.

        Args:
            source, metadata: of a problem with a scorer of its own.
        """
        job = {"prompt": prompt, "response": response, "answer": answer}
        return self._threads.submit(self._judge, job, source, metadata)

    def _judge(self, job: dict[str, str], source: str, metadata: str) -> Verdict:
        desk = self._desk()
        verdict = self._verify_with(desk, job)
        if metadata:
            verdict = self._score_with(desk, verdict, source, metadata)
        here = compute(self._here, job)
        parts = {GYM: float(verdict.correct)} | verdict.parts | here["parts"]
        broken = here.get("broken")
        if self._names:
            try:
                reply = desk.ask(("parts", *self._names), job, self._reward.timeout_seconds)
                parts, broken = parts | reply["parts"], broken or reply.get("broken")
            except (TimeoutError, OSError, ValueError) as error:
                broken = f"{self._names[0]}: {type(error).__name__}: {error}"
        return dataclasses.replace(verdict, parts=parts, broken=broken)

    def _verify_with(self, desk: _Desk, job: dict[str, str]) -> Verdict:
        algebra, gold = desk.algebra, job["answer"]
        asked, remembered, undecided = algebra.asked, algebra.remembered, algebra.undecided
        algebra.begin(self._reward.timeout_seconds)
        try:
            correct, extracted, how = self._verify(job["response"], gold, algebra)
            value = extracted if self._reward.verifier in BY_VALUE else None
            if value is not None and not correct and self._reward.percent == "as_asked":
                number = as_percentage(value, job["prompt"])
                correct = number is not None and decide(number, gold_answer(gold), algebra)
            if value is not None and correct and self._reward.unfinished == "wrong":
                if is_unfinished(value, gold_answer(gold), job["prompt"]):
                    return Verdict(False, extracted, decided="unfinished")
        except Exception as error:  # a verifier's bug costs a response, never the run
            return Verdict(False, None, f"{type(error).__name__}: {error}", decided="failed")
        if extracted is not None:
            how = "remembered" if algebra.remembered > remembered else "direct"
            how = "algebra" if algebra.asked > asked else how
            how = "undecided" if algebra.undecided > undecided and not correct else how
        return Verdict(correct, extracted, decided=how)

    def _score_with(self, desk: _Desk, verdict: Verdict, source: str, metadata: str) -> Verdict:
        """The verdict of the problem's own scorer on the answer that was found."""
        job = {"source": source, "metadata": metadata, "answer": verdict.extracted}
        try:
            reply = desk.ask(("gym",), job, self._reward.timeout_seconds)
            score, failure = float(reply["score"]), reply.get("failure")
        except (TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
            score, failure = 0.0, f"{type(error).__name__}: {error}"
        how = verdict.decided if verdict.extracted is None else "scorer"
        how = "failed" if failure else how
        return Verdict(score >= 1, verdict.extracted, failure, parts={GYM: score}, decided=how)

    def _desk(self) -> _Desk:
        if getattr(self._own, "desk", None) is None:
            self._own.desk = _Desk(self._memory)
            with self._lock:
                self._desks.append(self._own.desk)
                if self._closed:
                    self._own.desk.close()
        return self._own.desk

    def close(self) -> None:
        """Ends the worker processes; verdicts still under way are lost."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            for desk in self._desks:
                desk.close()
