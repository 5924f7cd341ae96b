"""Queue of an event loop in front of a scheduler."""

import asyncio
import collections
import itertools
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from dapo_jax.extras.serve.fields import RequestError, need_room
from dapo_jax.extras.serve.requests import CompletionRequest
from dapo_jax.extras.serve.thread import FAILURE, DeviceThread
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import NewTokens, Prompt, Request, Stop

Deliver = Callable[[tuple[int, NewTokens] | None], None]


class Generator:
    """Token generator for the event loop that runs now.

    Args:
        scheduler: has begun.
        max_choices: maximum number of choices in slots, waiting for one, or being scored.
    """

    def __init__(self, scheduler: Scheduler, max_choices: int):
        self._scheduler, self._max_choices = scheduler, max_choices
        self._served: dict[Deliver, int] = {}  # numbers of choices
        self._arrivals = itertools.count()
        self._calls: collections.deque[Callable[[], Any]] = collections.deque()  # for the thread
        self.thread = DeviceThread(self._turn, fail=self._fail)

    def submit(self, request: CompletionRequest, deliver: Deliver) -> None:
        """Submit all choices of a request; they are cancelled when the caller's task ends.

        Args:
            deliver: called in the event loop with a choice's index and new tokens; with None after
                a failure.

        Raises:
            RequestError: too many choices would wait to be sampled, or scored; or the device
                thread has failed.
        """
        if self.thread.failure:
            raise RequestError(FAILURE, status=500)
        need_room(sum(self._served.values()) + request.choices <= self._max_choices)
        running: list[Request] = []  # of the device thread

        def leave(_: Any) -> None:
            del self._served[deliver]
            self._call(lambda: list(map(self._scheduler.cancel, running)))

        self._served[deliver] = request.choices
        cast(asyncio.Task, asyncio.current_task()).add_done_callback(leave)
        self._call(lambda: self._start(request, deliver, running))

    def _call(self, function: Callable[[], Any]) -> None:
        self._calls.append(function)
        self.thread.wake()

    def _fail(self) -> None:
        for deliver in self._served:
            deliver(None)

    # --- the device thread ------------------------------------------------------------------------

    def _turn(self) -> bool:
        while self._calls:
            self._calls.popleft()()
        if self._scheduler.idle:
            return False
        self._scheduler.step()
        return True

    def _start(self, request: CompletionRequest, deliver: Deliver, running: list[Request]) -> None:
        n, seed = request.fields.n, request.fields.seed
        for number, (ids, budget) in enumerate(zip(request.prompts, request.budgets, strict=True)):
            if not budget:  # only its echo is requested
                continue
            index = next(self._arrivals) if seed is None else number
            prompt = Prompt(index, "", "", np.array(ids, np.int32), "", "")
            options = range(n), request.rule, budget, Stop(tuple(request.fields.stop))

            def watch(new: NewTokens, first: int = number * n) -> None:
                chunk = first + new.sample, new
                self.thread.loop.call_soon_threadsafe(deliver, chunk)

            running.append(self._scheduler.submit(prompt, *options, seed=seed, watch=watch))
