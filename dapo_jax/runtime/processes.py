"""Multi-process programs: joining, exchanging small values, and exiting together.

Every process runs the same schedule on the same data. Processes exchange only facts that one of
them knows: results of workers, clocks, files and signals. A single process exchanges nothing.
"""

import contextlib
import functools
import glob
import hashlib
import importlib.util
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.runtime import signal_handlers
from dapo_jax.runtime.streams import BrokenPipeSafeStream
from dapo_jax.types.errors import ConfigError

# Set by launchers that start the processes themselves; JAX detects Cloud TPU, GKE and Slurm.
COORDINATOR = "DAPO_COORDINATOR"
PROCESSES = "DAPO_PROCESSES"
PROCESS_ID = "DAPO_PROCESS_ID"
JOIN_TIMEOUT_SECONDS = 300
HEARTBEAT_TIMEOUT_SECONDS = 15  # then JAX aborts the processes that wait for a dead one
EXIT_SECONDS = 3  # processes that fail for the same reason print and exit within
PEER_LOST = 75  # exit code, EX_TEMPFAIL of sysexits.h: start all processes again
SIGNAL_CODE = 128  # plus the signal's number: exit code of a command that a signal stopped
PLATFORMS = "jax_platforms"
CACHE_DIR = "jax_compilation_cache_dir"
MIN_COMPILE_SECONDS = "jax_persistent_cache_min_compile_time_secs"
DEFAULT_MIN_COMPILE_SECONDS = 1.0  # JAX's default
DEVICE_FILES = "/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dxg"
FIRST_BYTES = 1024  # size of an all-gather; a longer message takes a second one
LENGTH_BYTES = 4
SHOW_CURSOR = b"\x1b[?25h"  # a live line hides it

STDERR: Any = BrokenPipeSafeStream("stderr")

_command = False
_devices: tuple[Any, ...] = ()  # devices that carry messages; empty: all


def count() -> int:
    """Return the number of processes of this program."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Return the index of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Return True in the process that writes files and prints for all."""
    return index() == 0


def printable(text: str) -> str:
    """Escape control characters, as \\x1b, except line breaks and tabs."""
    escaped = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, directions, surrogates, breaks
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in escaped and char not in "\n\t"
        else char
        for char in text
    )


def print_error(text: str) -> None:
    """Print a line to stderr, prefixed with the process index if there are several processes."""
    before = f"process {index()}: " if count() > 1 else ""
    print(before + printable(text), file=STDERR, flush=True)


def read_environment() -> dict[str, Any]:
    """Return arguments of `jax.distributed.initialize` from the environment; {}: let JAX detect."""
    texts = {name: os.environ.get(name, "") for name in (COORDINATOR, PROCESSES, PROCESS_ID)}
    address, processes, process = texts.values()
    if not any(texts.values()):
        return {}

    def check(valid: bool, name: str, allowed: str) -> None:
        if not valid:
            raise ConfigError(f"{name} = {texts[name]!r}: must be {allowed}")

    total = int(processes) if processes.isdecimal() else 0
    check(total > 0, PROCESSES, "a whole number above 0; 1: only this process")
    if total == 1:
        return {"num_processes": 1}
    host, _, port = address.rpartition(":")
    valid = bool(host) and port.isdecimal() and 0 < int(port) < 65_536
    check(valid, COORDINATOR, "HOST:PORT of process 0, equal on all processes")
    valid = process.isdecimal() and int(process) < total
    check(valid, PROCESS_ID, f"from 0 to {PROCESSES} - 1 = {total - 1}, unique per process")
    arguments = {"coordinator_address": address, "num_processes": total, "process_id": int(process)}
    if host in ("127.0.0.1", "localhost"):  # otherwise the service listens to the whole network
        arguments["coordinator_bind_address"] = address
    return arguments | {"cluster_detection_method": "deactivate"}


def _join() -> None:
    """Join the processes that were started together, before JAX looks for devices."""
    arguments = read_environment()
    if arguments.get("num_processes") == 1 or jax.distributed.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=JOIN_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
        signal.signal(signal.SIGTERM, handler)  # JAX's handler would swallow the signal
    except (ValueError, RuntimeError) as error:
        is_lone = "coordinator_address" in str(error)  # no launcher was detected
        if isinstance(error, RuntimeError):  # or a program that has already used its devices
            is_lone = not isinstance(error, jax.errors.JaxRuntimeError)
        if arguments or not is_lone:
            raise ConfigError(f"cannot join the processes: {error}") from None


def prepare_jax() -> None:
    """Enable JAX's compilation cache, also for programs that compile quickly.

    With libtpu and without a device file of a TPU or GPU, JAX uses the CPU at once: libtpu would
    search for a TPU and print errors.

    The cache's folder is the one that the program has set, else JAX_COMPILATION_CACHE_DIR (empty:
    no cache), else a folder in the user's cache.
    """
    has_device = any(glob.glob(pattern) for pattern in DEVICE_FILES)
    if importlib.util.find_spec("libtpu") and not (getattr(jax.config, PLATFORMS) or has_device):
        jax.config.update(PLATFORMS, "cpu")
    if getattr(jax.config, CACHE_DIR) is None and CACHE_DIR.upper() not in os.environ:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update(CACHE_DIR, os.path.join(cache, "dapo_jax"))
        compilation_cache.reset_cache()  # an earlier compilation found no cache
    if getattr(jax.config, MIN_COMPILE_SECONDS) == DEFAULT_MIN_COMPILE_SECONDS:
        jax.config.update(MIN_COMPILE_SECONDS, 0.0)


