"""Reward workers: threads that judge, and processes that can be killed for what is dangerous."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from dapo_jax.config import Reward
from dapo_jax.rewards.functions import OF_THE_TRAINER, worker_parts
from dapo_jax.rewards.process import WorkerProcess
from dapo_jax.rewards.remote import Memory, RemoteAlgebra
from dapo_jax.rewards.verifier import VERIFIERS
from dapo_jax.structs import Verdict

TRIES = 2  # a verdict must not depend on one worker's bad luck


class _Desk:
    """What one thread of the pool judges with: algebra, and a process for the user's parts."""

    def __init__(self, reward: Reward, memory: Memory):
        self.algebra = RemoteAlgebra(memory)
        self._names = [name for name in reward.weights() if name not in OF_THE_TRAINER]
        self._parts: WorkerProcess | None = None
        self._closed, self.kills = False, 0

    def parts_of(self, job: dict, seconds: float) -> dict:
        """`Verdict` fields of the parts that a worker computes. Never raises."""
        problem = ""
        for _ in range(TRIES if self._names else 0):
            try:
                if self._parts is None and not self._closed:
                    self._parts = WorkerProcess("parts", *self._names)
                if self._closed:
                    raise OSError("closed")
                return self._parts.ask(job, time.monotonic() + seconds)
            except (TimeoutError, OSError, ValueError) as error:
                problem = f"{self._names[0]}: {type(error).__name__}: {error}"
                self._drop()
        return {"broken": problem} if self._names else {}

    def _drop(self) -> None:
        process, self._parts = self._parts, None
        if process is not None:
            self.kills += 1
            process.kill()

    def close(self) -> None:
        self._closed = True
        self.algebra.close()
        if (process := self._parts) is not None:
            process.kill()


class RewardPool:
    """Judges responses beside the decoding: a thread per worker, and processes where needed.

    Raises `ConfigError` for a reward function that can't be found.
    """

    def __init__(self, reward: Reward):
        worker_parts(list(reward.weights()))  # a wrong name stops here, not in a worker
        self._reward, self._own, self._memory = reward, threading.local(), Memory()
        self._verify = VERIFIERS[reward.verifier]
        self._lock, self._desks, self._closed = threading.Lock(), [], False
        self._most_kills = reward.max_kills
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    @property
    def kills(self) -> int:
        """Workers that had to be killed since the start."""
        with self._lock:
            return sum(desk.kills + desk.algebra.kills for desk in self._desks)

    def begin_step(self) -> None:
        """A new budget of kills."""
        self._most_kills = self.kills + self._reward.max_kills

    def submit(self, prompt: str, response: str, answer: str) -> Future[Verdict]:
        """The verdict on one response, later. Never fails: what went wrong is in the verdict."""
        return self._threads.submit(self._judge, prompt, response, answer)

    def _judge(self, prompt: str, response: str, answer: str) -> Verdict:
        desk, seconds = self._desk(), self._reward.timeout_seconds
        known = desk.algebra.asked, desk.algebra.remembered
        correct, extracted, how, failure = False, None, "failed", None
        try:
            desk.algebra.allowed = self.kills < self._most_kills
            desk.algebra.deadline = time.monotonic() + seconds
            correct, extracted, how = self._verify(response, answer, desk.algebra)
        except Exception as error:  # a verifier's bug costs a response, never the run
            failure = f"{type(error).__name__}: {error}"
        if extracted is not None:
            asked, remembered = desk.algebra.asked, desk.algebra.remembered
            how = "algebra" if asked > known[0] else "direct"
            how = "remembered" if how == "direct" and remembered > known[1] else how
        parts = desk.parts_of({"prompt": prompt, "response": response, "answer": answer}, seconds)
        return Verdict(correct, extracted, failure, decided=how, **parts)

    def _desk(self) -> _Desk:
        if getattr(self._own, "desk", None) is None:
            self._own.desk = _Desk(self._reward, self._memory)
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
