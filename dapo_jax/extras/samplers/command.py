"""Sample groups for a trainer that runs with `rollout.remote` as 'also' or 'only'.

    dapo-jax sampler --run=RUN --trainer=http://HOST:8200

reads the run's settings and the policy's weights from the folder RUN, which both processes see. It
may start before the trainer, at any time end and start again, and there may be any number: which
process samples a group changes nothing. It ends with exit code 0 after the run's last step, and
with 143 after SIGTERM, so that a cluster starts it again.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import socket
import ssl
import sys
import threading
import time
import urllib.error
import uuid
from collections.abc import Callable
from typing import Any

from dapo_jax.commands import checks, command_line
from dapo_jax.config.experiment import Config, Mesh, SamplerConfig
from dapo_jax.runtime import processes
from dapo_jax.runtime.keys import post, read_key
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.jsonl import read_object
from dapo_jax.runtime.storage.paths import folder_at
from dapo_jax.runtime.storage.retries import suppress_storage_errors
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import RolloutKey

PAUSE_SECONDS = 0.5  # before a sampler without work, trainer or weights tries again
TIMEOUT_SECONDS = 60.0  # of a message
MAX_ERROR_BYTES = 10_000
REFUSED = (401, 409)  # another key, another identity: trying again is no use


class TrainerClient:
    """Connection to a trainer, with the leases that this process holds.

    A thread tells the trainer that this process is alive while it decodes, compiles or reads, but
    not for longer than `stall_seconds`: an engine that hangs loses its leases.
    """

    def __init__(self, config: SamplerConfig, identity: dict[str, Any], lease_seconds: float):
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.tasks: dict[str, Any] = {}  # by key, in data order
        self.answers: dict[str, Any] = {}  # that the trainer has not confirmed
        self.room = 0  # responses that could start in addition to those of the leases
        self.counts: Any = None
        self.unreadable = ""  # digest of weights that this process could not read
        self.following: Any = None  # step and digest of the next session's weights
        self.refusal = ""
        self._trouble = ""  # why the last message has no answer
        self.moved_at = time.monotonic()  # when the last burst began
        self._stall_seconds = config.stall_seconds
        self._url = config.trainer.rstrip("/")
        self._key = read_key(config.key_file, "key_file")
        self._identity = identity
        self._lock = threading.Lock()  # messages must arrive in the order of their lists
        self._stopped = threading.Event()
        self._seconds = lease_seconds / 3
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and give all leases back."""
        self._stopped.set()
        self._thread.join()
        self.tasks.clear()
        self.exchange(asks=False)

    def exchange(self, asks: bool) -> bool:
        """Send answers, renew leases, and ask for more if told; return False if nobody answers.

        Raises `ConfigError` if the trainer refuses this process.
        """
        from dapo_jax.extras.samplers.lease_server import EXCHANGE
        from dapo_jax.extras.samplers.leases import Task
        from dapo_jax.rollout import group_format

        with self._lock:
            sent = dict(self.answers)
            message = {
                "sampler": self.name,
                "identity": self._identity,
                "held": list(self.tasks),
                "room": self.room,
                "asks": asks,
                "answers": list(sent.items()),
                "counts": self.counts,
                "unreadable": self.unreadable,
            }
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            body = group_format.dump(message)
            try:
                answer = post(self._url + EXCHANGE, body, headers, TIMEOUT_SECONDS)
                reply = group_format.load(answer)
            except urllib.error.HTTPError as error:
                if error.code not in REFUSED:
                    return False
                text = error.read(MAX_ERROR_BYTES).decode(errors="replace")
                raise ConfigError(f"the trainer refuses this sampler: {text}") from None
            except (OSError, ValueError) as error:
                if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
                    raise ConfigError(f"{self._url}: {error}; see SSL_CERT_FILE") from None
                if str(error) != self._trouble:
                    processes.print_error(f"no answer from {self._url}, trying again: {error}")
                self._trouble = str(error)
                return False
            self._trouble = ""
            for key in [*sent, *reply["ended"]]:
                self.answers.pop(key, None)
                self.tasks.pop(key, None)
            self.following = reply["following"]
            tasks = list(map(Task.from_fields, reply["leases"]))
            self.tasks |= {task.key: task for task in tasks}
            self.room -= sum(len(task.samples) for task in tasks)
            return True

    def _renew(self) -> None:
        while not self._stopped.wait(self._seconds):
            if time.monotonic() - self.moved_at > self._stall_seconds:
                continue
            try:
                self.exchange(asks=False)
            except ConfigError as error:
                self.refusal = str(error)


