"""Queue of an event loop in front of a scheduler: submit requests, iterate over tokens, cancel.

One thread drives the scheduler; tasks of one event loop consume the tokens.
"""

import asyncio
import collections
import dataclasses
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from dapo_jax.extras.serve.errors import QueueFull, RequestError
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import NewTokens, Prompt, Request, SamplingRule, Stop

BURSTS_OF_FIRST_CACHES = 50  # after which an idle server starts with small caches again


@dataclasses.dataclass(eq=False)
class ResponseRequest:
    """Request for one response.

    Attributes:
        ids: token ids of the prompt.
        budget: maximum tokens of the response.
        seed: from 0 to 2^64 - 1; the same seed, prompt and rule give the same response. None: the
            random key depends on the order of arrival.
        number: index of the response among those with this seed.
        running: set once it has left the queue.
    """

    ids: Sequence[int]
    budget: int
    rule: SamplingRule
    stop: Stop = Stop()
    seed: int | None = None
    number: int = 0
    running: Request | None = None


class Generator:
    """Token generator for the event loop that runs now.

    Args:
        open_scheduler: returns a scheduler that has begun; called again if caches may have grown.
        max_waiting: maximum number of responses that wait for a slot.

    Attributes:
        failure: message of a failure, or empty; nothing is generated after it.
        metrics: Prometheus metrics.
    """

    def __init__(self, open_scheduler: Callable[[], Scheduler], max_waiting: int):
        self._open, self._scheduler = open_scheduler, open_scheduler()
        self._max_waiting = max_waiting
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()  # guards the next three
        self._waiting: collections.deque[tuple[ResponseRequest, Responses, int]]
        self._waiting = collections.deque()
        self._cancelled: list[ResponseRequest] = []
        self._is_closed = False
        self._arrivals = 0
        self._running: dict[ResponseRequest, Responses] = {}
        self.failure = ""
        self.metrics = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.metrics}
        waiting = Gauge("dapo_waiting_responses", "Responses that wait for a slot.", **options)
        waiting.set_function(lambda: len(self._waiting))
        busy = Gauge("dapo_busy_slots", "Occupied slots.", **options)
        busy.set_function(lambda: len(self._running))
        self._sampled = Counter("dapo_response_tokens", "Sampled tokens.", **options)
        self._thread = threading.Thread(target=self._run, name="decoding")
        self._thread.start()

    def submit(self, requests: Sequence[ResponseRequest]) -> "Responses":
        """Submit all requests or none; they are cancelled when the caller's task ends.

        Raises:
            QueueFull: too many responses would wait.
            RequestError: the generator has failed.
        """
        responses = Responses(self, requests)
        with self._changed:
            if self.failure:
                raise RequestError(self.failure, status=500)
            if len(self._waiting) + len(requests) > self._max_waiting:
                raise QueueFull
            self._waiting.extend((request, responses, i) for i, request in enumerate(requests))
            self._changed.notify()
        cast(asyncio.Task, asyncio.current_task()).add_done_callback(responses.cancel_all)
        return responses

    def cancel(self, request: ResponseRequest) -> None:
        """Free the slot of a response, or remove it from the queue."""
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify()

    def close(self) -> None:
        """End the thread; call it outside the event loop's thread, while the loop runs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    # --- the decoding thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._fill()
                for request, _ in self._scheduler.step():
                    self._running = {r: x for r, x in self._running.items() if r.running != request}
        except Exception as error:
            traceback.print_exception(error)
            with self._changed:
                self.failure = "the decoding thread has failed"
                waiting = {responses for _, responses, _ in self._waiting}
            for responses in {*self._running.values(), *waiting}:
                self._loop.call_soon_threadsafe(responses.chunks.put_nowait, None)

    def _fill(self) -> None:
        """Cancel requests, and start those that have room; wait if there is nothing to do."""
        scheduler = self._scheduler
        with self._changed:
            while scheduler.idle and not (self._waiting or self._cancelled or self._is_closed):
                self._changed.wait()
            cancelled, self._cancelled = {*self._cancelled}, []
            kept = [entry for entry in self._waiting if entry[0] not in cancelled]
            room = max(scheduler.room, 0)
            self._waiting = collections.deque(kept[room:])
            started = kept[:room]
        for request in cancelled & self._running.keys():
            del self._running[request]
            scheduler.cancel(cast(Request, request.running))
        if scheduler.idle and scheduler.counts.bursts > BURSTS_OF_FIRST_CACHES:
            scheduler.close()
            self._scheduler = self._open()
        for request, responses, index in started:
            self._running[request] = responses
            self._start(request, responses, index)

    def _start(self, request: ResponseRequest, responses: "Responses", index: int) -> None:
        number = request.number if request.seed is not None else self._arrivals
        self._arrivals += request.seed is None
        prompt = Prompt(number, "", "", np.array(request.ids, np.int32), "", "")

        def deliver(new: NewTokens) -> None:
            self._sampled.inc(len(new.ids))
            self._loop.call_soon_threadsafe(responses.chunks.put_nowait, (index, new))

        request.running = self._scheduler.submit(
            prompt,
            [0],
            request.rule,
            request.budget,
            request.stop,
            seed=request.seed,
            watch=deliver,
        )


class Responses:
    """Responses of one submission; iterate once to get index and `NewTokens` of all of them.

    The iteration raises `RequestError` if the generator fails.
    """

    def __init__(self, generator: Generator, requests: Sequence[ResponseRequest]):
        self._generator = generator
        self._running = dict(enumerate(requests))
        self.chunks: asyncio.Queue[tuple[int, NewTokens] | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, NewTokens]]:
        while self._running:
            chunk = await self.chunks.get()
            if chunk is None:
                raise RequestError(self._generator.failure, status=500)
            if chunk[0] not in self._running:
                continue  # it was cancelled
            if chunk[1].ended:
                del self._running[chunk[0]]
            yield chunk
            await asyncio.sleep(0)  # let other tasks run even if many chunks are ready

    def cancel(self, index: int) -> None:
        """Cancel one response: free its slot and end its chunks."""
        if request := self._running.pop(index, None):
            self._generator.cancel(request)

    def cancel_all(self, _: Any = None) -> None:
        for index in list(self._running):
            self.cancel(index)
