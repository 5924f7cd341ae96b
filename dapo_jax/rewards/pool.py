"""Pool of reward workers: threads that verify and reward responses in killable processes."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.functions import (
    TOKENS,
    Call,
    GroupCall,
    PartsReply,
    ResponseCall,
    arguments,
    compute,
    find_functions,
    is_async,
    make_failure,
    place_rewards,
    sees_group,
)
from dapo_jax.rewards.group_rewards import GYM
from dapo_jax.rewards.scoring import SCORE_SECONDS, ScoreReply, ScoreRequest, scores
from dapo_jax.rewards.verifying import WORKER, Workers, open_verifier
from dapo_jax.runtime.workers.parent import (
    BUSY_FACTOR,
    LATE_FACTOR,
    ComputedTooLong,
    Limits,
    RestartingWorker,
)
from dapo_jax.runtime.workers.pickled_functions import IN_PROCESS_PREFIX, FunctionCopies
from dapo_jax.runtime.workers.pool import WorkerPool
from dapo_jax.types.structs import (
    SLOW,
    Completion,
    Failure,
    Outcome,
    Prompt,
    Verdict,
    present,
    reaches,
)

MAX_CONCURRENT_CALLS = 64  # of async functions
GRACE_SECONDS = 2.0  # for a worker to report that calls were late

Place = Callable[[list], np.ndarray]  # from a list that a function returned to rewards of tokens


# --- reward functions -----------------------------------------------------------------------


class _Parts:
    """Reward functions of a config, assigned to this process and to workers."""

    def __init__(self, reward: Reward):
        self._seconds = reward.timeout_seconds
        # Fails here, not in a worker.
        functions = find_functions(list(reward.weights()), reward=reward)
        self._settings = json.dumps(dataclasses.asdict(reward))
        self._in_process = {n: f for n, f in functions.items() if n.startswith(IN_PROCESS_PREFIX)}
        in_workers = [name for name in functions if name not in self._in_process]
        self._async_names = [name for name in in_workers if is_async(functions[name])]
        self.names = [name for name in in_workers if name not in self._async_names]
        own = (getattr(functions[name], "longest_seconds", 0.0) for name in self._async_names)
        self._batch_seconds = max(self._seconds, *own, 0.0) + GRACE_SECONDS
        self._of_group = {name for name, function in functions.items() if sees_group(function)}
        self.any_of_group = bool(self._of_group)
        self.any_of_response = bool({*self._in_process, *self.names} - self._of_group)
        self.any_with_tokens = any(TOKENS in arguments(f) for f in functions.values())
        self._copies = FunctionCopies(in_workers)
        self._running: collections.Counter[str] = collections.Counter()  # calls by function
        self._lock = threading.Lock()
        self._queue: collections.deque[tuple[Call, Future[PartsReply]]] = collections.deque()
        self._async_pool = WorkerPool(
            1, lambda: (self.open_worker(self._async_names),), "async-reward"
        )

    def open_worker(self, names: list[str]) -> RestartingWorker:
        """Return a process for these functions."""
        settings = (self._copies.path, str(self._seconds), self._settings)
        return RestartingWorker(WORKER, "parts", *settings, *names)

    @property
    def kills(self) -> int:
        return self._async_pool.kills

    def running(self) -> list[str]:
        """Return the names of the functions that are being called."""
        with self._lock:
            return sorted(+self._running)

    @contextlib.contextmanager
    def _calling(self, names: Collection[str]) -> Iterator[None]:
        with self._lock:
            self._running.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._running.subtract(names)

    def _select(self, names: Sequence[str], call: Call) -> list[str]:
        is_group = isinstance(call, GroupCall)
        return [name for name in names if (name in self._of_group) == is_group]

    def compute(self, call: Call, worker: RestartingWorker) -> PartsReply:
        """Return the rewards of this process and of a worker, without async functions there."""
        with self._calling(self._select([*self._in_process], call)):
            (own,) = compute(self._in_process, [call], self._seconds)
        names = self._select(self.names, call)
        if not names:
            return own
        with self._calling(names):
            (reply,) = self._ask(worker, [call], self._seconds, f"{names[0]}: ")
        return PartsReply(own.parts | reply.parts, own.failure or reply.failure)

    def submit_async(self, call: Call) -> list[Future[PartsReply]]:
        """Return the future reply of the async functions; empty if there are none for the call."""
        if not self._select(self._async_names, call):
            return []
        reply: Future[PartsReply] = Future()
        self._queue.append((call, reply))
        self._async_pool.submit(self._answer_queue)
        return [reply]

    def _answer_queue(self, workers: tuple[RestartingWorker]) -> None:
        count = min(len(self._queue), MAX_CONCURRENT_CALLS)
        batch = [self._queue.popleft() for _ in range(count)]
        if batch:
            names = {name for call, _ in batch for name in self._select(self._async_names, call)}
            with self._calling(names):
                replies = self._ask(workers[0], [call for call, _ in batch], self._batch_seconds)
            for (_, future), reply in zip(batch, replies, strict=True):
                future.set_result(reply)

    def _ask(
        self, worker: RestartingWorker, calls: list[Call], seconds: float, name: str = ""
    ) -> list[PartsReply]:
        """Return the replies to calls; if the worker fails, ask again for each alone."""
        job = {"calls": [call._asdict() for call in calls]}
        limits = Limits(seconds, LATE_FACTOR * seconds if len(calls) == 1 else 0.0)
        try:
            return list(map(PartsReply.from_json, worker.ask(job, limits)["replies"]))
        except Exception as error:
            if len(calls) > 1:
                return [reply for call in calls for reply in self._ask(worker, [call], seconds)]
            text = f"{name}{type(error).__name__}: {error}"
            return [PartsReply({}, make_failure(error, Outcome.CRASH, text))]

    def close(self) -> None:
        self._async_pool.close()
        self._copies.close()


# --- the pool -------------------------------------------------------------------------------


def _when_done(awaited: Sequence[Future], function: Callable[[list], Any]) -> Future:
    """Return the future of `function(results)`; cancelled if one of the awaited futures is."""
    combined: Future = Future()
    count = itertools.count(1)

    def note(_: Future) -> None:
        if next(count) < len(awaited):
            return
        if any(future.cancelled() for future in awaited):  # the pool was closed
            combined.cancel()
            return
        try:
            combined.set_result(function([future.result() for future in awaited]))
        except Exception as error:
            combined.set_exception(error)

    for future in awaited:
        future.add_done_callback(note)
    return combined


def _cancel_with(future: Future, other: Future) -> None:
    if other.cancelled():
        future.cancel()


class _Job(NamedTuple):
    """Response that waits for its verdict."""

    call: ResponseCall
    place: Place
    source: str
    metadata: str
    verdict: Future[Verdict]

    @property
    def scored(self) -> bool:
        """Return True if the problem's source scores the answer itself."""
        return bool(self.metadata) and scores(self.source)


