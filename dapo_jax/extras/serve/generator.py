"""Queue of an event loop in front of a scheduler: submit a request, iterate over its tokens."""

import asyncio
import functools
import itertools
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from dapo_jax.extras.serve.errors import RequestError, queue_full
from dapo_jax.extras.serve.requests import CompletionRequest
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import NewTokens, Prompt, Request, Stop

FAILURE = "the decoding thread has failed"


class Responses:
    """Choices of one request; iterate once to get index and `NewTokens` of those that are sampled.

    The iteration raises `RequestError` if the generator fails.
    """

    def __init__(self, request: CompletionRequest):
        self.request = request
        self.running: list[Request] = []  # of the decoding thread
        self.unfinished = request.fields.n * sum(budget > 0 for budget in request.budgets)
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
    """Token generator for the event loop that runs now; a thread drives the scheduler.

    Args:
        scheduler: has begun.
        max_choices: maximum number of choices in slots, waiting for one, or being scored.

    Attributes:
        failure: message of a failure, or empty; nothing is generated after it.
    """

    def __init__(self, scheduler: Scheduler, max_choices: int):
        self._scheduler, self._max_choices = scheduler, max_choices
        self._served: set[Responses] = set()
        self._arrivals = itertools.count()
        # What the thread does before its next burst; without any it goes on decoding.
        self._calls: list[Callable[[], None]] = []
        self._has_calls = asyncio.Event()
        self.failure = ""
        self._loop, self._thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "decoding")
        self._task = self._loop.create_task(self._run())

    def submit(self, request: CompletionRequest) -> Responses:
        """Submit all choices of a request; they are cancelled when the caller's task ends.

        Raises:
            RequestError: too many choices would wait to be sampled, or scored; or the generator
                has failed.
        """
        if self.failure:
            raise RequestError(self.failure, status=500)
        served = sum(responses.request.choices for responses in self._served)
        if served + request.choices > self._max_choices:
            raise queue_full()
        responses = Responses(request)

        def leave(_: Any) -> None:
            self._served.discard(responses)
            if responses.unfinished:
                self._call(lambda: self._cancel(responses))

        self._served.add(responses)
        cast(asyncio.Task, asyncio.current_task()).add_done_callback(leave)
        self._call(lambda: self._start(responses))
        return responses

    async def close(self) -> None:
        """End the thread after its burst."""
        self._task.cancel()
        self._call(lambda: None)
        await asyncio.to_thread(self._thread.shutdown)

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.append(function)
        self._has_calls.set()

    async def _run(self) -> None:
        try:
            while True:
                if self._scheduler.idle:
                    await self._has_calls.wait()
                self._has_calls.clear()
                calls, self._calls = self._calls, []
                await self._loop.run_in_executor(self._thread, self._decode, calls)
        except Exception as error:
            traceback.print_exception(error)
            self.failure = FAILURE
            for responses in self._served:
                responses.chunks.put_nowait(None)

    # --- the decoding thread ----------------------------------------------------------------------

    def _decode(self, calls: list[Callable[[], None]]) -> None:
        for call in calls:
            call()
        while not (self._scheduler.idle or self._calls):
            self._scheduler.step()

    def _start(self, responses: Responses) -> None:
        request = responses.request
        n, seed = request.fields.n, request.fields.seed
        for number, (ids, budget) in enumerate(zip(request.prompts, request.budgets, strict=True)):
            if not budget:  # only its echo is requested
                continue
            index = next(self._arrivals) if seed is None else number
            prompt = Prompt(index, "", "", np.array(ids, np.int32), "", "")
            options = range(n), request.rule, budget, Stop(tuple(request.fields.stop))
            watch = functools.partial(self._deliver, responses, number * n)
            running = self._scheduler.submit(prompt, *options, seed=seed, watch=watch)
            responses.running.append(running)

    def _deliver(self, responses: Responses, first: int, new: NewTokens) -> None:
        """Hand tokens of a prompt's choices, the first of which is `first`, to the event loop."""
        chunk = first + new.sample, new
        self._loop.call_soon_threadsafe(responses.chunks.put_nowait, chunk)

    def _cancel(self, responses: Responses) -> None:
        for request in responses.running:
            self._scheduler.cancel(request)
