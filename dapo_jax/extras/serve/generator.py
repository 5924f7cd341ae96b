"""Asynchronous token generation: submit requests, iterate over new tokens, cancel.

One thread prefills prompts and decodes all slots; tasks of one event loop consume the tokens.
Training compiles one sampling rule into its programs. Here rules are data, like the random keys,
so that one program serves all requests.
"""

import asyncio
import collections
import dataclasses
import threading
import traceback
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from dapo_jax.extras.serve.budgets import prefill_tokens
from dapo_jax.extras.serve.errors import QueueFull, RequestError
from dapo_jax.model.caches import DecodeState, Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.sampling import SAMPLE_BY_SEED, repeat_rule, sample_key
from dapo_jax.types.structs import SamplingRule


class ResponseSampling(NamedTuple):
    """Sampling rule and random key of a response.

    Attributes:
        seed: from 0 to 2^64 - 1; the same seed, prompt and rule give the same response. None: the
            key depends on the engine's seed and the order of arrival.
        number: index of the response among those with this seed.
    """

    rule: SamplingRule
    seed: int | None = None
    number: int = 0


class ServedEngine(PolicyEngine):
    """Engine with a sampling rule per slot; `rule` is the default."""

    RULE_PER_SLOT = True
    rule = SamplingRule()
    longest_prompt: int  # without padding
    context: int  # maximum tokens of a prompt and its response together

    def prefill(self, *, sampling: ResponseSampling | None = None, **options: Any) -> Prefix:
        """Prefill a prompt; `sampling` overrides the default rule and key."""
        if sampling and sampling.seed is not None:
            high, low = divmod(sampling.seed, 2**32)
            options["key"] = sample_key(low, SAMPLE_BY_SEED, np.uint32(high), sampling.number)
        prefix = super().prefill(**options)
        rule = sampling.rule if sampling else self.rule
        return prefix.replace(rules=repeat_rule(rule, len(prefix.true_length)))

    def shrink(self, state: DecodeState) -> DecodeState:
        """Return a state without occupied slots, its caches as short as initially."""
        first = self.layout.window(1)
        has_grown = not self.pages and self.layout.longest(cast(Any, state.caches)) > first
        return self.init_decode_state() if has_grown else state


class TokenChunk(NamedTuple):
    """New tokens of one response.

    Attributes:
        response: index of the response in its submission.
        ids: new tokens, without the end token.
        ended: True in the last chunk of the response.
        end: the end token that was sampled.
    """

    response: int
    ids: list[int]
    ended: bool
    end: int | None = None


@dataclasses.dataclass(eq=False)
class ResponseRequest:
    """Request for one response; the generator sets the fields after `sampling`.

    Attributes:
        ids: token ids of the prompt.
        budget: maximum tokens of the response.
        chunks: receives `TokenChunk`s; None: the generator has failed.
        cached: number of tokens in the slot's cache after the last dispatched step.
        sampled: number of sampled tokens, the end token included.
    """

    ids: Sequence[int]
    budget: int
    sampling: ResponseSampling
    index: int = 0
    chunks: asyncio.Queue = dataclasses.field(default_factory=asyncio.Queue)
    cached: int = 0
    sampled: int = 0
    is_cancelled: bool = False
    has_ended: bool = False


