"""Several processes, one program: joining, agreeing, and leaving together.

Every process runs the same schedule on the same data. They exchange only what one of them alone can
know: what a worker, a clock, a file or a signal decides. One process alone exchanges nothing.
"""

import contextlib
import functools
import hashlib
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
from jax._src import distributed  # the one way to the coordination service
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dapo_jax.runtime.heartbeat import LEAVING_SECONDS, SILENCE_SECONDS, Heartbeat
from dapo_jax.runtime.lasting_output import BrokenPipeSafeStream
from dapo_jax.runtime.settings import ConfigError

# Set by a launcher that starts the processes itself; on Cloud TPU, GKE and Slurm jax knows.
COORDINATOR, PROCESSES, PROCESS_ID = "DAPO_COORDINATOR", "DAPO_PROCESSES", "DAPO_PROCESS_ID"
JOINING_SECONDS = 300
# Settings of jax: where it keeps programs, and how long one must compile, in seconds, to be kept.
KEPT_IN, KEPT_FROM = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
JAXS_KEPT_FROM = 1.0
FIRST_BYTES = 1024  # of an all-gather; a longer message takes a second one
LENGTH_BYTES = 4
SHOW_CURSOR = b"\x1b[?25h"  # which a live line hides

STDERR: Any = BrokenPipeSafeStream("stderr")

_heartbeat: Heartbeat | None = None
_command = False
_devices: tuple[Any, ...] = ()  # that carry messages; none: all