class SamplingLoop:
    """Samples the leased groups of one session after another, `slots` responses at a time."""

    def __init__(
        self,
        client: TrainerClient,
        sampler: Any,  # such as a scheduler
        read: Callable[[int, str], Any],  # of a version, by step and digest; may raise OSError
        slots: int,
    ):
        self._client, self._sampler, self._read, self._slots = client, sampler, read, slots
        self._session: Any = None
        self._weights: tuple[str, Any] = ("", None)  # digest and arrays of the newest version
        self._ahead: tuple[str, Any] = ("", None)  # digest and future arrays of the next one
        self._reader = concurrent.futures.ThreadPoolExecutor(1)
        self._submitted: dict[Any, str] = {}  # keys of running tasks, by request

    def step(self) -> bool:
        """Exchange messages, and decode a burst; return False if there was nothing to do."""
        client = self._client
        client.moved_at = time.monotonic()
        client.room = self._sampler.room if self._session else self._slots
        is_reached = client.exchange(asks=True) if client.answers or client.room > 0 else True
        if client.refusal:
            raise ConfigError(client.refusal)
        if client.following and client.following[1] not in (self._weights[0], self._ahead[0]):
            step, digest = client.following
            self._ahead = digest, self._reader.submit(self._read, step, digest)
        try:
            if self._work():
                return True
        except OSError as error:  # no weights, or no engine, which may be another process
            processes.print_error(f"the leases are given back: {error}")
            client.tasks.clear()
            self._submitted.clear()
            self._session, is_reached = None, False
        if not is_reached:
            time.sleep(PAUSE_SECONDS)
        return False

    def _work(self) -> bool:
        """Decode a burst of the leased groups; return False without any. Raises OSError."""
        from dapo_jax.extras.samplers.remote_sampler import submit

        client, running = self._client, self._submitted
        if running and not any(key in client.tasks for key in running.values()):
            self._sampler.stop(keep=False)  # nobody wants them
            running.clear()
        tasks = [task for task in list(client.tasks.values()) if task.key not in client.answers]
        if not tasks:
            return False
        if tasks[-1].session != self._session:
            self._begin(tasks[-1].session)
        for task in tasks:
            if task.key not in running.values():
                running[submit(self._sampler, task)] = task.key
        for request, responses in self._sampler.step():
            key = running.pop(request)
            if key in client.tasks:
                client.answers[key] = responses
        client.counts = self._sampler.counts
        return True

    def _begin(self, session: Any) -> None:
        """Load the version of a session, unless it is loaded. Raises OSError."""
        digest, arrays = self._weights
        if digest != session.weights:
            self._client.unreadable = session.weights  # the trainer writes it again
            (ahead, arrays), self._ahead = self._ahead, ("", None)
            if ahead == session.weights:
                arrays = arrays.result()
            else:
                arrays = self._read(session.policy_step, session.weights)
        self._weights, self._client.unreadable = (session.weights, arrays), ""
        key = RolloutKey(session.purpose, session.step, session.policy_step)
        self._session = None
        self._sampler.begin(arrays, key, session.rule)
        self._submitted.clear()
        self._session = session


