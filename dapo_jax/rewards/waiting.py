"""Reward functions that wait (`async def`): calls on many responses at once, in one process."""

import queue
import threading
from concurrent.futures import Future
from typing import Any

from dapo_jax.runtime.workers.parent import RestartingWorker

AT_ONCE = 64  # calls that wait side by side
GRACE_SECONDS = 2.0  # for a worker to tell that calls were late


class WaitingParts:
    """Queue of responses and a thread that has them rewarded, as many at once as wait.

    Args:
        worker: process of `dapo_jax.rewards.worker parts`.
        seconds: limit of one call. A worker that holds its own loop up for longer is killed.
    """

    def __init__(self, worker: RestartingWorker, seconds: float):
        self.worker, self._seconds = worker, seconds
        self._queue: queue.SimpleQueue[tuple[dict, Future[dict]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="reward-waiting", daemon=True).start()

    def submit(self, job: dict[str, Any]) -> Future[dict[str, Any]]:
        """Future reply to a job, as `functions.compute` gives it. It never fails."""
        reply: Future[dict[str, Any]] = Future()
        self._queue.put((job, reply))
        return reply

    def _serve(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while len(batch) < AT_ONCE and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    self._queue.put(None)
                    break
                batch.append(following)
            replies = self._ask([job for job, _ in batch])
            for (_, future), reply in zip(batch, replies, strict=True):
                future.set_result(reply)

    def _ask(self, jobs: list[dict]) -> list[dict]:
        """Replies to jobs. Each is asked alone where the worker fails: one costs only itself."""
        limit = self._seconds + GRACE_SECONDS
        try:
            return self.worker.ask({"jobs": jobs}, limit, retry_late=len(jobs) == 1)["replies"]
        except Exception as error:  # the thread goes on, whatever a worker says
            if len(jobs) > 1:
                return [reply for job in jobs for reply in self._ask([job])]
            return [{"parts": {}, "broken": f"{type(error).__name__}: {error}"}]

    def close(self) -> None:
        """Ends the thread and the process; replies under way are lost."""
        self._queue.put(None)
        self.worker.close()
