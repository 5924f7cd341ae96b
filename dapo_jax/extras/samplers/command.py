"""Sample groups for a trainer that runs with `sampler.engine=samplers`.

    dapo-jax sampler --run=RUN --trainer=http://HOST:8200

reads the run's settings and the policy's weights from the folder RUN, which both processes see. It
may start before the trainer, at any time end and start again, and there may be any number: which
process samples a group changes nothing. It ends with exit code 0 after the run's last step, and
with 143 after SIGTERM, so that a cluster starts it again.
"""

import dataclasses
import os
import socket
import threading
import time
import urllib.error
import uuid
from collections.abc import Callable
from typing import Any

from dapo_jax.config.experiment import Config, Mesh
from dapo_jax.config.files import read_config
from dapo_jax.extras.samplers.lease_server import EXCHANGE
from dapo_jax.extras.samplers.leases import Task
from dapo_jax.extras.samplers.remote_sampler import sampler_identity
from dapo_jax.extras.samplers.settings import SamplerConfig
from dapo_jax.extras.samplers.weight_versions import WeightVersions
from dapo_jax.rollout import group_format
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run import build, checks, command_line
from dapo_jax.run.sinks import CONFIG, read_summary
from dapo_jax.runtime import processes
from dapo_jax.runtime.keys import post, read_key
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.files import folder_at
from dapo_jax.types.errors import ConfigError

PAUSE_SECONDS = 0.5  # before a sampler without work, trainer or weights tries again
TIMEOUT_SECONDS = 60.0  # of a message
REFUSED = (401, 409)  # another key, another identity, a wrong answer: trying again is no use


