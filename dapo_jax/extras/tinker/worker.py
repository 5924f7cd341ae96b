"""The thread that owns the device: it runs the requests of all clients in a fair order.

It takes turns between models, each of which runs its requests in the order of their numbers, and
between a request of a model and a burst of sampling.
"""

import asyncio
import contextlib
import json
import threading
import time
import traceback

from dapo_jax.extras.serve.errors import RequestError, need
from dapo_jax.extras.tinker.models import Operations, find_checkpoint, shape_of
from dapo_jax.extras.tinker.policies import Policies
from dapo_jax.extras.tinker.sampling import Decoding, SampleJob, Weights, read_job, render
from dapo_jax.extras.tinker.store import Request, State, Store

GAP_SECONDS = 60.0  # that a request waits for those before it
IDLE_SECONDS = 1.0
TIDY_SECONDS = 600.0
SAMPLE_KIND = "sample"


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
        self._turns: dict[str, int] = {}  # when models ran last
        self._jobs: dict[str, SampleJob] = {}  # by request, in order of arrival
        self._decoding: Decoding | None = None
        self._has_work = threading.Event()
        self._is_closed = False
        self.failure = ""
        self._thread = threading.Thread(target=self._work, name="tinker")
        self._thread.start()

    async def wait(self, request_id: str, seconds: float) -> tuple[State, bytes | None] | None:
        """Return the result of a request; it is pending if it takes longer than `seconds`."""
        ended = self._waiters.setdefault(request_id, asyncio.Event())
        stored = await asyncio.to_thread(self._store.result, request_id)
        if stored is None or stored[0] != State.PENDING:
            ended.set()
            self._waiters.pop(request_id, None)
            return stored
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
        return await asyncio.to_thread(self._store.result, request_id)

    async def close(self) -> None:
        """End the thread after its current request, and write the models."""
        self._is_closed = True
        self.wake()
        await asyncio.to_thread(self._thread.join)

    def wake(self) -> None:
        """Tell the thread that there is a new request."""
        self._has_work.set()

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            tidied = -TIDY_SECONDS
            while not self._is_closed:
                if time.monotonic() - tidied > TIDY_SECONDS:
                    tidied = time.monotonic()
                    self._store.tidy()
                self._has_work.clear()
                pending = self._store.pending()
                trained = self._train([r for r in pending if r.kind != SAMPLE_KIND])
                if not (self._sample([r for r in pending if r.kind == SAMPLE_KIND]) or trained):
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
                self._notify(request)
            except Exception as error:
                if not isinstance(error, RequestError):  # such as too little memory
                    self._operations.discard(request.owner)
                self._fail(request, error)
            return True
        return False

    # --- sampling ---------------------------------------------------------------------------------

    def _sample(self, pending: list[Request]) -> bool:
        """Run a burst of sampling; return False if nothing waits.

        Requests of the same weights decode together. Later ones join unless others wait.
        """
        for request in pending:
            if request.id not in self._jobs:
                self._open(request)
        if not self._jobs:
            return False
        weights = (self._decoding or next(iter(self._jobs.values()))).weights
        jobs = [job for job in self._jobs.values() if job.weights == weights]
        try:
            self._burst(weights, jobs)
        except Exception as error:
            self._decoding = None
            for job in jobs:
                if self._jobs.pop(job.stored.id, None):
                    self._fail(job.stored, error)
        return True

    def _burst(self, weights: Weights, jobs: list[SampleJob]) -> None:
        """Decode a few tokens of jobs with these weights."""
        policies, shape = self._policies, weights.shape
        if self._decoding is None:
            folder = str(self._store.checkpoint_folder(weights.path)) if weights.path else ""
            params = policies.decoding_weights(shape, folder, weights.created)
            self._decoding = Decoding(weights, policies.engine(shape), params, policies.tokenizer)
        decoding = self._decoding
        if len(jobs) < len(self._jobs):
            jobs = [job for job in jobs if job.running or job.stored.arrived <= decoding.began]
        finished = decoding.burst(jobs)
        for job, responses in finished:
            result = render(job, responses, policies.scorer(shape), decoding.params)
            self._store.finish(job.stored, State.DONE, result)
            del self._jobs[job.stored.id]
            self._notify(job.stored)
        if len(finished) == len(jobs):
            self._decoding = None  # frees its caches

    def _open(self, request: Request) -> None:
        """Read a request to sample, and find its weights."""
        policies = self._policies
        try:
            sampler = self._store.get("sampler", request.owner)
            if sampler is None:
                raise RequestError(f"sampling_session_id = {request.owner!r}: is unknown")
            weights = Weights(sampler.fields["path"], None)
            if weights.path:
                entry = find_checkpoint(self._store, weights.path, "sampler_weights")
                weights = Weights(weights.path, shape_of(entry), entry.created)
            # Not of the session's name: the same calls in another session draw the same.
            key = f"{policies.config.seed} {sampler.fields['number']} {request.number}"
            body = self._store.body(request.id)
            self._jobs[request.id] = read_job(request, weights, body, key, policies.limits)
        except RequestError as error:
            self._fail(request, error)
