"""Scorers: `score(call)` awaits a reply, which holds the failure if there is one.

ProcessScorer  a function in processes that are killed if they are late
AsyncScorer    an async function, whose calls wait side by side in a process
LocalScorer    a function in this process, which nothing can kill
BatchScorer    the verifier, for many responses at a time
"""

import asyncio
import collections
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dapo_jax.rewards.functions import Call, PartsReply, RewardFunction, make_failure
from dapo_jax.runtime.workers.parent import LATE_FACTOR, Limits, RestartingWorker
from dapo_jax.runtime.workers.pool import WorkerPool
from dapo_jax.types.structs import Outcome

GRACE_SECONDS = 2.0  # for a process with async calls to reply, beyond the limit of a call


class BatchScorer:
    """Scorer on the threads of a pool; a free thread takes its share of all waiting calls.

    Args:
        answer: returns the replies to calls; its first argument is the processes of the thread.
        together: maximum number of calls of one `answer`.
    """

    def __init__(self, pool: WorkerPool, threads: int, together: int, answer: Callable):
        self._pool, self._threads, self._together, self._answer = pool, threads, together, answer
        self._queue: collections.deque[tuple[Any, asyncio.Future]] = collections.deque()
        self._lock = threading.Lock()

    async def score(self, calls: Sequence[Any]) -> list[Any]:
        """Return the replies to calls."""
        loop = asyncio.get_running_loop()
        jobs = [(call, loop.create_future()) for call in calls]
        self._queue.extend(jobs)
        for _ in jobs:
            self._pool.submit(self._work, loop)
        return await asyncio.gather(*(reply for _, reply in jobs))

    def _work(self, workers: Any, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            share = math.ceil(len(self._queue) / self._threads)
            jobs = [self._queue.popleft() for _ in range(min(share, self._together))]
        jobs = [(call, reply) for call, reply in jobs if not reply.cancelled()]
        if jobs:
            values = self._answer(workers, [call for call, _ in jobs])
            loop.call_soon_threadsafe(_settle, [reply for _, reply in jobs], values)


def _settle(replies: Sequence[asyncio.Future], values: Sequence[Any]) -> None:
    for reply, value in zip(replies, values, strict=True):
        if not reply.cancelled():
            reply.set_result(value)


class ProcessScorer:
    """Scorer that calls a function in a pool's worker processes, `seconds` at most."""

    def __init__(self, function: RewardFunction, seconds: float, pool: WorkerPool):
        self._function, self._seconds, self._pool = function, seconds, pool

    async def score(self, call: Call) -> PartsReply:
        return await asyncio.wrap_future(self._pool.submit(self._ask, call))

    def _ask(self, workers: Any, call: Call) -> PartsReply:
        job = {"name": self._function.name, "call": call}
        seconds = math.inf if self._function.concurrency else self._seconds
        try:
            return PartsReply.from_json(workers[0].ask(job, Limits(seconds, LATE_FACTOR * seconds)))
        except Exception as error:
            text = f"{self._function.name}: {type(error).__name__}: {error}"
            return PartsReply({}, make_failure(error, Outcome.CRASH, text))


class LocalScorer(ProcessScorer):
    """Scorer in this process: async calls in the event loop, others in the pool's threads."""

    def __init__(self, function: RewardFunction, seconds: float, pool: WorkerPool, most: int):
        super().__init__(function, seconds, pool)
        self._free = asyncio.Semaphore(most)

    async def score(self, call: Call) -> PartsReply:
        if not self._function.is_async:
            return await super().score(call)
        async with self._free:
            return await self._function.score_async(call, self._seconds)

    def _ask(self, workers: Any, call: Call) -> PartsReply:
        return self._function.score(call, self._seconds)


class AsyncScorer(ProcessScorer):
    """Scorer in a process that is asked which calls have ended.

    If it dies or does not reply, each call that it had is made again alone. A call whose reply
    nobody awaits any more is not made, or stopped.

    Attributes:
        unread: counts, such as requests to a judge, of the stopped calls.
    """

    def __init__(
        self,
        function: RewardFunction,
        seconds: float,
        pool: WorkerPool,
        most: int,
        worker: RestartingWorker,
    ):
        super().__init__(function, seconds, pool)
        self.worker, self._free = worker, asyncio.Semaphore(most)
        self.unread = collections.Counter[str]()
        self._calls: dict[str, tuple[Call, asyncio.Future]] = {}
        self._sent: set[str] = set()
        self._numbers = map(str, itertools.count())
        self._polling: asyncio.Task | None = None

    async def score(self, call: Call) -> PartsReply:
        async with self._free:
            number, future = next(self._numbers), asyncio.get_running_loop().create_future()
            self._calls[number] = call, future
            if self._polling is None or self._polling.done():
                self._polling = asyncio.create_task(self._poll())
            try:
                reply = await future
            finally:
                self._calls.pop(number, None)
        return reply or await super().score(call)

    async def _poll(self) -> None:
        limits = Limits(self._seconds + GRACE_SECONDS)
        while self._calls or self._sent:
            start = {n: call for n, (call, _) in self._calls.items() if n not in self._sent}
            job = {"start": start, "stop": [*(self._sent - self._calls.keys())]}
            self._sent |= start.keys()
            try:
                reply = await asyncio.to_thread(self.worker.ask, job, limits)
                done, running = reply["done"], reply["running"]
            except Exception:  # it died, was late, or wrote something else
                done, running = {}, []
            for number in self._sent.difference(running):
                fields = done.get(number)
                result = fields and PartsReply.from_json(fields)
                _, future = self._calls.pop(number, (None, None))
                if future and not future.done():
                    future.set_result(result)
                elif result:
                    self.unread.update(result.counts)
            self._sent.intersection_update(running)
