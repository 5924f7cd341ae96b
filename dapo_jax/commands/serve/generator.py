"""Whoever generates tokens, behind one small interface: JetStream's Driver over the engine.

A protocol submits ids with a budget and a rule, and gets an iterator of drawn ids that it can
cancel. It knows nothing of what runs behind that.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dapo_jax.commands.serve.engine import Draws
from dapo_jax.commands.serve.jetstream_driver import Driver, Request


class Asked(NamedTuple):
    """A response that is asked for.

    Attributes:
        ids: of the prompt.
        budget: the most tokens of the response.
    """

    ids: Sequence[int]
    budget: int
    draws: Draws


class Drawn(NamedTuple):
    """What a response has become longer by.

    Attributes:
        response: its place in what was submitted.
        ids: new tokens, the end token left out.
        ended: nothing more will come.
    """

    response: int
    ids: list[int]
    ended: bool


class Busy(Exception):
    """As many responses wait as may wait."""


class GenerationFailed(Exception):
    """What generates has broken."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What may be asked for, and the sentences for what may not.

    Attributes:
        prompt_bytes: of a text; longer ones are not tokenized.
        vocab: ids are below it.
        waiting: responses that may wait.
    """

    prompt_tokens: int
    prompt_bytes: int
    response_tokens: int
    vocab: int
    waiting: int

    def budget_problem(self, field: str, budget: int) -> str:
        """What is wrong with a budget: field, value, what is allowed. Empty: nothing."""
        if 0 < budget <= self.response_tokens:
            return ""
        return f"{field} = {budget}: must be from 1 to {self.response_tokens}"

    def text_problem(self, field: str, text: str) -> str:
        """What is wrong with a prompt's text before it is tokenized. Empty: nothing."""
        size = len(text.encode())
        if size <= self.prompt_bytes:
            return ""
        allowed = f"at most {self.prompt_bytes}, what {self.prompt_tokens} tokens can hold"
        return f"{field} has {size} bytes: must have {allowed}"

    def ids_problem(self, field: str, ids: Sequence[int]) -> str:
        """What is wrong with a prompt's ids. Empty: nothing."""
        if not 0 < len(ids) <= self.prompt_tokens:
            return f"{field} has {len(ids)} tokens: must have from 1 to {self.prompt_tokens}"
        for place, token in enumerate(ids):
            if not 0 <= token < self.vocab:
                return f"{field}[{place}] = {token}: must be from 0 to {self.vocab - 1}"
        return ""


class _Channel:
    """Where JetStream's threads put what a request is answered."""

    def __init__(self, put: Callable[[Drawn], object], response: int):
        self._put, self._response = put, response

    def add_result(self, samples: list[Any]) -> None:
        (sample,) = samples
        if sample.token_ids:
            self._put(Drawn(self._response, sample.token_ids, False))

    def close(self) -> None:
        self._put(Drawn(self._response, [], True))


class Responses:
    """What was submitted together: iterate over it once, for `Drawn` of any of them.

    Raises `GenerationFailed` from the iteration.
    """

    def __init__(self, asked: Sequence[Asked], forget: Callable[[Request], None]):
        self._queue, self._forget = asyncio.Queue(), forget
        put = functools.partial(
            asyncio.get_running_loop().call_soon_threadsafe, self._queue.put_nowait
        )
        self.requests = {
            number: Request(
                max_tokens=one.budget,
                return_channel=_Channel(put, number),
                prefill_content=list(one.ids),
                is_client_side_tokenization=True,  # ids are all that is asked of JetStream
                draws=one.draws,
            )
            for number, one in enumerate(asked)
        }

    async def __aiter__(self) -> AsyncIterator[Drawn]:
        while self.requests:
            drawn = await self._queue.get()
            if isinstance(drawn, Exception):
                raise drawn
            if drawn.response not in self.requests:
                continue  # it was cancelled
            if drawn.ended:
                del self.requests[drawn.response]
            yield drawn
            await asyncio.sleep(0)  # where much is ready, others and news of a client get a turn

    def cancel(self, response: int) -> None:
        """That one is wanted no more: its slot is freed, and its iteration ends."""
        if request := self.requests.pop(response, None):
            self._forget(request)

    def cancel_all(self) -> None:
        """None is wanted any more."""
        for response in list(self.requests):
            self.cancel(response)

    def fail(self, error: GenerationFailed) -> None:
        """Ends the iteration by that error."""
        self._queue.put_nowait(error)


class Generator:
    """JetStream's Driver, as protocols see it. To be used in one event loop.

    Args:
        driver: already running.
        waiting: how many responses may wait for a slot.
    """

    def __init__(self, driver: Driver, waiting: int):
        self._driver, self._waiting = driver, waiting
        self._running: set[Responses] = set()
        self.failure = ""

    def submit(self, asked: Sequence[Asked]) -> Responses:
        """All of these or none; they are cancelled when the task that submits them ends.

        Raises `Busy` where not all of them may wait, `GenerationFailed` where nothing answers.
        """
        if self.failure:
            raise GenerationFailed(self.failure)
        if self._driver.waiting + len(asked) > self._waiting:
            raise Busy
        responses = Responses(asked, self._driver.forget)
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

    def broken(self) -> str:
        """What has failed; empty while nothing has. Then nothing more is answered."""
        ended = self._driver.ended()
        if ended and not self.failure:
            self.failure = f"JetStream's thread {ended[0]} has failed"
            for responses in self._running:
                responses.fail(GenerationFailed(self.failure))
        return self.failure

    def stop(self) -> None:
        """Ends JetStream's threads; call it while the event loop still runs, but not on it."""
        self._driver.stop()


@contextlib.contextmanager
def generating(engine: Any, params: Any, *, waiting: int, metrics: bool) -> Iterator[Generator]:
    """A `Generator` over the engine.

    Args:
        engine: a `ServedEngine`.
        params: as its `load_params` returns them.
        metrics: collect JetStream's, for Prometheus.
    """
    driver = Driver(engine, params, metrics=metrics)
    try:
        yield Generator(driver, waiting)
    finally:
        driver.stop()
