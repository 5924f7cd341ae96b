"""Verdicts of groups: the verifier, then functions of a response, then functions of the group.

A scorer's `score(call)` awaits a reply, which holds the failure if there is one:

ProcessScorer  a function in processes that are killed if they are late
AsyncScorer    an async function, whose calls wait side by side in a process
LocalScorer    a function in this process, which nothing can kill
BatchScorer    the verifier, for many responses at a time
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from dapo_jax.config.experiment import Reward
from dapo_jax.config.settings import changed, open_extras
from dapo_jax.rewards.functions import (
    GYM,
    TOKENS,
    Call,
    GroupCall,
    PartsReply,
    ResponseCall,
    RewardFunction,
    find_functions,
    make_failure,
    place_rewards,
)
from dapo_jax.rewards.verifying import WORKER, open_verifier, open_workers, verify_and_score
from dapo_jax.runtime.workers.parent import LATE_FACTOR, Limits, RestartingWorker
from dapo_jax.runtime.workers.pickled_functions import IN_PROCESS_PREFIX, FunctionCopies
from dapo_jax.runtime.workers.pool import WorkerPool
from dapo_jax.types.structs import Completion, Failure, Outcome, Prompt, Verdict

GRACE_SECONDS = 2.0  # for a process with async calls to reply, beyond the limit of a call


class BatchScorer:
    """Scorer on the threads of a pool; a free thread takes its share of all waiting calls.

    Args:
        answer: returns the replies to calls; its first argument is the processes of the thread.
        together: maximum number of calls of one `answer`.
    """

    def __init__(self, pool: WorkerPool, threads: int, together: int, answer: Callable):
        self._pool, self._threads, self._together, self._answer = pool, threads, together, answer
        self._queue: collections.deque[tuple[Any, asyncio.Future]] = collections.deque()
        self._busy = set[asyncio.Task | None]()  # one per thread

    async def score(self, calls: Sequence[Any]) -> list[Any]:
        """Return the replies to calls."""
        loop = asyncio.get_running_loop()
        jobs = [(call, loop.create_future()) for call in calls]
        self._queue.extend(jobs)
        for _ in range(min(len(jobs), self._threads - len(self._busy))):
            self._busy.add(loop.create_task(self._empty_queue()))
        return await asyncio.gather(*(reply for _, reply in jobs))

    async def _empty_queue(self) -> None:
        try:
            while self._queue:
                share = math.ceil(len(self._queue) / self._threads)
                jobs = [self._queue.popleft() for _ in range(min(share, self._together))]
                jobs = [(call, reply) for call, reply in jobs if not reply.cancelled()]
                calls = [call for call, _ in jobs]
                try:
                    values = calls and await asyncio.wrap_future(
                        self._pool.submit(self._answer, calls)
                    )
                    for (_, reply), value in zip(jobs, values, strict=True):
                        if not reply.cancelled():
                            reply.set_result(value)
                except Exception as error:  # else those who asked would wait for ever
                    for reply in (reply for _, reply in jobs if not reply.done()):
                        reply.set_exception(error)
        finally:  # at once: a callback would run after a `score` that then waits for ever
            self._busy.discard(asyncio.current_task())


class ProcessScorer:
    """Scorer that calls a function in a pool's worker processes, within the reward's limit."""

    def __init__(self, function: RewardFunction, reward: Reward, pool: WorkerPool):
        self._function, self._seconds, self._pool = function, reward.timeout_seconds, pool
        self._free = asyncio.Semaphore(function.concurrency or reward.concurrency)  # if it is async

    async def score(self, call: Call) -> PartsReply:
        return await asyncio.wrap_future(self._pool.submit(self._ask, call))

    def _ask(self, workers: Any, call: Call) -> PartsReply:
        job = {"name": self._function.name, "call": call}
        seconds = math.inf if self._function.concurrency else self._seconds
        try:
            return PartsReply.from_json(workers[0].ask(job, Limits(seconds, LATE_FACTOR * seconds)))
        except Exception as error:
            text = f"{self._function.name}: {type(error).__name__}: {error}"
            return PartsReply({}, make_failure(error, Outcome.CRASH, text))


class LocalScorer(ProcessScorer):
    """Scorer in this process: async calls in the event loop, others in the pool's threads."""

    async def score(self, call: Call) -> PartsReply:
        if not self._function.is_async:
            return await super().score(call)
        async with self._free:
            return await self._function.score_async(call, self._seconds)

    def _ask(self, workers: Any, call: Call) -> PartsReply:
        return self._function.score(call, self._seconds)