class Generator:
    """Token generator for the event loop that runs now.

    Args:
        params: decoding weights.
        max_waiting: maximum number of responses that wait for a slot.

    Attributes:
        failure: message of a failure, or empty; nothing is generated after it.
        metrics: Prometheus metrics.
    """

    def __init__(self, engine: ServedEngine, params: Any, max_waiting: int):
        self._engine = engine
        self._params = params
        self._max_waiting = max_waiting
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()  # guards the next two
        self._waiting: collections.deque[ResponseRequest] = collections.deque()
        self._is_closed = False
        self._running: dict[int, ResponseRequest] = {}  # by slot
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
            self._waiting.extend(requests)
            self._changed.notify()
        cast(asyncio.Task, asyncio.current_task()).add_done_callback(responses.cancel_all)
        return responses

    def cancel(self, request: ResponseRequest) -> None:
        """Free the slot of a response, or remove it from the queue."""
        with self._changed:
            request.is_cancelled = True
            if request in self._waiting:
                self._waiting.remove(request)

    def close(self) -> None:
        """End the thread; call it outside the event loop's thread, while the loop runs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    # --- the decoding thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._decode()
        except Exception as error:
            traceback.print_exception(error)
            with self._changed:
                self.failure = "the decoding thread has failed"
                unfinished = [*self._running.values(), *self._waiting]
            for request in unfinished:
                self._loop.call_soon_threadsafe(request.chunks.put_nowait, None)

    def _decode(self) -> None:
        """Decode until `close`; the host reads the tokens of a step during the next one."""
        state = self._engine.init_decode_state()
        unread = None
        while not self._is_closed:
            state = self._fill_slots(state)
            dispatched = None
            if self._running:
                requests = dict(self._running)
                longest = max(request.cached for request in requests.values())
                longest = None if self._engine.pages else longest
                state, result = self._engine.generate(self._params, state, longest=longest)
                tokens = jnp.asarray(result.data)
                tokens.copy_to_host_async()
                for request in requests.values():
                    request.cached += 1
                dispatched = (tokens, requests)
            if unread:
                self._read_step(*unread)
            unread = dispatched

    def _fill_slots(self, state: DecodeState) -> DecodeState:
        """Start waiting responses in the free slots; if all slots are free, wait for one."""
        for slot in range(self._engine.max_concurrent_decodes):
            if slot in self._running:
                continue
            is_idle = not self._running
            with self._changed:
                while is_idle and not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting or self._is_closed:
                    return state
                request = self._waiting.popleft()
                self._running[slot] = request
            if is_idle:
                state = self._engine.shrink(state)
            length = len(request.ids)
            request.cached = length
            prefix = self._engine.prefill(
                params=self._params,
                padded_tokens=np.pad(request.ids, (0, prefill_tokens(length) - length)),
                true_length=length,
                sampling=request.sampling,
            )
            state = self._engine.insert(prefix, state, slot=slot)
        return state

    def _read_step(self, tokens: jax.Array, requests: dict[int, ResponseRequest]) -> None:
        """Deliver the tokens of a step, and free the slots of responses that have ended."""
        rows = np.asarray(tokens).tolist()
        for slot, request in requests.items():
            if request.has_ended:  # after this step was dispatched
                continue
            token, is_valid, _ = rows[slot]  # the third is the response's length
            is_end = not is_valid or token in self._engine.shape.end_ids
            request.sampled += 1
            is_full = request.sampled == request.budget
            request.has_ended = is_end or is_full or request.is_cancelled
            ids = [] if is_end else [token]
            self._sampled.inc(len(ids))
            chunk = TokenChunk(request.index, ids, request.has_ended, token if is_end else None)
            self._loop.call_soon_threadsafe(request.chunks.put_nowait, chunk)
            if request.has_ended:
                del self._running[slot]


class Responses:
    """Responses of one submission; iterate once to get the `TokenChunk`s of all of them.

    The iteration raises `RequestError` if the generator fails.
    """

    def __init__(self, generator: Generator, requests: Sequence[ResponseRequest]):
        self._generator = generator
        self._running = dict(enumerate(requests))
        self._chunks = asyncio.Queue()
        for index, request in enumerate(requests):
            request.index = index
            request.chunks = self._chunks

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while self._running:
            chunk = await self._chunks.get()
            if chunk is None:
                raise RequestError(self._generator.failure, status=500)
            if chunk.response not in self._running:
                continue  # it was cancelled
            if chunk.ended:
                del self._running[chunk.response]
            yield chunk
            await asyncio.sleep(0)  # let other tasks run even if many chunks are ready

    def cancel(self, index: int) -> None:
        """Cancel one response: free its slot and end its chunks."""
        if request := self._running.pop(index, None):
            self._generator.cancel(request)

    def cancel_all(self, _: Any = None) -> None:
        for index in list(self._running):
            self.cancel(index)