def count() -> int:
    """Number of processes that run this program."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Number of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """True in the process that writes and prints for all."""
    return index() == 0


def printable(text: str) -> str:
    """Text with control characters escaped, as \\x1b; line breaks and tabs stay."""
    escaped = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, directions, surrogates, breaks
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in escaped and char not in "\n\t"
        else char
        for char in text
    )


def print_error(text: str) -> None:
    """Prints a line on standard error, with the number of the process where there are several."""
    before = f"process {index()}: " if count() > 1 else ""
    print(before + printable(text), file=STDERR, flush=True)


def read_environment() -> dict[str, Any]:
    """Arguments of `jax.distributed.initialize`; empty: it finds out. Raises `ConfigError`."""
    texts = {name: os.environ.get(name, "") for name in (COORDINATOR, PROCESSES, PROCESS_ID)}
    address, processes, process = texts.values()
    if not any(texts.values()):
        return {}

    def demand(good: bool, name: str, allowed: str) -> None:
        if not good:
            raise ConfigError(f"{name} = {texts[name]!r}: must be {allowed}")

    allowed = "a whole number above 0; 1: this process alone"
    demand(processes.isdecimal() and int(processes) > 0, PROCESSES, allowed)
    total = int(processes)
    if total == 1:
        return {"num_processes": 1}
    host, _, port = address.rpartition(":")
    allowed = "HOST:PORT of process 0, the same for all"
    demand(bool(host) and port.isdecimal() and 0 < int(port) < 65_536, COORDINATOR, allowed)
    good = process.isdecimal() and int(process) < total
    demand(good, PROCESS_ID, f"from 0 to {PROCESSES} - 1 = {total - 1}, another for each process")
    arguments = {"coordinator_address": address, "num_processes": total, "process_id": int(process)}
    if host in ("127.0.0.1", "localhost"):  # otherwise the service listens to the whole network
        arguments["coordinator_bind_address"] = address
    return arguments | {"cluster_detection_method": "deactivate"}


def join() -> None:
    """Joins the processes that were started together. Raises `ConfigError`.

    Must come before anything asks jax for its devices.
    """
    global _heartbeat
    arguments = read_environment()
    if arguments.get("num_processes") == 1 or jax.distributed.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=JOINING_SECONDS)
    except ValueError as error:
        if arguments or "coordinator_address" not in str(error):
            raise ConfigError(f"the processes can't be joined: {error}") from None
        return  # nothing says that there are others
    except RuntimeError as error:
        if arguments or isinstance(error, jax.errors.JaxRuntimeError):
            raise ConfigError(f"the processes can't be joined: {error}") from None
        return  # a program that has used its devices already calls a command, alone
    signal.signal(signal.SIGTERM, handler)  # jax's own would swallow it
    if count() > 1:
        service = distributed.global_state
        assert service.coordinator_address is not None  # once joined
        _heartbeat = Heartbeat(service.client, service.coordinator_address, index(), count())


def keep_programs() -> None:
    """Sets jax's compilation cache, so that no process compiles what an earlier one has.

    It is what the program has set, else JAX_COMPILATION_CACHE_DIR (an empty one keeps nothing),
    else a folder of the user's cache. It also keeps what compiles in under a second: dozens a run.
    """
    if getattr(jax.config, KEPT_IN) is None and KEPT_IN.upper() not in os.environ:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update(KEPT_IN, os.path.join(cache, "dapo_jax"))
        compilation_cache.reset_cache()  # what this process compiled before found none
    if getattr(jax.config, KEPT_FROM) == JAXS_KEPT_FROM:
        jax.config.update(KEPT_FROM, 0.0)


def is_command() -> bool:
    """True in a `dapo-jax` command; false in a program that calls the library."""
    return _command


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """Marks this process as a command while the block lasts; Ctrl-C ends it with a line."""
    global _command
    _command, main = True, threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as while it was starting
        # Not by an exception: libraries that load swallow it, or abort with half of them there.
        signal.signal(signal.SIGINT, _leave_on_signal)
    try:
        yield
    finally:
        _command = False


def run(work: Callable[[], int], *, alone: str = "") -> int:
    """Joins the processes, calls `work`, leaves when all are done, and returns the exit code.

    A process that fails ends the others, which would wait for it for ever.

    Args:
        alone: the name of a command that only one process can do.
    """
    keep_programs()
    with as_command():
        try:
            join()
            return _run(work, alone)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2


def _run(work: Callable[[], int], alone: str) -> int:
    if count() == 1:
        return work()
    if alone:
        print_error(f"error: {alone} is the work of one process, but {count()} were started")
        exit_all(2)
    try:
        code = work()
    except BaseException as error:
        # Often another process died, for which the heartbeat has a better line than a trace.
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            time.sleep(SILENCE_SECONDS + LEAVING_SECONDS)
        print_error(traceback.format_exc())
        code = 1
    if code:
        exit_all(code)
    all_gather_json("done", "the end")
    if _heartbeat is not None:
        _heartbeat.close()
    jax.distributed.shutdown()
    return 0


def _leave_on_signal(number: int, _: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the signal came while a line was being written
        print_error(f"stopped by {signal.Signals(number).name}")
    exit_all(128 + number)


def exit_all(code: int) -> None:
    """Ends this process where it stands, and the others with the same exit code."""
    with contextlib.suppress(RuntimeError):
        BrokenPipeSafeStream("stdout").flush()
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR)
    if _heartbeat is not None:
        _heartbeat.leave(code)
    os._exit(code)


def all_gather_json(value: Any, name: str) -> list[Any]:
    """Values of all processes, in their order: one small all-gather.

    Args:
        value: this process's; small, and JSON can hold it.
        name: of the question. Raises RuntimeError where another process asks something else.
    """
    if count() == 1:
        return [value]
    answers = [json.loads(text) for text in _gather(json.dumps([name, value]).encode())]
    names = [question for question, _ in answers]
    if set(names) != {name}:
        raise RuntimeError(f"the processes are at different places: {names}")
    return [answer for _, answer in answers]


def _gather(message: bytes) -> list[bytes]:
    """Messages of all processes, in their order; lengths may differ."""
    framed, size = len(message).to_bytes(LENGTH_BYTES, "little") + message, FIRST_BYTES
    while True:
        row = np.frombuffer(framed[:size].ljust(size, b"\0"), np.uint8)
        rows = [bytes(row) for row in _gather_rows(row)]
        ends = [LENGTH_BYTES + int.from_bytes(row[:LENGTH_BYTES], "little") for row in rows]
        if max(ends) <= size:
            return [row[LENGTH_BYTES:end] for row, end in zip(rows, ends, strict=True)]
        size = 1 << (max(ends) - 1).bit_length()  # a power of two: few programs are compiled


def exchange_on(devices: Iterable[Any]) -> None:
    """Sets the devices that carry messages from now on, as many of each process.

    A message waits for the programs that its devices have been given before. On a flat torus they
    must be all: libtpu aborts where a program runs on some chips of a host only.
    """
    global _devices
    _devices = tuple(sorted(devices, key=lambda device: (device.process_index, device.id)))


def _gather_rows(row: np.ndarray) -> np.ndarray:
    """Rows of all processes [process, byte]."""
    mesh = Mesh(np.reshape(_devices or jax.devices(), (count(), -1)), ("process", "device"))
    place = NamedSharding(mesh, PartitionSpec("process"))
    rows = jax.make_array_from_process_local_data(place, row[None], (count(), len(row)))
    return np.asarray(_replicated(mesh)(rows))


@functools.cache
def _replicated(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def broadcast_from_host0(work: Callable[[], Any], name: str) -> Any:
    """Result of `work` on process 0, on every process; JSON must be able to hold it."""
    return all_gather_json(work() if is_first() else None, name)[0]


def map_over_hosts(owners: list[int], work: Callable[[int], Any], name: str) -> list[Any]:
    """Results of pieces of work, each done by one process, on every process.

    Args:
        owners: a number for each piece; process `number % count()` does it.
        work: from piece to result, which JSON can hold. A `ConfigError` is raised on every process.
    """
    if count() == 1 or not owners:
        return [work(i) for i in range(len(owners))]
    mine: dict[str, Any] = {}
    error = ""
    for i, owner in enumerate(owners):
        if owner % count() == index() and not error:
            try:
                mine[str(i)] = work(i)
            except ConfigError as problem:
                error = str(problem)
    answers = all_gather_json([error, mine], name)
    for error, _ in answers:
        if error:
            raise ConfigError(error)
    results = {piece: result for _, theirs in answers for piece, result in theirs.items()}
    return [results[str(i)] for i in range(len(owners))]


def check_same(values: Callable[[], dict[str, Any]]) -> None:
    """Raises one `ConfigError` on every process where values differ, with their names."""
    if count() == 1:
        return
    first, *others = all_gather_json(values(), "what all must share")
    differ = [
        f"{name} = {theirs.get(name)!r} on process {process}, but {first.get(name)!r} on process 0"
        for process, theirs in enumerate(others, 1)
        for name in first.keys() | theirs.keys()
        if theirs.get(name) != first.get(name)
    ]
    if differ:
        raise ConfigError("; ".join(sorted(differ)))


def code_digest() -> str:
    """Digest of the files of this package."""
    folder, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