class AsyncScorer(ProcessScorer):
    """Scorer in a process that is asked which calls have ended.

    If it dies or does not reply, each call that it had is made again alone. A call whose reply
    nobody awaits any more is not made, or stopped; the next reply has its counts too, such as
    requests to a judge.
    """

    def __init__(self, worker: RestartingWorker, *own: Any):
        super().__init__(*own)
        self.worker = worker
        self._counts = collections.Counter[str]()  # that no reply has had
        self._calls: dict[str, tuple[Call, asyncio.Future]] = {}
        self._sent: set[str] = set()
        self._numbers = map(str, itertools.count())
        self._polling: asyncio.Task | None = None

    async def score(self, call: Call) -> PartsReply:
        async with self._free:
            number, future = next(self._numbers), asyncio.get_running_loop().create_future()
            self._calls[number] = call, future
            if self._polling is None or self._polling.done():
                self._polling = asyncio.create_task(self._poll())
            try:
                reply = await future
            finally:
                self._calls.pop(number, None)
        return reply or await super().score(call)

    async def _poll(self) -> None:
        limits = Limits(self._seconds + GRACE_SECONDS)
        while self._calls or self._sent:
            start = {n: call for n, (call, _) in self._calls.items() if n not in self._sent}
            job = {"start": start, "stop": [*(self._sent - self._calls.keys())]}
            self._sent |= start.keys()
            try:
                reply = await asyncio.to_thread(self.worker.ask, job, limits)
                done, running = reply["done"], reply["running"]
            except Exception:  # it died, was late, or wrote something else
                done, running = {}, []
            for number in self._sent.difference(running):
                _, future = self._calls.pop(number, (None, None))
                result = PartsReply.from_json(done[number]) if number in done else None
                self._counts.update(result.counts if result else {})
                if future and not future.done():
                    future.set_result(result and result._replace(counts=dict(self._counts)))
                    self._counts = self._counts if result is None else collections.Counter()
            self._sent.intersection_update(running)


