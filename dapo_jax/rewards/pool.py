"""Reward workers: separate processes that can be killed, spoken to in JSON lines."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from dapo_jax.config import Reward
from dapo_jax.rewards.functions import OF_THE_TRAINER, worker_parts
from dapo_jax.structs import Verdict

START_SECONDS = 60.0  # for an interpreter to come up on a busy machine
TRIES = 2  # a verdict must not depend on one worker's bad luck


class _Worker:
    """One process; a reply that is late or broken ends it."""

    def __init__(self, reward: Reward):
        parts = [name for name in reward.weights() if name not in OF_THE_TRAINER]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dapo_jax.rewards.worker", reward.verifier, *parts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        self._read_line(time.monotonic() + START_SECONDS)

    def ask(self, job: dict, timeout_seconds: float) -> dict:
        """Raises TimeoutError, OSError or ValueError; the worker is then of no more use."""
        deadline = time.monotonic() + timeout_seconds
        message, pipe = json.dumps(job).encode() + b"\n", self._process.stdin.fileno()
        while message:
            self._wait([], [pipe], deadline)
            message = message[os.write(pipe, message[:65_536]) :]
        return json.loads(self._read_line(deadline))

    def _read_line(self, deadline: float) -> bytes:
        reply, pipe = b"", self._process.stdout.fileno()
        while not reply.endswith(b"\n"):
            self._wait([pipe], [], deadline)
            piece = os.read(pipe, 65_536)
            if not piece:
                raise OSError("the worker died")
            reply += piece
        return reply

    @staticmethod
    def _wait(readable: list[int], writable: list[int], deadline: float) -> None:
        left = max(0.0, deadline - time.monotonic())
        if not any(select.select(readable, writable, [], left)):
            raise TimeoutError("no answer in time")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class RewardPool:
    """Judges responses beside the decoding: a thread and a process per worker.

    Raises `ConfigError` for a reward function that can't be found.

    Attributes:
        kills: workers that had to be killed since the start.
    """

    def __init__(self, reward: Reward):
        worker_parts(list(reward.weights()))  # a wrong name stops here, not in a worker
        self._reward, self._own = reward, threading.local()
        self._lock, self._alive = threading.Lock(), set()
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")
        self._closed, self.kills = False, 0

    def submit(self, prompt: str, response: str, answer: str) -> Future[Verdict]:
        """The verdict on one response, later. Never fails: what went wrong is in the verdict."""
        job = {"prompt": prompt, "response": response, "answer": answer}
        return self._threads.submit(self._judge, job)

    def _judge(self, job: dict) -> Verdict:
        problem = ""
        for _ in range(TRIES):
            if self._closed:
                break
            try:
                return Verdict(**self._worker().ask(job, self._reward.timeout_seconds))
            except (TimeoutError, OSError, ValueError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
                self._drop_worker()
        return Verdict(False, None, problem)

    def _worker(self) -> _Worker:
        if getattr(self._own, "worker", None) is None:
            worker = _Worker(self._reward)
            with self._lock:
                if not self._closed:
                    self._alive.add(worker)
            if self._closed:  # while it was starting: `close` could not know of it
                worker.kill()
                raise OSError("the pool is closed")
            self._own.worker = worker
        return self._own.worker

    def _drop_worker(self) -> None:
        worker, self._own.worker = getattr(self._own, "worker", None), None
        if worker is not None:
            with self._lock:
                self._alive.discard(worker)
                self.kills += 1
            worker.kill()

    def close(self) -> None:
        """Ends the worker processes; verdicts still under way are lost."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            workers, self._alive = self._alive, set()
        for worker in workers:
            worker.kill()
