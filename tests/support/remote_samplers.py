"""A trainer's sampler with leases, and samplers that work for it in threads of this process."""

import contextlib
import pathlib
import tempfile
import threading
from collections.abc import Iterator, Sequence

from dapo_jax.commands.sampler import SamplingLoop, TrainerClient
from dapo_jax.config.experiment import Sampler, SamplerConfig
from dapo_jax.rollout.leases import AnswerLimits, Leases
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.lease_server import LeaseServer
from dapo_jax.run.remote_sampler import RemoteSampler
from dapo_jax.run.weight_versions import WeightVersions

IDENTITY = {"dapo_jax's code": "that of these tests"}


def url_of(server: LeaseServer) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextlib.contextmanager
def working(loop: SamplingLoop) -> Iterator[None]:
    """A thread that samples for a trainer."""
    stopped = threading.Event()

    def work():
        while not stopped.is_set():
            loop.step()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextlib.contextmanager
def remote_scheduler(schedulers: Sequence[Scheduler], seconds: float = 60.0, **options):
    """A `RemoteSampler` of the first scheduler; the others work for it over HTTP."""
    local, *others = schedulers
    engine = local._engine
    slots = engine.max_concurrent_decodes
    leases = Leases(AnswerLimits(engine.config.vocab, engine.max_response_tokens), seconds)
    server = LeaseServer(leases, IDENTITY, Sampler(port=0), "", print)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(server.close)
        versions = WeightVersions(pathlib.Path(folder))
        load = engine.programs.weights.load_trained

        def write(version, params, repair):
            return versions.write(version, lambda: load(params), repair)

        for scheduler in others:
            client = TrainerClient(SamplerConfig(trainer=url_of(server)), IDENTITY, seconds)
            stack.callback(client.close)
            stack.enter_context(working(SamplingLoop(client, scheduler, versions.read, slots)))
        yield RemoteSampler(local, leases, write, False, slots, print)
