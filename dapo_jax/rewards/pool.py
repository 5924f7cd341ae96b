"""Pool of reward workers: threads that judge, and processes that can be killed."""

import dataclasses
import os
import pathlib
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.functions import GYM, compute, own_parts, waits
from dapo_jax.rewards.given import GIVEN, HERE, write_copies
from dapo_jax.rewards.waiting import WaitingParts
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.structs import Verdict
from dapo_jax.verifier import algebra_process
from dapo_jax.verifier.algebra_process import Memory, RemoteAlgebra
from dapo_jax.verifier.answer_conventions import as_percentage, is_unfinished
from dapo_jax.verifier.equivalence import decide, gold_answer
from dapo_jax.verifier.verifier import BY_VALUE, VERIFIERS

WORKER = "dapo_jax.rewards.worker"


class _Workers(NamedTuple):
    """Processes that one thread of the pool asks; each starts with its first job."""

    algebra: RestartingWorker
    gym: RestartingWorker
    parts: RestartingWorker


def _environment() -> dict[str, str]:
    """Variables of a worker: it finds the user's own functions wherever this process does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _joined(judged: Future[Verdict], rewarded: Future[dict]) -> Future[Verdict]:
    """Future verdict with the rewards of functions that wait, once both are there."""
    both: Future[Verdict] = Future()

    def join(reply: dict) -> None:
        if judged.cancelled():  # the pool was closed
            both.cancel()
            return
        verdict = judged.result()
        broken = verdict.broken or reply.get("broken")
        both.set_result(
            dataclasses.replace(verdict, parts=verdict.parts | reply["parts"], broken=broken)
        )

    rewarded.add_done_callback(lambda done: judged.add_done_callback(lambda _: join(done.result())))
    return both


class RewardPool:
    """Judging of responses beside the decoding: a thread per worker, and processes where needed.

    Raises:
        ConfigError: a reward function can't be found.
    """

    def __init__(self, reward: Reward):
        parts = own_parts(list(reward.weights()))  # a wrong name stops here, not in a worker
        self._reward, self._own, self._memory = reward, threading.local(), Memory()
        self._verify = VERIFIERS[reward.verifier]
        self._here = {name: parts[name] for name in parts if name.startswith(HERE)}
        named = [name for name in parts if name not in self._here]
        self._names = [name for name in named if not waits(parts[name])]
        self._files = tempfile.TemporaryDirectory(prefix="dapo_jax_", ignore_cleanup_errors=True)
        self._copies = ""
        if any(name.startswith(GIVEN) for name in named):
            self._copies = os.path.join(self._files.name, "functions")
            write_copies(named, pathlib.Path(self._copies))
        self._waiting = None
        if waiting := [name for name in named if name not in self._names]:
            self._waiting = WaitingParts(self._parts_worker(waiting), reward.timeout_seconds)
        self._lock, self._closed = threading.Lock(), False
        self._workers: list[_Workers] = []
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    @property
    def kills(self) -> int:
        """Count of worker processes that had to be killed since the start."""
        with self._lock:
            kills = sum(worker.kills for workers in self._workers for worker in workers)
        return kills + (self._waiting.worker.kills if self._waiting else 0)

    def submit(
        self, prompt: str, response: str, answer: str, source: str = "", metadata: str = ""
    ) -> Future[Verdict]:
        """Future verdict on one response. It never fails: errors are in the verdict.

        Args:
            source, metadata: those of a problem with a scorer of its own.
        """
        job = {"prompt": prompt, "response": response, "answer": answer}
        judged = self._threads.submit(self._judge, job, source, metadata)
        return judged if self._waiting is None else _joined(judged, self._waiting.submit(job))

    def _judge(self, job: dict[str, str], source: str, metadata: str) -> Verdict:
        workers, seconds = self._own_workers(), self._reward.timeout_seconds
        verdict = self._verify_with(workers.algebra, job)
        if metadata:
            verdict = self._score_with(workers.gym, verdict, source, metadata)
        here = compute(self._here, job, seconds)
        parts = {GYM: float(verdict.correct)} | verdict.parts | here["parts"]
        broken = here.get("broken")
        if self._names:
            try:
                reply = workers.parts.ask(job, seconds, retry_late=True)
                parts, broken = parts | reply["parts"], broken or reply.get("broken")
            except (OSError, ValueError) as error:
                broken = f"{self._names[0]}: {type(error).__name__}: {error}"
        return dataclasses.replace(verdict, parts=parts, broken=broken)

    def _verify_with(self, worker: RestartingWorker, job: dict[str, str]) -> Verdict:
        algebra = RemoteAlgebra(worker, self._memory, self._reward.timeout_seconds)
        gold = job["answer"]
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
            how = "remembered" if algebra.remembered else "direct"
            how = "algebra" if algebra.asked else how
            how = "undecided" if algebra.undecided and not correct else how
        return Verdict(correct, extracted, decided=how)

    def _score_with(
        self, worker: RestartingWorker, verdict: Verdict, source: str, metadata: str
    ) -> Verdict:
        """Verdict of the problem's own scorer on the extracted answer."""
        job = {"source": source, "metadata": metadata, "answer": verdict.extracted}
        try:
            seconds, first = self._reward.timeout_seconds, {"source": source}
            reply = worker.ask(job, seconds, retry_late=True, first=first)
            score, failure = float(reply["score"]), reply.get("failure")
        except (OSError, ValueError, LookupError, TypeError) as error:
            score, failure = 0.0, f"{type(error).__name__}: {error}"
        how = verdict.decided if verdict.extracted is None else "scorer"
        how = "failed" if failure else how
        return Verdict(score >= 1, verdict.extracted, failure, parts={GYM: score}, decided=how)

    def _own_workers(self) -> _Workers:
        """Workers of the thread that asks."""
        if getattr(self._own, "workers", None) is None:
            self._own.workers = _Workers(
                RestartingWorker(algebra_process.WORKER),
                RestartingWorker(WORKER, "gym", environment=_environment()),
                self._parts_worker(self._names),
            )
            with self._lock:
                self._workers.append(self._own.workers)
                if self._closed:
                    self._close_workers()
        return self._own.workers

    def _parts_worker(self, names: list[str]) -> RestartingWorker:
        arguments = "parts", self._copies, str(self._reward.timeout_seconds), *names
        return RestartingWorker(WORKER, *arguments, environment=_environment())

    def _close_workers(self) -> None:
        for worker in (worker for workers in self._workers for worker in workers):
            worker.close()

    def close(self) -> None:
        """Ends the worker processes; verdicts still under way are lost."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            self._close_workers()
        if self._waiting:
            self._waiting.close()
        self._files.cleanup()
