"""Pool of threads with worker processes, shared by rewards and environments."""

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo_jax.runtime import processes
from dapo_jax.runtime.workers.parent import RestartingWorker

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
    owners: Sequence[int],
    pending: Sequence[Sequence[Future[Any]]],
    encode: Callable[[Any], Any],
    should_abort: Callable[[], bool],
    topic: str,
) -> list[list[Any]] | None:
    """Return the encoded results of all futures, on every process; None if one aborts."""

    def wait(i: int) -> list[Any] | None:
        while futures.wait(pending[i], POLL_SECONDS).not_done:
            if should_abort():
                return None
        return [encode(future.result()) for future in pending[i]]

    results = processes.map_over_hosts(list(owners), wait, topic)
    return None if None in results else results