class Worker:
    """Samples the groups that a trainer leases to this process, one session after another.

    A thread tells the trainer that this process is alive while it decodes, compiles or reads, but
    not for longer than `stall_seconds`: an engine that hangs loses its leases.
    """

    def __init__(
        self,
        config: SamplerConfig,
        identity: dict[str, Any],  # see `remote_sampler.sampler_identity`
        lease_seconds: float,
        sampler: Any,  # such as a scheduler
        read: Callable[[str], Any],  # of a version of the weights; may raise OSError
    ):
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.tasks: dict[str, Task] = {}  # leased, by key, in data order
        self._config, self._identity = config, identity
        self._sampler, self._read = sampler, read
        self._answers: dict[str, Any] = {}  # that the trainer has not confirmed
        self._running: dict[Any, str] = {}  # keys of tasks by the sampler's requests
        self._session: Any = None
        self._weights: tuple[str, Any] = ("", None)  # name and arrays of the newest version
        self._unreadable = ""  # version that this process could not read
        self._room = 0  # responses that could start in addition to those of the leases
        self._trouble = self._refusal = ""  # why the last message has no answer; or is refused
        self._moved_at = time.monotonic()  # when the last burst began
        key = read_key(config.key_file, "key_file")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._lock = threading.Lock()  # messages must arrive in the order of their lists
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, args=[lease_seconds / 3], daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and give all leases back."""
        self._stopped.set()
        self._thread.join()
        self.tasks.clear()
        self._room = 0
        self.exchange()

    def exchange(self) -> bool:
        """Send results, renew leases and request work; return False if the trainer is gone.

        Raises `ConfigError` if the trainer refuses this process.
        """
        with self._lock:
            url, sent = self._config.trainer.rstrip("/"), dict(self._answers)
            message = {
                "sampler": self.name,
                "identity": self._identity,
                "held": list(self.tasks),
                "room": self._room,
                "answers": list(sent.items()),
                "counts": self._sampler.counts,
                "unreadable": self._unreadable,
            }
            body, problem = group_format.dump(message), ""
            try:
                answer = post(url + EXCHANGE, body, self._headers, TIMEOUT_SECONDS)
                reply = group_format.load(answer)
            except (OSError, ValueError) as error:
                problem = str(error)
                if isinstance(error, urllib.error.HTTPError) and error.code in REFUSED:
                    text = error.read(10_000).decode(errors="replace")
                    raise ConfigError(f"the trainer refuses this sampler: {text}") from None
            if problem not in ("", self._trouble):
                processes.print_error(f"no answer from {url}, trying again: {problem}")
            self._trouble = problem
            if problem:
                return False
            for key in [*sent, *reply["ended"]]:
                self._answers.pop(key, None)
                self.tasks.pop(key, None)
            tasks = list(map(Task.from_fields, reply["leases"]))
            self.tasks |= {task.key: task for task in tasks}
            self._room -= sum(len(task.samples) for task in tasks)
            return True

    def _renew(self, seconds: float) -> None:
        while not self._stopped.wait(seconds):
            try:
                if time.monotonic() - self._moved_at <= self._config.stall_seconds:
                    self.exchange()
            except ConfigError as error:
                self._refusal = str(error)

    def step(self) -> bool:
        """Exchange messages, and decode a burst; return False if there was nothing to do."""
        self._moved_at = time.monotonic()
        self._room = self._sampler.room
        is_reached = self.exchange() if self._answers or self._room > 0 else True
        if self._refusal:
            raise ConfigError(self._refusal)
        try:
            if self._work():
                return True
        except OSError as error:  # no weights
            processes.print_error(f"the leases are given back: {error}")
            self.tasks.clear()
            is_reached = False
        if not is_reached:
            time.sleep(PAUSE_SECONDS)
        return False

    def _work(self) -> bool:
        """Decode a burst of the leased groups; return False without any. Raises OSError."""
        for request in [each for each, key in self._running.items() if key not in self.tasks]:
            self._sampler.cancel(request)  # nobody wants it
            del self._running[request]
        tasks = [task for task in list(self.tasks.values()) if task.key not in self._answers]
        if not tasks:
            return False
        if tasks[-1].session != self._session:
            self._begin(tasks[-1].session)
        for task in tasks:
            if task.key not in self._running.values():
                count = len(task.samples)
                is_group = task.samples == tuple(range(count))  # which is returned together
                request = self._sampler.submit(task.prompt, count if is_group else task.samples)
                self._running[request] = task.key
        for request, responses in self._sampler.step():
            self._answers[self._running.pop(request)] = responses
        return True

    def _begin(self, session: Any) -> None:
        """Load the version of a session, unless it is loaded. Raises OSError."""
        self._session = None
        self._sampler.stop(keep=False)
        self._running.clear()
        self._unreadable = session.weights  # the trainer writes it again
        if self._weights[0] != session.weights:
            self._weights = session.weights, self._read(session.weights)
        self._unreadable = ""
        self._sampler.begin(self._weights[1], session.key, session.rule)
        self._session = session


def read_run(config: SamplerConfig, should_stop: Callable[[], bool]) -> Config | None:
    """Return the config of the run with this process's settings; None if it must stop.

    A run that has not started yet is waited for.
    """
    while not (folder_at(config.run) / CONFIG).exists():
        if should_stop():
            return None
        time.sleep(PAUSE_SECONDS)
    run = read_config(Config, config.run)
    run.model.folder = config.model or run.model.folder
    run.sampler.slots = config.slots or run.sampler.slots
    run.sampler.pages = config.pages or run.sampler.pages
    run.mesh = Mesh(**dataclasses.asdict(config.mesh))
    run.sampler.engine = "samplers"  # whatever the trainer was started with at first
    run.run_dir = config.run
    return run


def is_finished(run: Config) -> bool:
    """Return True if a run has made all its steps."""
    return read_summary(folder_at(run.run_dir)).get("steps", -1) >= run.total_steps


def sample(config: SamplerConfig, should_stop: Callable[[], bool]) -> None:
    """Sample for the run's trainer until the run has finished, or `should_stop()`."""
    run = read_run(config, should_stop)
    if run is None or is_finished(run):
        return
    decoder, mesh, sampling_mesh = build.open_decoder(run, training=False)
    decoder = build.choose_recording(run.algorithm, decoder, training=True)
    tokenizer = build.open_tokenizer(run, decoder)
    environments = build.open_environments(run, tokenizer, should_stop)
    frozen = build.load_frozen(run.model.folder, decoder, mesh)
    engine = build.open_engine(run, decoder, mesh, sampling_mesh, tokenizer.end_ids, frozen)
    sampler = Scheduler(engine, tokenizer, run.seed, environments)
    read, seconds = WeightVersions(config.run).read, run.extras.samplers.lease_seconds
    worker = Worker(config, sampler_identity(run), seconds, sampler, read)
    print(f"sampler {worker.name} of {config.run}", flush=True)
    try:
        while not should_stop():
            if not worker.step() and is_finished(run):
                return
    finally:
        worker.close()
        if environments:
            environments.close()


def main() -> int:
    """Run the command; exit code 2: wrong settings, or the trainer refuses this process."""
    config = command_line.load(SamplerConfig, __doc__)
    processes.prepare_jax()
    with processes.as_command(), Signals() as signals:
        return checks.guarded(lambda: sample(config, signals)) or signals.exit_code
