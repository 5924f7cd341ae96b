"""Pool of reward workers: threads that judge, and processes that can be killed."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.functions import GYM, TOKENS, arguments, compute, own_parts, sees_group, waits
from dapo_jax.rewards.pickled_functions import GIVEN, HERE, write_copies
from dapo_jax.rewards.token_rewards import place_rewards
from dapo_jax.rewards.waiting import WaitingParts
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.structs import Completion, Prompt, Verdict, present
from dapo_jax.verifier import algebra_process
from dapo_jax.verifier.algebra_process import Memory, RemoteAlgebra
from dapo_jax.verifier.answer_conventions import as_percentage, is_unfinished
from dapo_jax.verifier.equivalence import decide, gold_answer
from dapo_jax.verifier.verifier import BY_VALUE, VERIFIERS

WORKER = "dapo_jax.rewards.worker"
LONGEST_REPLY = 1 << 26  # bytes; rewards of each token of 64 responses


class _Workers(NamedTuple):
    """Processes that one thread of the pool asks; each starts with its first job."""

    algebra: RestartingWorker
    gym: RestartingWorker
    parts: RestartingWorker


def _environment() -> dict[str, str]:
    """Variables of a worker: it finds the user's own functions wherever this process does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _gathered(awaited: Sequence[Future], function: Callable[[list], Any]) -> Future:
    """Future of `function(results)` once all are there; cancelled where one of them is."""
    gathered: Future = Future()
    count = itertools.count(1)

    def note(_: Future) -> None:
        if next(count) < len(awaited):
            return
        if any(future.cancelled() for future in awaited):  # the pool was closed
            gathered.cancel()
            return
        try:
            gathered.set_result(function([future.result() for future in awaited]))
        except Exception as error:
            gathered.set_exception(error)

    for future in awaited:
        future.add_done_callback(note)
    return gathered


Place = Callable[[list], np.ndarray]  # of a response: `token_rewards.place_rewards`