class RewardPool:
    """Verdicts and rewards of responses, computed while decoding continues.

    Args:
        split: returns the text that each token of a response adds; for rewards of tokens.
        extras: settings of verifiers and parts that are plug-ins.

    Raises:
        ConfigError: a reward function can't be found.
    """

    def __init__(
        self,
        reward: Reward,
        split: Callable[[list[int]], Sequence[str]] = lambda _: (),
        extras: Any = None,
    ):
        extras = extras or open_extras()
        self._reward, self._weights, self._split = reward, reward.weights(), split
        self.verifier = open_verifier(reward, extras)
        functions = find_functions([*self._weights], extras=extras)  # fails here, not in a worker
        self._of_groups = [f for f in functions.values() if f.sees_group]
        self._of_responses = [f for f in functions.values() if not f.sees_group]
        self._reads_verdicts = reward.reads_verdicts() or bool(self._of_groups)
        in_workers = [name for name in functions if not name.startswith(IN_PROCESS_PREFIX)]
        self._copies = FunctionCopies(in_workers)
        words = self._copies.path, str(reward.timeout_seconds), json.dumps(changed(extras))
        open_functions = functools.partial(RestartingWorker, WORKER, "functions", *words)
        workers = [
            (open_functions(*in_workers), *open_workers(self.verifier))
            for _ in range(reward.workers)
        ]
        self._pool = WorkerPool(workers, "reward")
        self._verifiers = BatchScorer(
            self._pool,
            reward.workers,
            self.verifier.together,
            lambda workers, jobs: verify_and_score(self.verifier, workers[1:], jobs),
        )
        self._scorers: dict[str, ProcessScorer] = {}
        for name, function in functions.items():
            own = function, reward, self._pool
            if name not in in_workers:
                self._scorers[name] = LocalScorer(*own)
            elif function.is_async:
                self._scorers[name] = AsyncScorer(open_functions(name), *own)
            else:
                self._scorers[name] = ProcessScorer(*own)
        self._async = [s for s in self._scorers.values() if isinstance(s, AsyncScorer)]
        self._running = collections.Counter[str]()  # calls by function
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, daemon=True, name="rewards").start()

    @property
    def kills(self) -> int:
        """Number of worker processes that had to be killed."""
        return self._pool.kills + sum(scorer.worker.kills for scorer in self._async)

    @property
    def running(self) -> list[str]:
        """Names of the reward functions that are being called."""
        return sorted(+self._running.copy())

    def submit_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Future[list[Verdict]]:
        """Return the future verdicts on all responses to a prompt.

        It never fails: a verdict holds its failure. It is cancelled if the pool is closed. Cancel
        it if nobody will read the verdicts: then no further functions are called.
        """
        with self._lock:
            if not self._closed:
                work = self._score_group(prompt, completions)
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        closed: Future[list[Verdict]] = Future()
        closed.cancel()
        return closed

    def close(self) -> None:
        """End the worker processes; pending verdicts are cancelled."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(TimeoutError):  # of a function in this process
            asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(GRACE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._pool.close()
        for scorer in self._async:
            scorer.worker.close()
        self._copies.close()

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    # --- in the event loop ----------------------------------------------------------------------

    async def _score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> list[Verdict]:
        verdicts = await self._score_responses(prompt, completions)
        scored = [i for i, verdict in enumerate(verdicts) if verdict.failure is None]
        if self._of_groups and scored:
            texts = [completions[i].text for i in scored]
            lengths = [len(completions[i]) for i in scored]
            correct = [bool(verdicts[i].correct and len(completions[i])) for i in scored]
            call = GroupCall(prompt.text, texts, prompt.answer, lengths, correct, prompt.columns)
            for parts, failure, counts in await self._ask(self._of_groups, call):
                for j, i in enumerate(scored):
                    share = {name: values[j] for name, values in parts.items()}
                    reply = PartsReply(share, failure, {} if j else counts)
                    verdicts[i] = self._add(verdicts[i], [reply])
        return verdicts

    async def _score_responses(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> list[Verdict]:
        with_tokens = any(TOKENS in function.arguments for function in self._of_responses)
        calls = []
        for done in completions:
            pieces = self._split(done.last_turn.tolist()) if with_tokens else None
            own = prompt.text, done.text, prompt.answer
            calls.append(ResponseCall(*own, pieces, prompt.columns))
        verdicts: list[Verdict] = await self._verifiers.score([(prompt, call) for call in calls])
        for i, (done, verdict) in enumerate(zip(completions, verdicts, strict=True)):
            failure = verdict.failure if self._reads_verdicts else None
            if done.lost_environment:
                failure = Failure(Outcome.ENVIRONMENT_ERROR, done.failures[-1])
            parts = {GYM: float(verdict.correct)} | verdict.parts
            verdicts[i] = dataclasses.replace(verdict, parts=parts, failure=failure)

        async def add_parts(done: Completion, call: ResponseCall, verdict: Verdict) -> Verdict:
            if verdict.failure:
                return verdict
            return self._add(verdict, await self._ask(self._of_responses, call), done)

        if self._of_responses:
            verdicts = await asyncio.gather(*map(add_parts, completions, calls, verdicts))
        return verdicts

    async def _ask(self, functions: Sequence[RewardFunction], call: Call) -> list[PartsReply]:
        """Return the replies of functions; async ones are called last, and after no failure."""
        replies: list[PartsReply] = []
        for waits in (False, True):
            names = [function.name for function in functions if function.is_async == waits]
            if any(reply.failure for reply in replies):
                break
            self._running.update(names)
            try:
                work = (self._scorers[name].score(call) for name in names)
                replies += await asyncio.gather(*work)
            finally:
                self._running.subtract(names)
        return replies

    def _add(
        self, verdict: Verdict, replies: Iterable[PartsReply], done: Completion | None = None
    ) -> Verdict:
        """Add replies to a verdict, lists to the tokens of the response that is `done`."""
        parts, failure, total = dict(verdict.parts), verdict.failure, verdict.token_rewards
        for reply in replies:
            failure = failure or reply.failure
            for name, count in reply.counts.items():
                parts[name] = parts.get(name, 0.0) + count
            for name, value in reply.parts.items():
                if done and isinstance(value, list):
                    try:
                        own = place_rewards(value, done, self._split)
                    except ValueError as error:
                        failure = failure or Failure(Outcome.USER_ERROR, f"{name}: {error}")
                        continue
                    value = float(own.sum())
                    weighted = self._weights[name] * own
                    total = (weighted if total is None else weighted + total).tolist()
                parts[name] = value
        return dataclasses.replace(verdict, parts=parts, failure=failure, token_rewards=total)
