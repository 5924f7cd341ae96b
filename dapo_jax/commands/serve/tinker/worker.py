"""The thread that owns the device: it runs the requests of all clients in a fair order.

It takes turns between models, each of which runs its requests in the order of their numbers, and
between a request of a model and a burst of sampling.
"""

import asyncio
import collections
import json
import threading
import time
import traceback
from typing import Any, NamedTuple

from dapo_jax.commands.serve.errors import RequestError
from dapo_jax.commands.serve.tinker.operations import Operations, find_checkpoint, shape_of
from dapo_jax.commands.serve.tinker.policies import Policies
from dapo_jax.commands.serve.tinker.requests import ModelShape, need, read_sample_request
from dapo_jax.commands.serve.tinker.sampling import Decoding, SampleJob, open_job, render
from dapo_jax.commands.serve.tinker.store import Request, State, Store

GAP_SECONDS = 60.0  # that a request waits for those before it
IDLE_SECONDS = 1.0
SAMPLE_KIND = "sample"


class Lane(NamedTuple):
    """Weights that requests sample from: a checkpoint's path, empty for the base model."""

    path: str
    shape: ModelShape | None
    created: float = 0.0


class Worker:
    """Thread that runs stored requests; tasks of the event loop wait for their results.

    Attributes:
        failure: message if the thread has failed, else empty.
    """

    def __init__(self, policies: Policies, store: Store):
        self._policies = policies
        self._store = store
        self._operations = Operations(policies, store)
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, asyncio.Event] = {}
        self._lane = Lane("", None)  # that decodes
        self._decoding: Decoding | None = None
        self._running: list[SampleJob] = []
        # Jobs of other weights, in the order of their turns.
        self._lanes: collections.OrderedDict[Lane, list[SampleJob]] = collections.OrderedDict()
        self._turns: dict[str, int] = {}  # when models ran last
        self._jobs: set[str] = set()  # requests to sample that were opened
        self._has_work = threading.Event()
        self._is_closed = False
        self.failure = ""
        self._thread = threading.Thread(target=self._work, name="tinker")
        self._thread.start()

    async def wait(self, request_id: str, seconds: float) -> tuple[State, bytes | None] | None:
        """Return the result of a request; it is pending if it takes longer than `seconds`."""
        ended = self._waiters.setdefault(request_id, asyncio.Event())
        stored = await asyncio.to_thread(self._store.read_result, request_id)
        if stored is None or stored[0] != State.PENDING:
            ended.set()
            self._waiters.pop(request_id, None)
            return stored
        try:
            await asyncio.wait_for(ended.wait(), seconds)
        except TimeoutError:
            return stored
        return await asyncio.to_thread(self._store.read_result, request_id)

    def close(self) -> None:
        """End the thread after its current request, and write the models."""
        self._is_closed = True
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        """Tell the thread that there is a new request."""
        self._has_work.set()

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_closed:
                self._has_work.clear()
                trained = self._train()
                if not (self._sample() or trained):
                    self._has_work.wait(IDLE_SECONDS)
            self._operations.close()
        except Exception as error:
            traceback.print_exception(error)
            self.failure = "the worker thread has failed"

    def _notify(self, request: Request) -> None:
        def wake() -> None:
            if event := self._waiters.pop(request.id, None):
                event.set()

        self._loop.call_soon_threadsafe(wake)

    def _fail(self, request: Request, error: Exception) -> None:
        """Store the error of a request."""
        category, message = "user", str(error)
        if not isinstance(error, RequestError):
            traceback.print_exception(error)
            category, message = "server", "internal server error"
        result = json.dumps({"error": message, "category": category}).encode()
        self._store.finish(request, State.FAILED, result)
        self._notify(request)

    def _train(self) -> bool:
        """Run a request of the model whose turn it is; return False if none can run."""
        waiting = self._store.first_pending(SAMPLE_KIND)
        now = time.time()
        due = [
            w for w in waiting if w.request.number <= w.expected or now - w.arrived > GAP_SECONDS
        ]
        if not due:
            return False
        request, _, expected = min(due, key=lambda w: self._turns.get(w.request.owner, 0))
        self._turns[request.owner] = max(self._turns.values(), default=0) + 1
        try:
            allowed = f"{expected}: requests run in the order of their numbers"
            need(request.number == expected, "seq_id", request.number, allowed)
            self._operations.run(request)
            self._notify(request)
        except Exception as error:
            if not isinstance(error, RequestError):  # such as too little memory
                self._operations.discard(request.owner)
            self._fail(request, error)
        return True

    def _sample(self) -> bool:
        """Run a burst of sampling; return False if nothing waits."""
        for request in self._store.pending(SAMPLE_KIND):
            if request.id not in self._jobs:
                self._open(request)
        if not self._running:
            self._decoding = None  # frees its caches
        if not (self._running or self._lanes):
            return False
        try:
            policies = self._policies
            if self._decoding is None:
                self._lane, self._running = self._lanes.popitem(last=False)
                engine = policies.engine(self._lane.shape)
                self._decoding = Decoding(engine, self._weights(), policies.tokenizer)
                self._decoding.jobs.extend(self._running)
            elif len(self._lanes) == 1 and self._lane in self._lanes:  # no other weights wait
                jobs = self._lanes.pop(self._lane)
                self._running += jobs
                self._decoding.jobs.extend(jobs)
            for job in self._decoding.burst():
                result = render(job, policies.scorer(self._lane.shape), self._weights())
                self._store.finish(job.stored, State.DONE, result)
                self._running.remove(job)
                self._jobs.discard(job.stored.id)
                self._notify(job.stored)
        except Exception as error:
            for job in self._running:
                self._jobs.discard(job.stored.id)
                self._fail(job.stored, error)
            self._running = []
        return True

    def _weights(self) -> Any:
        """Return the decoding weights of the lane."""
        path, shape, created = self._lane
        folder = str(self._store.checkpoint_folder(path)) if path else ""
        return self._policies.decoding_weights(shape, folder, created)

    def _open(self, request: Request) -> None:
        """Put a request to sample into the lane of its weights."""
        policies = self._policies
        try:
            sampler = self._store.get("sampler", request.owner)
            if sampler is None:
                raise RequestError(f"sampling_session_id = {request.owner!r}: is unknown")
            sample = read_sample_request(self._store.body(request.id), policies.limits)
            lane = Lane(sampler.fields["path"], None)
            if lane.path:
                entry = find_checkpoint(self._store, lane.path, "sampler_weights")
                lane = Lane(lane.path, shape_of(entry), entry.created)
        except RequestError as error:
            self._fail(request, error)
            return
        # Not of the session's name: the same calls in another session draw the same.
        key = f"{policies.config.seed} {sampler.fields['number']} {request.number}"
        self._jobs.add(request.id)
        self._lanes.setdefault(lane, []).append(open_job(request, sample, key))
