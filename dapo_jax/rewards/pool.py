"""Reward workers: separate processes that can be killed, spoken to in JSON lines."""

import json
import os
import queue
import select
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

from dapo_jax.config import Reward
from dapo_jax.structs import Verdict


class _Worker:
    """One process; a reply that is late or broken ends it."""

    def __init__(self, verifier: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dapo_jax.rewards.worker", verifier],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def ask(self, job: dict, timeout_seconds: float) -> dict:
        """Raises TimeoutError or OSError; the worker is then of no more use."""
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        deadline, reply = time.monotonic() + timeout_seconds, b""
        output = self._process.stdout.fileno()
        while not reply.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                raise TimeoutError
            piece = os.read(output, 65_536)
            if not piece:
                raise OSError("the worker died")
            reply += piece
        return json.loads(reply)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class RewardPool:
    """Judges responses beside the decoding.

    Attributes:
        kills: workers that had to be killed since the start.
    """

    def __init__(self, reward: Reward):
        self._reward = reward
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(reward.workers):
            self._idle.put(_Worker(reward.verifier))
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")
        self.kills = 0

    def submit(self, text: str, answer: str) -> Future[Verdict]:
        """The verdict on one response, later. Never fails: what goes wrong is in the verdict."""
        return self._threads.submit(self._judge, {"text": text, "answer": answer})

    def _judge(self, job: dict) -> Verdict:
        worker = self._idle.get()
        try:
            verdict = Verdict(**worker.ask(job, self._reward.timeout_seconds))
        except (TimeoutError, OSError, ValueError) as error:
            worker.kill()
            self.kills += 1
            worker = _Worker(self._reward.verifier)
            verdict = Verdict(False, None, f"{type(error).__name__}: {error}".rstrip(": "))
        self._idle.put(worker)
        return verdict

    def close(self) -> None:
        """Ends the worker processes; verdicts still under way are lost."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().kill()
