"""Background writer: pieces of work on a thread of their own, in order, few of them ahead."""

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MAX_WAITING = 4  # each may hold a step's responses in memory


class Background:
    """Thread that does pieces of work in the order they were given.

    Where `MAX_WAITING` of them wait, the caller waits too: what is to be written cannot pile up.
    When the program ends, or fails, what was given is done first.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._given: collections.deque[Future[Any]] = collections.deque()

    def give(self, work: Callable[[], Any]) -> None:
        """Queues a piece of work. Raises what an earlier one raised."""
        while self._given and (len(self._given) > MAX_WAITING or self._given[0].done()):
            self._given.popleft().result()
        self._given.append(self._thread.submit(work))

    def drain(self) -> None:
        """Returns when all is done. Raises what a piece of work raised."""
        while self._given:
            self._given.popleft().result()
