"""Asynchronous token generation: submit requests, iterate over new tokens, cancel.

The driver's threads generate the tokens; the two APIs consume them in one event loop.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, cast

from dapo_jax.commands.serve.engine import ResponseSampling


class ResponseRequest(NamedTuple):
    """Request for one response.

    Attributes:
        ids: token ids of the prompt.
        budget: maximum tokens of the response.
    """

    ids: Sequence[int]
    budget: int
    sampling: ResponseSampling


class TokenChunk(NamedTuple):
    """New tokens of one response.

    Attributes:
        response: index of the response in its submission.
        ids: new tokens, without the end token.
        ended: True in the last chunk of the response.
    """

    response: int
    ids: list[int]
    ended: bool


class QueueFull(Exception):
    """Rejection of responses that exceed the queue's length; the client may retry."""

    def __init__(self):
        super().__init__("the queue of waiting responses is full; try again later")


class GenerationFailed(Exception):
    """Failure of a generating thread; the server answers nothing after it."""


class Responses:
    """Responses of one submission; iterate once to get the `TokenChunk`s of all of them.

    The iteration raises `GenerationFailed`.

    Attributes:
        running: the driver's requests that have not ended, by index.
    """

    def __init__(self, requests: Sequence[ResponseRequest], driver: Any):
        self._driver = driver
        self._queue = asyncio.Queue()
        add = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self._add)
        self.running = {
            index: driver.new_request(request, functools.partial(add, index))
            for index, request in enumerate(requests)
        }

    def _add(self, index: int, ids: list[int], ended: bool) -> None:
        self._queue.put_nowait(TokenChunk(index, ids, ended))

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while self.running:
            chunk = await self._queue.get()
            if isinstance(chunk, Exception):
                raise chunk
            if chunk.response not in self.running:
                continue  # it was cancelled
            if chunk.ended:
                del self.running[chunk.response]
            yield chunk
            await asyncio.sleep(0)  # let other tasks run even if many chunks are ready

    def cancel(self, index: int) -> None:
        """Cancel one response: free its slot and end its chunks."""
        if request := self.running.pop(index, None):
            self._driver.forget(request)

    def cancel_all(self) -> None:
        """Cancel all running responses."""
        for index in list(self.running):
            self.cancel(index)

    def fail(self, error: GenerationFailed) -> None:
        """End the iteration with an error."""
        self._queue.put_nowait(error)


class Generator:
    """Token generator for one event loop.

    Args:
        driver: a `jetstream_server.Driver`, or an object with its public interface.
        max_waiting: maximum number of responses that wait for a slot.

    Attributes:
        failure: message of a failed thread, or empty.
    """

    def __init__(self, driver: Any, max_waiting: int):
        self._driver = driver
        self._max_waiting = max_waiting
        self._submissions: set[Responses] = set()
        self.failure = ""

    def submit(self, requests: Sequence[ResponseRequest]) -> Responses:
        """Submit all requests or none; they are cancelled when the caller's task ends.

        Raises:
            QueueFull: too many responses would wait.
            GenerationFailed: a thread has failed.
        """
        if self.failure:
            raise GenerationFailed(self.failure)
        if self._driver.waiting + len(requests) > self._max_waiting:
            raise QueueFull
        responses = Responses(requests, self._driver)
        self._submissions.add(responses)

        def end(_: Any) -> None:
            responses.cancel_all()
            self._submissions.discard(responses)

        cast(asyncio.Task, asyncio.current_task()).add_done_callback(end)
        for request in responses.running.values():
            self._driver.place(request)
        return responses

    @property
    def waiting(self) -> int:
        """Number of responses that wait for a slot."""
        return self._driver.waiting

    @property
    def busy(self) -> int:
        """Number of occupied slots."""
        return self._driver.busy

    def check_threads(self) -> str:
        """Return the failure of a thread, after failing all submissions, or empty."""
        ended = self._driver.ended_threads()
        if ended and not self.failure:
            self.failure = f"JetStream's thread {ended[0]} has failed"
            for responses in self._submissions:
                responses.fail(GenerationFailed(self.failure))
        return self.failure

    def close(self) -> None:
        """End the threads; call it outside the event loop's thread, while the loop runs."""
        self._driver.stop()
