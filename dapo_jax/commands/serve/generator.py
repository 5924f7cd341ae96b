"""Asynchronous front of the generator: submit, stream, cancel.

A protocol submits prompt ids with a budget and a sampling rule, and gets an iterator of new tokens
that it can cancel. JetStream's Driver generates them in threads of its own.
"""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from dapo_jax.commands.serve.engine import Draws
from dapo_jax.commands.serve.jetstream_driver import Driver, DriverRequest


class ResponseRequest(NamedTuple):
    """Request for one response.

    Attributes:
        ids: token ids of the prompt.
        budget: most tokens of the response.
        draws: sampling rule and seed.
    """

    ids: Sequence[int]
    budget: int
    draws: Draws


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
    """Refusal of responses beyond the number that may wait for a slot."""


class GenerationFailed(Exception):
    """Failure of a thread that generates; nothing is answered after it."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests, and the messages for requests beyond them.

    Attributes:
        context: most tokens of a prompt and its response together.
        prompt_bytes: bytes of a prompt's text; a longer text is not tokenized.
        vocab: vocabulary size; ids are below it.
        waiting: number of responses that may wait.
    """

    prompt_tokens: int
    prompt_bytes: int
    response_tokens: int
    context: int
    vocab: int
    waiting: int

    def most_response_tokens(self, prompt: int) -> int:
        """Most tokens of a response to a prompt of so many tokens."""
        return min(self.response_tokens, self.context - prompt)

    def budget_problem(self, field: str, budget: int) -> str:
        """Message against a budget: field, value, what is allowed. Empty if the budget is fine."""
        if 0 < budget <= self.response_tokens:
            return ""
        return f"{field} = {budget}: must be from 1 to {self.response_tokens}"

    def context_problem(self, field: str, budget: int, ids: Sequence[int]) -> str:
        """Message against a budget that the context does not leave after a prompt, else empty."""
        most = self.most_response_tokens(len(ids))
        if budget <= most:
            return ""
        return f"{field} = {budget}: must be at most {most} after a prompt of {len(ids)} tokens"

    def text_problem(self, field: str, text: str) -> str:
        """Message against a prompt's text before it is tokenized. Empty if the text is fine."""
        size = len(text.encode())
        if size <= self.prompt_bytes:
            return ""
        allowed = f"at most {self.prompt_bytes}, what {self.prompt_tokens} tokens can hold"
        return f"{field} has {size} bytes: must have {allowed}"

    def ids_problem(self, field: str, ids: Sequence[int]) -> str:
        """Message against a prompt's ids. Empty if the ids are fine."""
        if not 0 < len(ids) <= self.prompt_tokens:
            return f"{field} has {len(ids)} tokens: must have from 1 to {self.prompt_tokens}"
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocab:
                return f"{field}[{index}] = {token}: must be from 0 to {self.vocab - 1}"
        return ""


class _Channel:
    """Return channel of one response, which JetStream's threads write to."""

    def __init__(self, put: Callable[[TokenChunk], object], response: int):
        self._put, self._response = put, response

    def add_result(self, samples: list[Any]) -> None:
        (sample,) = samples
        if sample.token_ids:
            self._put(TokenChunk(self._response, sample.token_ids, False))

    def close(self) -> None:
        self._put(TokenChunk(self._response, [], True))


class Responses:
    """Responses of one submission; a single iteration gives the `TokenChunk`s of all of them.

    Raises `GenerationFailed` from the iteration.
    """

    def __init__(
        self, submitted: Sequence[ResponseRequest], forget: Callable[[DriverRequest], None]
    ):
        self._queue, self._forget = asyncio.Queue(), forget
        put = functools.partial(
            asyncio.get_running_loop().call_soon_threadsafe, self._queue.put_nowait
        )
        self.requests = {
            response: DriverRequest(
                max_tokens=request.budget,
                return_channel=_Channel(put, response),
                prefill_content=list(request.ids),
                is_client_side_tokenization=True,  # JetStream only sees ids
                draws=request.draws,
            )
            for response, request in enumerate(submitted)
        }

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while self.requests:
            chunk = await self._queue.get()
            if isinstance(chunk, Exception):
                raise chunk
            if chunk.response not in self.requests:
                continue  # it was cancelled
            if chunk.ended:
                del self.requests[chunk.response]
            yield chunk
            await asyncio.sleep(0)  # other tasks run, even where many chunks are ready

    def cancel(self, response: int) -> None:
        """Cancels one response: frees its slot and ends its chunks."""
        if request := self.requests.pop(response, None):
            self._forget(request)

    def cancel_all(self) -> None:
        """Cancels all responses that still run."""
        for response in list(self.requests):
            self.cancel(response)

    def fail(self, error: GenerationFailed) -> None:
        """Ends the iteration with an error."""
        self._queue.put_nowait(error)


class Generator:
    """Token generator for the protocols, to be used in one event loop.

    Args:
        engine: a `ServedEngine`.
        params: the result of its `load_params`.
        waiting: number of responses that may wait for a slot.
        metrics: collects JetStream's metrics for Prometheus.
    """

    def __init__(self, engine: Any, params: Any, *, waiting: int, metrics: bool):
        self._driver, self._waiting = Driver(engine, params, metrics=metrics), waiting
        self._running: set[Responses] = set()
        self.failure = ""

    def submit(self, requests: Sequence[ResponseRequest]) -> Responses:
        """Submits all of these requests or none; they are cancelled when the caller's task ends.

        Raises:
            QueueFull: not all of them may wait.
            GenerationFailed: a thread has failed before.
        """
        if self.failure:
            raise GenerationFailed(self.failure)
        if self._driver.waiting + len(requests) > self._waiting:
            raise QueueFull
        responses = Responses(requests, self._driver.forget)
        self._running.add(responses)

        def end(_: Any) -> None:
            responses.cancel_all()
            self._running.discard(responses)

        task = asyncio.current_task()
        assert task is not None  # this runs in one
        task.add_done_callback(end)
        for request in responses.requests.values():
            self._driver.place(request)
        return responses

    @property
    def waiting(self) -> int:
        """Number of responses that wait for a slot."""
        return self._driver.waiting

    @property
    def busy(self) -> int:
        """Number of slots that are taken."""
        return self._driver.busy

    def broken(self) -> str:
        """Failure of a thread, after which nothing is answered; empty while all of them run."""
        ended = self._driver.ended()
        if ended and not self.failure:
            self.failure = f"JetStream's thread {ended[0]} has failed"
            for responses in self._running:
                responses.fail(GenerationFailed(self.failure))
        return self.failure

    def close(self) -> None:
        """Ends JetStream's threads; call it while the event loop still runs, but not on it."""
        self._driver.stop()