def is_command() -> bool:
    """Return True in a `dapo-jax` command, False in a program that calls the library."""
    return _command


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """Mark this process as a command inside the context; Ctrl-C then exits with one line."""
    global _command
    _command = True
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set during start-up
        # No KeyboardInterrupt: libraries that are being imported swallow it or abort.
        signal_handlers.install(signal.SIGINT, _exit_on_signal)
    try:
        yield
    finally:
        _command = False


def run(work: Callable[[], int], *, alone: str = "") -> int:
    """Join the processes, call `work`, wait for all to finish, and return the exit code.

    If a process fails, the others lose their connection to it and exit with `PEER_LOST`; JAX aborts
    those that are blocked, after `HEARTBEAT_TIMEOUT_SECONDS`.
    """
    prepare_jax()
    with as_command():
        try:
            _join()
            return _run(work, alone)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2


def _run(work: Callable[[], int], alone: str) -> int:
    if count() == 1:
        return work()
    if alone:
        print_error(f"error: {alone} runs in one process, but {count()} were started")
        _exit_after_others(2)
    try:
        code = work()
    except BaseException as error:
        print_error(traceback.format_exc())
        code = 1
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            code = PEER_LOST
            print_error(
                "error: the connection to another process was lost. Start all processes again to "
                "resume from the newest checkpoint"
            )
    if 0 < code < SIGNAL_CODE:
        _exit_after_others(code)
    all_gather_json("done", "the end")  # after a signal, all processes have saved together
    jax.distributed.shutdown()
    return code


def _exit_after_others(code: int) -> None:
    if is_first():  # it runs the coordination service of the others
        time.sleep(EXIT_SECONDS)
    exit_process(code)


def _exit_on_signal(number: int, _: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the signal interrupted a write
        print_error(f"stopped by {signal.Signals(number).name}")
    exit_process(SIGNAL_CODE + number)


def exit_process(code: int) -> None:
    """Exit immediately, without cleaning up."""
    with contextlib.suppress(RuntimeError):
        BrokenPipeSafeStream("stdout").flush()
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR)
    os._exit(code)


def all_gather_json(value: Any, name: str) -> list[Any]:
    """Return the values of all processes, ordered by index, after one small all-gather."""
    if count() == 1:
        return [value]
    answers = [json.loads(text) for text in _gather(json.dumps([name, value]).encode())]
    names = [gathered for gathered, _ in answers]
    if set(names) != {name}:
        raise RuntimeError(f"the processes are out of step: they gather {names}")
    return [answer for _, answer in answers]


def _gather(message: bytes) -> list[bytes]:
    """Return the messages of all processes, ordered by index; lengths may differ."""
    framed = len(message).to_bytes(LENGTH_BYTES, "little") + message
    mesh = Mesh(np.reshape(_devices or jax.devices(), (count(), -1)), ("process", "device"))
    by_process = NamedSharding(mesh, PartitionSpec("process"))

    def send(size: int) -> list[bytes]:
        row = np.frombuffer(framed[:size].ljust(size, b"\0"), np.uint8)
        sent = jax.make_array_from_process_local_data(by_process, row[None], (count(), size))
        return [bytes(row) for row in np.asarray(_replicated(mesh)(sent))]

    rows = send(FIRST_BYTES)
    ends = [LENGTH_BYTES + int.from_bytes(row[:LENGTH_BYTES], "little") for row in rows]
    if max(ends) > FIRST_BYTES:
        rows = send(1 << (max(ends) - 1).bit_length())  # a power of two: few programs compile
    return [row[LENGTH_BYTES:end] for row, end in zip(rows, ends, strict=True)]


def exchange_on(devices: Iterable[Any]) -> None:
    """Set the devices that carry messages, equally many per process.

    A message waits for the programs that were queued on its devices. On a two-dimensional torus
    pass all devices: libtpu aborts if a program runs on a part of a host's chips.
    """
    global _devices
    _devices = tuple(sorted(devices, key=lambda device: (device.process_index, device.id)))


@functools.cache
def _replicated(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def broadcast_from_host0(work: Callable[[], Any], name: str) -> Any:
    """Call `work` on process 0 and return its JSON result on every process."""
    return all_gather_json(work() if is_first() else None, name)[0]


def map_over_hosts(owners: list[int], work: Callable[[int], Any], name: str) -> list[Any]:
    """Call `work` for each item on one process and return all results on every process."""
    if count() == 1 or not owners:
        return [work(i) for i in range(len(owners))]
    error, local = "", []
    try:
        local = [[i, work(i)] for i, owner in enumerate(owners) if owner % count() == index()]
    except ConfigError as problem:
        error = str(problem)
    answers = all_gather_json([error, local], name)
    for error, _ in answers:
        if error:
            raise ConfigError(error)
    results = dict(item for _, items in answers for item in items)
    return [results[i] for i in range(len(owners))]


def check_same(read: Callable[[], dict[str, Any]]) -> None:
    """Raise a `ConfigError` on every process that names the values that differ."""
    if count() == 1:
        return
    first, *others = all_gather_json(read(), "values that must be equal")
    differ = [
        f"{name} = {values.get(name)!r} on process {process}, but {first.get(name)!r} on process 0"
        for process, values in enumerate(others, 1)
        for name in first.keys() | values.keys()
        if values.get(name) != first.get(name)
    ]
    if differ:
        raise ConfigError("; ".join(sorted(differ)))


def code_digest() -> str:
    """Return a digest of the source files of this package."""
    folder = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
