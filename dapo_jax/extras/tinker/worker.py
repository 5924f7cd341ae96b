"""The requests of all clients, which the device thread runs in a fair order.

It takes turns between models, each of which runs its requests in the order of their numbers, and
between a request of a model and a burst of sampling.
"""

import asyncio
import contextlib
import json
import time
import traceback

from dapo_jax.extras.serve.fields import RequestError, need
from dapo_jax.extras.serve.thread import DeviceThread
from dapo_jax.extras.tinker.models import Operations
from dapo_jax.extras.tinker.policies import Policies
from dapo_jax.extras.tinker.sampling import Sampling
from dapo_jax.extras.tinker.store import Request, State, Store

GAP_SECONDS = 60.0  # that a request waits for those before it
TIDY_SECONDS = 600.0
SAMPLE_KIND = "sample"


class Worker:
    """Runs stored requests in the device thread; tasks of the event loop wait for their results."""

    def __init__(self, policies: Policies, store: Store):
        self._store = store
        self._operations = Operations(policies, store)
        self._sampling = Sampling(policies, store, self._end)
        self._waiters: dict[str, asyncio.Event] = {}
        self._turns: dict[str, int] = {}  # when models ran last
        self._tidied = -TIDY_SECONDS
        self.thread = DeviceThread(self._turn, self._operations.close)

    async def wait(self, request_id: str, seconds: float) -> tuple[State, bytes | None] | None:
        """Return the result of a request; it is pending if it takes longer than `seconds`."""
        ended = self._waiters.setdefault(request_id, asyncio.Event())
        stored = await asyncio.to_thread(self._store.result, request_id)
        if stored is None or stored[0] != State.PENDING:
            self._wake(request_id)
            return stored
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
        return await asyncio.to_thread(self._store.result, request_id)

    def _wake(self, request_id: str) -> None:
        """Tell the tasks that wait for a request that it has ended."""
        if event := self._waiters.pop(request_id, None):
            event.set()

    # --- the device thread ------------------------------------------------------------------------

    def _turn(self) -> bool:
        if time.monotonic() - self._tidied > TIDY_SECONDS:
            self._tidied = time.monotonic()
            self._store.tidy()
        pending = self._store.pending()
        trained = self._train([r for r in pending if r.kind != SAMPLE_KIND])
        return self._sampling.turn([r for r in pending if r.kind == SAMPLE_KIND]) or trained

    def _end(self, request: Request, result: bytes | Exception | None = None) -> None:
        """Store the response to a request, or its error, unless that is done; wake who waits."""
        if isinstance(result, bytes):
            self._store.finish(request, State.DONE, result)
        elif result is not None:
            error = {"error": str(result), "category": "user"}
            if not isinstance(result, RequestError):
                traceback.print_exception(result)
                error = {"error": "internal server error", "category": "server"}
            self._store.finish(request, State.FAILED, json.dumps(error).encode())
        self.thread.loop.call_soon_threadsafe(self._wake, request.id)

    def _train(self, pending: list[Request]) -> bool:
        """Run a request of the next model; return False if none can run."""
        first: dict[str, Request] = {}
        for request in sorted(pending, key=lambda request: request.number):
            first.setdefault(request.owner, request)
        now = time.time()
        for request in sorted(first.values(), key=lambda r: self._turns.get(r.owner, 0)):
            expected = self._store.last_number(request.owner) + 1
            if request.number > expected and now - request.arrived < GAP_SECONDS:
                continue
            self._turns[request.owner] = max(self._turns.values(), default=0) + 1
            try:
                allowed = f"{expected}: requests run in the order of their numbers"
                need(request.number == expected, "seq_id", request.number, allowed)
                self._operations.run(request)
                self._end(request)
            except Exception as error:
                if not isinstance(error, RequestError):  # such as too little memory
                    self._operations.discard(request.owner)
                self._end(request, error)
            return True
        return False
