"""The thread that owns the device, and the queue of OpenAI's API in front of its scheduler."""

import asyncio
import collections
import itertools
import threading
import traceback
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from dapo_jax.extras.serve.fields import RequestError, need_room
from dapo_jax.extras.serve.requests import CompletionRequest
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.contracts import do_nothing
from dapo_jax.types.structs import NewTokens, Prompt, Request, Stop

FAILURE = "the device thread has failed"
IDLE_SECONDS = 1.0
Deliver = Callable[[tuple[int, NewTokens] | None], None]


class DeviceThread(threading.Thread):
    """Thread for a server's device work, made in the event loop; `serve_api` starts it.

    It calls `turn` in a loop, pauses if that returns False, and calls `finish` once closed. If one
    of them raises, it sets the message `failure`, and the event loop calls `fail`.
    """

    def __init__(
        self,
        turn: Callable[[], bool],
        finish: Callable[[], None] = do_nothing,
        fail: Callable[[], None] = do_nothing,
    ):
        super().__init__(name="device")
        self._turn, self._finish, self._fail = turn, finish, fail
        self._has_work = threading.Event()
        self._is_closed = False
        self.failure = ""
        self.loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Tell the thread that there is new work."""
        self._has_work.set()

    async def close(self) -> None:
        """End the thread after its current turn."""
        self._is_closed = True
        self.wake()
        await asyncio.to_thread(self.join)

    def run(self) -> None:
        try:
            while not self._is_closed:
                self._has_work.clear()
                if not self._turn():
                    self._has_work.wait(IDLE_SECONDS)
            self._finish()
        except Exception as error:
            traceback.print_exception(error)
            self.failure = FAILURE
            self.loop.call_soon_threadsafe(self._fail)


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
        fields, send = request.fields, self.thread.loop.call_soon_threadsafe
        stop = Stop(tuple(fields.stop))
        for number, (ids, budget) in enumerate(request.prompts):
            if not budget:  # only its echo is requested
                continue
            index = next(self._arrivals) if fields.seed is None else number
            prompt = Prompt(index, "", "", np.array(ids, np.int32), "", "")
            options = range(fields.n), request.rule, budget, stop

            def watch(new: NewTokens, first: int = number * fields.n) -> None:
                send(deliver, (first + new.sample, new))

            running.append(self._scheduler.submit(prompt, *options, seed=fields.seed, watch=watch))
