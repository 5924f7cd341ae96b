"""Queue of an event loop in front of a scheduler: submit a request, iterate over its tokens.

One thread drives the scheduler; tasks of one event loop consume the tokens.
"""

import asyncio
import itertools
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from dapo_jax.extras.serve.errors import QueueFull, RequestError
from dapo_jax.extras.serve.requests import CompletionRequest
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import NewTokens, Prompt, Request

BURSTS_OF_FIRST_CACHES = 50  # after which an idle server starts with small caches again
FAILURE = "the decoding thread has failed"


class Responses:
    """Choices of one request; iterate once to get index and `NewTokens` of those that are sampled.

    The iteration raises `RequestError` if the generator fails.
    """

    def __init__(self, request: CompletionRequest):
        self.request = request
        self.running: list[Request] = []  # of the decoding thread
        self.unfinished = request.n * sum(budget > 0 for budget in request.budgets)
        self.chunks: asyncio.Queue[tuple[int, NewTokens] | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[tuple[int, NewTokens]]:
        while self.unfinished:
            chunk = await self.chunks.get()
            if chunk is None:
                raise RequestError(FAILURE, status=500)
            self.unfinished -= chunk[1].ended
            yield chunk
            await asyncio.sleep(0)  # let other tasks run even if many chunks are ready


class Generator:
    """Token generator for the event loop that runs now.

    Args:
        open_scheduler: returns a scheduler that has begun; called again if caches may have grown.
        slots: of the scheduler.
        max_waiting: maximum number of choices that wait for a slot.

    Attributes:
        failure: message of a failure, or empty; nothing is generated after it.
        metrics: Prometheus metrics.
    """

    def __init__(self, open_scheduler: Callable[[], Scheduler], slots: int, max_waiting: int):
        self._open, self._scheduler = open_scheduler, open_scheduler()
        self._most = slots + max_waiting
        self._loop = asyncio.get_running_loop()
        self._served: set[Responses] = set()
        self._arrivals = itertools.count()
        # What the decoding thread does between two bursts; None ends it.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.failure = ""
        self.metrics = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.metrics}
        waiting = Gauge("dapo_waiting_responses", "Responses that wait for a slot.", **options)
        waiting.set_function(lambda: max(0, self._unfinished() - slots))
        busy = Gauge("dapo_busy_slots", "Occupied slots.", **options)
        busy.set_function(lambda: min(slots, self._unfinished()))
        self._sampled = Counter("dapo_response_tokens", "Sampled tokens.", **options)
        self._thread = threading.Thread(target=self._run, name="decoding")
        self._thread.start()

    def _unfinished(self) -> int:
        return sum(responses.unfinished for responses in self._served)

    def submit(self, request: CompletionRequest) -> Responses:
        """Submit all choices of a request; they are cancelled when the caller's task ends.

        Raises:
            QueueFull: too many choices would wait to be sampled, or scored.
            RequestError: the generator has failed.
        """
        if self.failure:
            raise RequestError(self.failure, status=500)
        served = sum(responses.request.choices for responses in self._served)
        if served + request.choices > self._most:
            raise QueueFull
        responses = Responses(request)

        def leave(_: Any) -> None:
            self._served.discard(responses)
            if responses.unfinished:
                self._commands.put(lambda: self._cancel(responses))

        self._served.add(responses)
        cast(asyncio.Task, asyncio.current_task()).add_done_callback(leave)
        self._commands.put(lambda: self._start(responses))
        return responses

    def close(self) -> None:
        """End the thread; call it outside the event loop's thread, while the loop runs."""
        self._commands.put(None)
        self._thread.join()

    # --- the decoding thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                self._scheduler.step()
        except Exception as error:
            traceback.print_exception(error)
            self._loop.call_soon_threadsafe(self._fail)

    def _fail(self) -> None:
        self.failure = FAILURE
        for responses in self._served:
            responses.chunks.put_nowait(None)

    def _obey(self) -> bool:
        """Follow the commands, and wait for one if nothing is to be decoded; False: end."""
        while self._scheduler.idle or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _start(self, responses: Responses) -> None:
        if self._scheduler.idle and self._scheduler.counts.bursts > BURSTS_OF_FIRST_CACHES:
            self._scheduler.close()
            self._scheduler = self._open()
        request = responses.request
        for number, (ids, budget) in enumerate(zip(request.prompts, request.budgets, strict=True)):
            if budget:  # else only its echo is requested
                index = next(self._arrivals) if request.seed is None else number
                prompt = Prompt(index, "", "", np.array(ids, np.int32), "", "")
                running = self._scheduler.submit(
                    prompt,
                    range(request.n),
                    request.rule,
                    budget,
                    request.stop,
                    seed=request.seed,
                    watch=self._deliver(responses, number * request.n),
                )
                responses.running.append(running)

    def _deliver(self, responses: Responses, first: int) -> Callable[[NewTokens], None]:
        """Return a function that hands the tokens of choices from `first` on to the event loop."""

        def deliver(new: NewTokens) -> None:
            self._sampled.inc(len(new.ids))
            chunk = first + new.sample, new
            self._loop.call_soon_threadsafe(responses.chunks.put_nowait, chunk)

        return deliver

    def _cancel(self, responses: Responses) -> None:
        for request in responses.running:
            self._scheduler.cancel(request)
