"""Pool of threads with worker processes, shared by rewards and environments."""

import queue
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo_jax.runtime import processes
from dapo_jax.runtime.workers.parent import RestartingWorker
from dapo_jax.types.structs import Interrupted

POLL_SECONDS = 0.2  # between two checks whether to abort


class WorkerPool:
    """Threads for jobs; each job has a tuple of worker processes to itself while it runs.

    The processes start with their first job.
    """

    def __init__(self, workers: Sequence[tuple[RestartingWorker, ...]], name: str):
        self._all = [worker for group in workers for worker in group]
        self._free = queue.LifoQueue[tuple[RestartingWorker, ...]]()  # few jobs start few processes
        for group in workers:
            self._free.put(group)
        self._executor = ThreadPoolExecutor(len(workers), thread_name_prefix=name)

    @property
    def kills(self) -> int:
        """Number of worker processes that had to be killed."""
        return sum(worker.kills for worker in self._all)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `function(workers, *arguments)` on a thread."""
        return self._executor.submit(self._call, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        workers = self._free.get()
        try:
            return function(workers, *arguments)
        finally:
            self._free.put(workers)

    def close(self) -> None:
        """End the processes; pending results are lost."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.close()


def gather_results(
    pending: Sequence[Sequence[Future[Any]]],
    encode: Callable[[int, Any], Any],
    should_abort: Callable[[], bool],
    topic: str,
    least: int,
) -> dict[int, list[Any]]:
    """Return the results of the items that are done, by place; or raise `Interrupted`."""
    results: dict[int, list[Any]] = {}
    local = {i: item for i, item in enumerate(pending) if item}
    while pending:
        if least > len(results):
            waiting = [future for item in local.values() for future in item if not future.done()]
            every = futures.ALL_COMPLETED if least == len(pending) else futures.FIRST_COMPLETED
            futures.wait(waiting, POLL_SECONDS, every)
        done = [i for i, item in local.items() if all(future.done() for future in item)]
        encoded = [[i, [encode(i, future.result()) for future in local.pop(i)]] for i in done]
        replies = processes.all_gather_json([should_abort(), encoded], topic)
        if any(aborts for aborts, _ in replies):
            raise Interrupted
        results |= {i: values for _, finished in replies for i, values in finished}
        if len(results) >= least:
            break
    return dict(sorted(results.items()))