def read_run(config: SamplerConfig, should_stop: Callable[[], bool]) -> Config | None:
    """Return the config of the run with this process's settings; None if it must stop.

    A run that has not started yet is waited for.
    """
    from dapo_jax.config.files import read_config
    from dapo_jax.run.run_files import CONFIG

    while not (folder_at(config.run) / CONFIG).exists():
        if should_stop():
            return None
        time.sleep(PAUSE_SECONDS)
    run = read_config(Config, config.run)
    run.model.folder = config.model or run.model.folder
    run.sampler.slots = config.slots or run.sampler.slots
    run.sampler.pages = config.pages or run.sampler.pages
    run.mesh = Mesh(**dataclasses.asdict(config.mesh))
    run.rollout.remote = "also"  # as the trainer, whatever it was started with at first
    run.run_dir = config.run
    return run


def open_vllm(config: SamplerConfig, run: Config, decoder: Any, tokenizer: Any) -> Any:
    """Return the sampler of a vLLM server. Raises `ConfigError` without its URL."""
    from dapo_jax.extras.vllm import VllmSampler, VllmServer
    from dapo_jax.model.peft_adapters import save_adapters
    from dapo_jax.rollout.weight_transfer import DecodingArrays

    allowed = "the URL of a vLLM server, as the run needs"
    require(bool(config.engine), "engine", config.engine, allowed)

    def save(arrays: DecodingArrays, folder: pathlib.Path) -> None:
        trained = arrays.stacks(decoder)
        save_adapters(folder, trained, trained.__getitem__, decoder, run.model.folder)

    slots, limit = run.sampler.slots, run.sampler.max_response_tokens
    server = VllmServer(config.engine, tuple(tokenizer.end_ids), limit, slots)
    return VllmSampler(server, save, run.seed)


def is_finished(run: Config) -> bool:
    """Return True if a run has made all its steps."""
    from dapo_jax.run.run_files import SUMMARY

    summary = None
    with suppress_storage_errors():
        summary = read_object((folder_at(run.run_dir) / SUMMARY).read_bytes())
    return bool(summary) and summary["steps"] >= run.total_steps


def sample(config: SamplerConfig, should_stop: Callable[[], bool]) -> None:
    """Sample for the run's trainer until the run has finished, or `should_stop()`."""
    from dapo_jax.extras.samplers.remote_sampler import sampler_identity
    from dapo_jax.extras.samplers.weight_versions import WeightVersions
    from dapo_jax.run.components import (
        load_frozen,
        open_decoder,
        open_environments,
        open_tokenizer,
    )
    from dapo_jax.run.compute import choose_recording, open_engine, open_sampler

    run = read_run(config, should_stop)
    if run is None or is_finished(run):
        return
    decoder, mesh, sampling_mesh = open_decoder(run, training=False)
    decoder = choose_recording(run.algorithm, decoder, training=True)
    tokenizer = open_tokenizer(run, decoder)
    environments = open_environments(run, tokenizer, should_stop)
    if run.sampler.engine == "vllm":
        sampler = open_vllm(config, run, decoder, tokenizer)
    else:
        frozen = load_frozen(run.model.folder, decoder, mesh)
        engine = open_engine(run, decoder, mesh, sampling_mesh, tokenizer.end_ids, frozen)
        sampler = open_sampler(engine, tokenizer, run.seed, environments)
    versions = WeightVersions(config.run)
    client = TrainerClient(config, sampler_identity(run), run.sampler.lease_seconds)
    print(f"sampler {client.name} of {config.run}", flush=True)
    try:
        loop = SamplingLoop(client, sampler, versions.read, run.sampler.slots)
        while not should_stop():
            if not loop.step() and is_finished(run):
                return
    finally:
        client.close()
        if environments:
            environments.close()


def main() -> int:
    """Run the command; exit code 2: wrong settings, or the trainer refuses this process."""
    config = command_line.load(SamplerConfig, __doc__)
    processes.prepare_jax()
    with processes.as_command(), Signals() as signals:

        def work() -> None:
            require(bool(config.run), "run", config.run, "the run_dir of a run")
            allowed = "a URL such as http://HOST:8200"
            require(bool(config.trainer), "trainer", config.trainer, allowed)
            sample(config, signals)

        return checks.guarded(work) or signals.exit_code


if __name__ == "__main__":
    sys.exit(main())
