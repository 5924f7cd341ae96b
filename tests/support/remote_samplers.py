"""A trainer's sampler with leases, and samplers that work for it in threads of this process."""

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dapo_jax.extras.samplers.command import Worker
from dapo_jax.extras.samplers.lease_server import LeaseServer
from dapo_jax.extras.samplers.leases import Leases
from dapo_jax.extras.samplers.remote_sampler import LeasedSampler, RemoteSampler
from dapo_jax.extras.samplers.settings import SamplerConfig, SamplersSettings
from dapo_jax.extras.samplers.weight_versions import WeightVersions
from dapo_jax.rollout.scheduler import Scheduler

IDENTITY = {"dapo_jax's code": "that of these tests"}


def url_of(server: LeaseServer) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextlib.contextmanager
def working(workers: Sequence[Worker]) -> Iterator[None]:
    """Threads that sample for a trainer, one per worker."""
    stopped = threading.Event()

    def work(worker):
        while not stopped.is_set():
            worker.step()

    threads = [threading.Thread(target=work, args=[worker]) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def remote_scheduler(schedulers: Sequence[Scheduler]):
    """A `RemoteSampler` of the first scheduler; the others work for it over HTTP."""
    engine = schedulers[0]._engine
    limits = engine.config.vocab, engine.max_response_tokens
    load = engine.programs.weights.load_trained
    return remote_sampler(schedulers, limits, load, engine.max_concurrent_decodes)


@contextlib.contextmanager
def remote_sampler(
    samplers: Sequence[Any],
    limits: tuple[int, int],
    load: Callable[[Any], dict[str, Any]],
    slots: int,
    seconds: float = 60.0,
    route: Callable[[LeaseServer], str] = url_of,  # a URL that leads to the server
    stall_seconds: float = 60.0,
):
    """A `RemoteSampler` of the first sampler; the others work for it over HTTP."""
    local, *others = samplers
    leases = Leases(limits, seconds)
    server = LeaseServer(leases, IDENTITY, SamplersSettings(port=0), "", print)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(server.close)
        versions = WeightVersions(folder)
        url = route(server)
        settings = SamplerConfig(trainer=url, stall_seconds=stall_seconds)
        workers = [Worker(settings, IDENTITY, seconds, each, versions.read) for each in others]
        for worker in workers:
            stack.callback(worker.close)
        stack.enter_context(working(workers))
        yield RemoteSampler(local, LeasedSampler(leases, load, versions.write, slots), print)


class Proxy:
    """Forwards TCP connections to a port; `may_pass()` False cuts one, whatever it holds."""

    def __init__(self, port: int, may_pass: Callable[[], bool]):
        self._target, self._may_pass = ("127.0.0.1", port), may_pass
        self.cuts = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                ends = [self._listening.accept()[0]]
                with contextlib.suppress(ConnectionError):
                    ends.append(socket.create_connection(self._target))
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket | None = None) -> None:
        with contextlib.suppress(OSError):
            while target and (data := source.recv(1 << 16)):
                if not self._may_pass():
                    self.cuts += 1
                    break
                target.sendall(data)
        for end in filter(None, (source, target)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
