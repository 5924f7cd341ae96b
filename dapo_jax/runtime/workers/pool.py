"""Pool of threads with worker processes, shared by rewards and environments."""

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo_jax.runtime import processes
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.types.structs import Interrupted

POLL_SECONDS = 0.2  # between two checks whether to abort


class WorkerPool:
    """Threads, each with worker processes of its own that start with their first job."""

    def __init__(
        self, threads: int, open_workers: Callable[[], tuple[RestartingWorker, ...]], name: str
    ):
        self._open_workers = open_workers
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._opened: list[RestartingWorker] = []
        self._closed = False

    @property
    def kills(self) -> int:
        """Number of worker processes that had to be killed."""
        with self._lock:
            return sum(worker.kills for worker in self._opened)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `function(workers, *arguments)` on a thread, with the thread's processes."""
        return self._executor.submit(lambda: function(self._own_workers(), *arguments))

    def _own_workers(self) -> Any:  # a tuple of `RestartingWorker`
        if not hasattr(self._local, "workers"):
            self._local.workers = self._open_workers()
            with self._lock:
                self._opened.extend(self._local.workers)
                if self._closed:
                    self._close_workers()
        return self._local.workers

    def _close_workers(self) -> None:
        for worker in self._opened:
            worker.close()

    def close(self) -> None:
        """End the processes; pending results are lost."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            self._close_workers()


def gather_results(
    pending: Sequence[Sequence[Future[Any]]],
    encode: Callable[[int, Any], Any],
    should_abort: Callable[[], bool],
    topic: str,
    least: int,
) -> dict[int, list[Any]]:
    """Return the results of the items that are done, by place; or raise `Interrupted`."""
    results: dict[int, list[Any]] = {}
    mine = {i: own for i, own in enumerate(pending) if own}
    while pending:
        if least > len(results):
            waiting = [future for own in mine.values() for future in own if not future.done()]
            every = futures.ALL_COMPLETED if least == len(pending) else futures.FIRST_COMPLETED
            futures.wait(waiting, POLL_SECONDS, every)
        done = [i for i, own in mine.items() if all(future.done() for future in own)]
        own = [[i, [encode(i, future.result()) for future in mine.pop(i)]] for i in done]
        replies = processes.all_gather_json([should_abort(), own], topic)
        if any(aborts for aborts, _ in replies):
            raise Interrupted
        results |= {i: values for _, found in replies for i, values in found}
        if len(results) >= least:
            break
    return dict(sorted(results.items()))