class RewardPool:
    """Verdicts and rewards of responses, computed while decoding continues.

    Args:
        split: returns the text that each token of a response adds; for rewards of tokens.

    Raises:
        ConfigError: a reward function can't be found.
    """

    def __init__(self, reward: Reward, split: Callable[[Sequence[int]], list[str]] | None = None):
        self._reward = reward
        self.verifier = open_verifier(reward)
        self._split = split
        self._weights = reward.weights()
        self._parts = _Parts(reward)
        self._reads_verdicts = reward.reads_verdicts() or self._parts.any_of_group
        self._queue: collections.deque[_Job] = collections.deque()
        self._lock = threading.Lock()
        self._pool = WorkerPool(reward.workers, self._open_workers, "reward")

    def _open_workers(self) -> Workers:
        """Return the processes of one thread: of parts, of scores, of the verifier."""
        parts = self._parts.open_worker(self._parts.names)
        return (parts, RestartingWorker(WORKER, "scores"), *self.verifier.open())

    @property
    def kills(self) -> int:
        """Number of worker processes that had to be killed."""
        return self._pool.kills + self._parts.kills

    @property
    def running(self) -> list[str]:
        """Names of the reward functions that are being called."""
        return self._parts.running()

    def submit(
        self,
        prompt: str,
        response: str,
        answer: str,
        source: str = "",
        metadata: str = "",
        tokens: Sequence[int] = (),
        drawn: int | None = None,
        columns: str = "",
    ) -> Future[Verdict]:
        """Return the future verdict on one response, without functions that see the group.

        It never fails: the verdict holds the failure.

        Args:
            source, metadata: of a problem with a scorer of its own.
            tokens: tokens of the response; of a trajectory, of its last turn.
            drawn: number of sampled tokens of a trajectory; rewards of tokens are placed on the
                last ones.
            columns: of the problem's row, for the functions.
        """
        split = functools.cache(lambda: present(self._split, "split")(tokens))
        pieces = split() if self._parts.any_with_tokens else None
        call = ResponseCall(prompt, response, answer, pieces, columns)
        before = (len(tokens) if drawn is None else drawn) - len(tokens)

        def place(value: list) -> np.ndarray:
            own = place_rewards(value, text=response, tokens=len(tokens), split=split)
            return np.pad(own, (before, 0))

        job = _Job(call, place, source, metadata, Future())
        self._queue.append(job)
        self._pool.submit(self._judge_queue)
        replies = self._parts.submit_async(call)
        if not replies:
            return job.verdict
        return _when_done([job.verdict, *replies], lambda results: self._add(*results, place=place))

    def submit_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> list[Future[Verdict]]:
        """Return future verdicts on all responses to a prompt, functions of the group included."""
        verdicts = [self._submit_completion(prompt, completion) for completion in completions]
        if not self._parts.any_of_group:
            return verdicts
        replies: Future[dict[int, list[PartsReply]]] = Future()  # by response

        def ask(results: list[Verdict]) -> None:
            scored = [i for i, verdict in enumerate(results) if verdict.failure is None]
            if not scored:
                replies.set_result({})
                return
            lengths = [len(completions[i]) for i in scored]
            correct = [bool(results[i].correct and len(completions[i])) for i in scored]
            texts = [completions[i].text for i in scored]
            own = (texts, prompt.answer, lengths, correct, prompt.columns)
            call = GroupCall(prompt.text, *own)

            def share_out(group_replies: list[PartsReply]) -> None:
                shared = {
                    i: [
                        PartsReply({name: own[j] for name, own in parts.items()}, failure)
                        for parts, failure in group_replies
                    ]
                    for j, i in enumerate(scored)
                }
                replies.set_result(shared)

            reply = self._pool.submit(lambda workers: self._parts.compute(call, workers[0]))
            _when_done([reply, *self._parts.submit_async(call)], share_out)

        def add(i: int, results: list) -> Verdict:
            verdict, shared = results
            return self._add(verdict, *shared.get(i, ()))

        _when_done(verdicts, ask)
        return [
            _when_done([verdict, replies], functools.partial(add, i))
            for i, verdict in enumerate(verdicts)
        ]

    def _submit_completion(self, prompt: Prompt, completion: Completion) -> Future[Verdict]:
        if completion.lost_environment:
            failure = Failure(Outcome.ENVIRONMENT_ERROR, completion.failures[-1])
            lost: Future[Verdict] = Future()
            lost.set_result(Verdict(False, None, failure))
            return lost
        return self.submit(
            prompt.text,
            completion.text,
            prompt.answer,
            prompt.source,
            prompt.metadata,
            completion.last_turn.tolist(),
            len(completion),
            prompt.columns,
        )

    def _judge_queue(self, workers: Workers) -> None:
        """Judge a fair part of the responses that no other thread has taken, in one exchange."""
        with self._lock:
            share = math.ceil(len(self._queue) / self._reward.workers)
            jobs = [self._queue.popleft() for _ in range(min(share, self.verifier.together))]
        if jobs:
            with contextlib.suppress(RuntimeError):  # the pool was closed
                self._judge(workers, jobs)

    def _judge(self, workers: Workers, jobs: list[_Job]) -> None:
        verdicts = self.verifier.verify(workers[2:], [job.call for job in jobs])
        for job, verdict in zip(jobs, verdicts, strict=True):
            if not self._reads_verdicts:
                verdict = dataclasses.replace(verdict, failure=None)
            verdict = dataclasses.replace(
                verdict, parts={GYM: float(verdict.correct)} | verdict.parts
            )
            if job.scored or self._parts.any_of_response:  # these may be slow: one at a time
                scored = self._pool.submit(self._score, job, verdict)
                scored.add_done_callback(functools.partial(_cancel_with, job.verdict))
            else:
                job.verdict.set_result(verdict)

    def _score(self, workers: Workers, job: _Job, verdict: Verdict) -> None:
        try:
            if job.scored:
                verdict = self._score_with_task(workers[1], verdict, job.source, job.metadata)
            if not self._reads_verdicts:
                verdict = dataclasses.replace(verdict, failure=None)
            if verdict.failure:
                job.verdict.set_result(verdict)
                return
            reply = self._parts.compute(job.call, workers[0])
            job.verdict.set_result(self._add(verdict, reply, place=job.place))
        except Exception as error:
            job.verdict.set_exception(error)

    def _score_with_task(
        self, worker: RestartingWorker, verdict: Verdict, source: str, metadata: str
    ) -> Verdict:
        """Return the verdict of the problem's own scorer on the extracted answer."""
        if verdict.failure:
            return verdict
        job = ScoreRequest(source, metadata, verdict.extracted)._asdict()
        first = ScoreRequest(source)._asdict()
        seconds = self._reward.timeout_seconds
        limits = Limits(seconds, BUSY_FACTOR * seconds, min(seconds, SCORE_SECONDS))
        try:
            reply = ScoreReply.from_json(worker.ask(job, limits, first))
        except ComputedTooLong:  # the answer's own fault
            reply = ScoreReply(how=SLOW)
        except (OSError, ValueError, TypeError) as error:
            reply = ScoreReply(failure=make_failure(error, Outcome.CRASH))
        decided = verdict.decided if verdict.extracted is None else reply.how
        parts = {GYM: reply.score}
        is_correct = bool(reaches(reply.score, 1.0, 0.0))
        return Verdict(is_correct, verdict.extracted, reply.failure, parts, decided=decided)

    def _add(self, verdict: Verdict, *replies: PartsReply, place: Place | None = None) -> Verdict:
        """Add rewards to a verdict; `place` assigns a list to the tokens of the response."""
        parts = dict(verdict.parts)
        failure = verdict.failure
        total = verdict.token_rewards
        for reply in replies:
            failure = failure or reply.failure
            for name, value in reply.parts.items():
                if place and isinstance(value, list):
                    try:
                        own = place(value)
                    except ValueError as error:
                        failure = failure or Failure(Outcome.USER_ERROR, f"{name}: {error}")
                        continue
                    value = float(own.sum())
                    weighted = self._weights[name] * own
                    total = (weighted if total is None else weighted + total).tolist()
                parts[name] = value
        return dataclasses.replace(verdict, parts=parts, failure=failure, token_rewards=total)

    def close(self) -> None:
        """End the worker processes; pending verdicts are lost."""
        self._pool.close()
        for job in self._queue.copy():
            job.verdict.cancel()
        self._parts.close()