class RewardPool:
    """Judging of responses beside the decoding: a thread per worker, and processes where needed.

    Args:
        split: from a response's tokens to the text that each adds; for rewards of tokens.

    Raises:
        ConfigError: a reward function can't be found.
    """

    def __init__(self, reward: Reward, split: Callable[[Sequence[int]], list[str]] | None = None):
        self._split, self._weights = split, reward.weights()
        parts = own_parts(list(self._weights))  # a wrong name stops here, not in a worker
        self._of_group = {name for name in parts if sees_group(parts[name])}
        self._with_tokens = {name for name in parts if TOKENS in arguments(parts[name])}
        self._reward, self._own, self._memory = reward, threading.local(), Memory()
        self._verify = VERIFIERS[reward.verifier]
        self._here = {name: parts[name] for name in parts if name.startswith(HERE)}
        named = [name for name in parts if name not in self._here]
        self._names = [name for name in named if not waits(parts[name])]
        self._files, self._copies = contextlib.ExitStack(), ""
        if any(name.startswith(GIVEN) for name in named):
            folder = tempfile.TemporaryDirectory(prefix="dapo_jax_", ignore_cleanup_errors=True)
            self._copies = os.path.join(self._files.enter_context(folder), "functions")
            write_copies(named, pathlib.Path(self._copies))
        self._waiting = None
        self._waiting_names = [name for name in named if name not in self._names]
        if self._waiting_names:
            worker = self._parts_worker(self._waiting_names)
            self._waiting = WaitingParts(worker, reward.timeout_seconds)
        self._lock, self._closed = threading.Lock(), False
        self._workers: list[_Workers] = []
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")

    @property
    def kills(self) -> int:
        """Count of worker processes that had to be killed since the start."""
        with self._lock:
            kills = sum(worker.kills for workers in self._workers for worker in workers)
        return kills + (self._waiting.worker.kills if self._waiting else 0)

    def submit(
        self,
        prompt: str,
        response: str,
        answer: str,
        source: str = "",
        metadata: str = "",
        tokens: Sequence[int] = (),
        drawn: int | None = None,
    ) -> Future[Verdict]:
        """Future verdict on one response. It never fails: errors are in the verdict.

        Functions that see the group give nothing here.

        Args:
            source, metadata: those of a problem with a scorer of its own.
            tokens: of the response; of a trajectory, of its last turn.
            drawn: drawn tokens of the trajectory, on the last of which rewards of tokens are put.
        """
        job: dict[str, Any] = {"prompt": prompt, "response": response, "answer": answer}
        split = functools.cache(lambda: present(self._split, "split")(tokens))
        if self._with_tokens:
            job[TOKENS] = split()
        before = (len(tokens) if drawn is None else drawn) - len(tokens)

        def place(value: list) -> np.ndarray:
            own = place_rewards(value, text=response, tokens=len(tokens), split=split)
            return np.pad(own, (before, 0))

        judged = self._threads.submit(self._judge, job, place, source, metadata)
        waiting = self._ask_waiting(job)
        return _gathered([judged, *waiting], lambda found: self._add(*found, place=place))

    def submit_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> list[Future[Verdict]]:
        """Future verdicts on the responses to a prompt; functions that see the group come last."""
        where = prompt.answer, prompt.source, prompt.metadata
        judged = [
            self.submit(prompt.text, c.text, *where, c.last_turn.tolist(), len(c))
            for c in completions
        ]
        if not self._of_group:
            return judged
        replies: Future[list[dict]] = Future()

        def ask(verdicts: list[Verdict]) -> None:
            pairs = zip(verdicts, completions, strict=True)
            job = {
                "prompt": prompt.text,
                "responses": [c.text for c in completions],
                "answer": prompt.answer,
                "lengths": [len(c) for c in completions],
                "correct": [bool(verdict.correct and len(c)) for verdict, c in pairs],
            }
            asked = self._threads.submit(lambda: self._ask(job, self._own_workers().parts))
            _gathered([asked, *self._ask_waiting(job)], replies.set_result)

        def add(i: int, found: list) -> Verdict:
            verdict, of_group = found
            own = [
                reply | {"parts": {name: rewards[i] for name, rewards in reply["parts"].items()}}
                for reply in of_group
            ]
            return self._add(verdict, *own)

        _gathered(judged, ask)
        return [
            _gathered([verdict, replies], functools.partial(add, i))
            for i, verdict in enumerate(judged)
        ]

    def _judge(self, job: dict[str, Any], place: Place, source: str, metadata: str) -> Verdict:
        workers = self._own_workers()
        verdict = self._verify_with(workers.algebra, job)
        if metadata:
            verdict = self._score_with(workers.gym, verdict, source, metadata)
        parts = {GYM: float(verdict.correct)} | verdict.parts
        verdict = dataclasses.replace(verdict, parts=parts)
        return self._add(verdict, self._ask(job, workers.parts), place=place)

    def _ask(self, job: dict[str, Any], worker: RestartingWorker) -> dict[str, Any]:
        """Reply of this process and of a worker, as of `compute`, without functions that wait."""
        seconds = self._reward.timeout_seconds
        reply = compute(self._here, job, seconds)
        if names := self._meant(self._names, job):
            try:
                theirs = worker.ask(job, seconds, retry_late=True)
            except (OSError, ValueError) as error:
                theirs = {"parts": {}, "broken": f"{names[0]}: {type(error).__name__}: {error}"}
            reply = theirs | reply | {"parts": reply["parts"] | theirs["parts"]}
        return reply

    def _meant(self, names: Sequence[str], job: dict[str, Any]) -> list[str]:
        return [name for name in names if (name in self._of_group) == ("responses" in job)]

    def _ask_waiting(self, job: dict[str, Any]) -> list[Future[dict]]:
        """Future reply of the functions that wait, where some are for the job."""
        if self._waiting and self._meant(self._waiting_names, job):
            return [self._waiting.submit(job)]
        return []

    def _add(self, verdict: Verdict, *replies: dict, place: Place | None = None) -> Verdict:
        """Verdict with the rewards of replies; `place` puts a list on the response's tokens."""
        parts, broken, total = dict(verdict.parts), verdict.broken, verdict.token_rewards
        for reply in replies:
            broken = broken or reply.get("broken")
            for name, value in reply["parts"].items():
                if place and isinstance(value, list):
                    try:
                        own = place(value)
                    except ValueError as error:
                        broken = broken or f"{name}: {error}"
                        continue
                    value, own = float(own.sum()), self._weights[name] * own
                    total = (own if total is None else own + total).tolist()
                parts[name] = value
        return dataclasses.replace(verdict, parts=parts, broken=broken, token_rewards=total)

    def _verify_with(self, worker: RestartingWorker, job: dict[str, str]) -> Verdict:
        algebra = RemoteAlgebra(worker, self._memory, self._reward.timeout_seconds)
        gold = job["answer"]
        try:
            correct, extracted, how = self._verify(job["response"], gold, algebra)
            value = extracted if self._reward.verifier in BY_VALUE else None
            if value is not None and not correct and self._reward.percent == "as_asked":
                number = as_percentage(value, job["prompt"])
                correct = number is not None and decide(number, gold_answer(gold), algebra)
            if value is not None and correct and self._reward.unfinished == "wrong":
                if is_unfinished(value, gold_answer(gold), job["prompt"]):
                    return Verdict(False, extracted, decided="unfinished")
        except Exception as error:  # a verifier's bug costs a response, never the run
            return Verdict(False, None, f"{type(error).__name__}: {error}", decided="failed")
        if extracted is not None:
            how = "remembered" if algebra.remembered else "direct"
            how = "algebra" if algebra.asked else how
            how = "undecided" if algebra.undecided and not correct else how
        return Verdict(correct, extracted, decided=how)

    def _score_with(
        self, worker: RestartingWorker, verdict: Verdict, source: str, metadata: str
    ) -> Verdict:
        """Verdict of the problem's own scorer on the extracted answer."""
        job = {"source": source, "metadata": metadata, "answer": verdict.extracted}
        try:
            seconds, first = self._reward.timeout_seconds, {"source": source}
            reply = worker.ask(job, seconds, retry_late=True, first=first)
            score, failure = float(reply["score"]), reply.get("failure")
        except (OSError, ValueError, LookupError, TypeError) as error:
            score, failure = 0.0, f"{type(error).__name__}: {error}"
        how = verdict.decided if verdict.extracted is None else "scorer"
        how = "failed" if failure else how
        return Verdict(score >= 1, verdict.extracted, failure, parts={GYM: score}, decided=how)

    def _own_workers(self) -> _Workers:
        """Workers of the thread that asks."""
        if getattr(self._own, "workers", None) is None:
            self._own.workers = _Workers(
                RestartingWorker(algebra_process.WORKER),
                RestartingWorker(WORKER, "gym", environment=_environment()),
                self._parts_worker(self._names),
            )
            with self._lock:
                self._workers.append(self._own.workers)
                if self._closed:
                    self._close_workers()
        return self._own.workers

    def _parts_worker(self, names: list[str]) -> RestartingWorker:
        words = "parts", self._copies, str(self._reward.timeout_seconds), *names
        options = {"environment": _environment(), "longest_reply": LONGEST_REPLY}
        return RestartingWorker(WORKER, *words, **options)

    def _close_workers(self) -> None:
        for worker in (worker for workers in self._workers for worker in workers):
            worker.close()

    def close(self) -> None:
        """Ends the worker processes; verdicts still under way are lost."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            self._close_workers()
        if self._waiting:
            self._waiting.close()
        self._files.close()
