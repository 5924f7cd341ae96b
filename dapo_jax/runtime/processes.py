"""Several processes, one program: joining, agreeing, and leaving together.

Every process runs the same schedule on the same data, so that nothing has to be told to the others
but what only one of them can know: what a worker, a clock, a file or a signal decides. With one
process nothing here costs anything.
"""

import contextlib
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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the one way to the coordination service
from jax.experimental import multihost_utils

from dapo_jax.runtime.heartbeat import LEAVING_SECONDS, SILENCE_SECONDS, Heartbeat
from dapo_jax.runtime.settings import ConfigError

# Said by a launcher that starts the processes itself; on Cloud TPU, GKE and Slurm jax knows.
COORDINATOR, PROCESSES, PROCESS_ID = "DAPO_COORDINATOR", "DAPO_PROCESSES", "DAPO_PROCESS_ID"
JOINING_SECONDS = 300
FIRST_BYTES = 1024  # of an all-gather; longer messages take a second one
LENGTH_BYTES = 4

_heartbeat: Heartbeat | None = None
_command = False


def count() -> int:
    """How many processes run this program."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Which of them this one is, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this process writes and speaks for all."""
    return index() == 0


def printable(text: str) -> str:
    """The text with what a terminal would obey written out, as \\x1b; line breaks and tabs stay."""
    obeyed = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, directions, halves of characters, breaks
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char) in obeyed and char not in "\n\t"
        else char
        for char in text
    )


def complain(text: str) -> None:
    """A line on standard error that says which process it is from."""
    before = f"process {index()}: " if count() > 1 else ""
    print(before + printable(text), file=sys.stderr, flush=True)


def read_environment() -> dict[str, Any]:
    """What `jax.distributed.initialize` is told; empty: it finds out. Raises `ConfigError`."""
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
    told = {"coordinator_address": address, "num_processes": total, "process_id": int(process)}
    if host in ("127.0.0.1", "localhost"):  # otherwise the service listens to the whole network
        told["coordinator_bind_address"] = address
    return told | {"cluster_detection_method": "deactivate"}


def join() -> None:
    """Meets the processes that were started together. Raises `ConfigError`.

    Must come before anything asks jax for its devices.
    """
    global _heartbeat
    told = read_environment()
    if told.get("num_processes") == 1 or jax.distributed.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        jax.distributed.initialize(**told, initialization_timeout=JOINING_SECONDS)
    except ValueError as error:
        if told or "coordinator_address" not in str(error):
            raise ConfigError(f"the processes can't be joined: {error}") from None
        return  # nothing says that there are others
    except RuntimeError as error:
        if told or isinstance(error, jax.errors.JaxRuntimeError):
            raise ConfigError(f"the processes can't be joined: {error}") from None
        return  # a program that has used its devices already calls a command, alone
    signal.signal(signal.SIGTERM, handler)  # jax's own would swallow it
    if count() > 1:
        service = distributed.global_state
        assert service.coordinator_address is not None  # once joined
        _heartbeat = Heartbeat(service.client, service.coordinator_address, index(), count())


def keep_programs() -> None:
    """What is compiled is read again by later commands; JAX_COMPILATION_CACHE_DIR says where from.

    Empty, nothing is kept; where it isn't set, it is the user's cache.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache, "dapo_jax"))


def is_command() -> bool:
    """Whether this process is a command of ours, not a program that calls the library."""
    return _command


@contextlib.contextmanager
def as_command() -> Iterator[None]:
    """While the block lasts this process is a command, which Ctrl-C ends by an exception."""
    global _command
    _command, main = True, threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as while it was starting
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        _command = False


def run(work: Callable[[], int], *, alone: str = "") -> int:
    """Joins, works, and leaves when all are done; the exit code.

    A process that fails takes the others with it: they would wait for it for ever.

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
        except KeyboardInterrupt:
            complain("stopped by SIGINT")
            return 128 + signal.SIGINT


def _run(work: Callable[[], int], alone: str) -> int:
    if count() == 1:
        return work()
    if alone:
        complain(f"error: {alone} is the work of one process, but {count()} were started")
        leave(2)
    try:
        code = work()
    except KeyboardInterrupt:
        complain("stopped by SIGINT")
        code = 128 + signal.SIGINT
    except BaseException as error:
        # Often this is another's death, for which the watch has a better line than a trace.
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            time.sleep(SILENCE_SECONDS + LEAVING_SECONDS)
        complain(traceback.format_exc())
        code = 1
    if code:
        leave(code)
    agree("done", "the end")
    if _heartbeat is not None:
        _heartbeat.close()
    jax.distributed.shutdown()
    return 0


def leave(code: int) -> None:
    """Ends this process where it stands, and the others with it."""
    sys.stdout.flush()
    if _heartbeat is not None:
        _heartbeat.leave(code)
    os._exit(code)


def agree(value: Any, name: str) -> list[Any]:
    """What each process says, in their order: one small all-gather.

    Args:
        value: what JSON can hold; small.
        name: of the question; an error where another process is asking something else.
    """
    if count() == 1:
        return [value]
    said = [json.loads(text) for text in _gather(json.dumps([name, value]).encode())]
    names = [theirs for theirs, _ in said]
    if set(names) != {name}:
        raise RuntimeError(f"the processes are at different places: {names}")
    return [theirs for _, theirs in said]


def _gather(message: bytes) -> list[bytes]:
    """Messages of all processes, in their order; lengths may differ."""
    framed, size = len(message).to_bytes(LENGTH_BYTES, "little") + message, FIRST_BYTES
    while True:
        row = np.frombuffer(framed[:size].ljust(size, b"\0"), np.uint8)
        # On a mesh of all devices: libtpu aborts where a program runs on some chips of a host only.
        rows = [bytes(row) for row in multihost_utils.process_allgather(row)]
        ends = [LENGTH_BYTES + int.from_bytes(row[:LENGTH_BYTES], "little") for row in rows]
        if max(ends) <= size:
            return [row[LENGTH_BYTES:end] for row, end in zip(rows, ends, strict=True)]
        size = 1 << (max(ends) - 1).bit_length()  # a power of two: few programs are compiled


def from_first(work: Callable[[], Any], name: str) -> Any:
    """What process 0 finds, on every process; JSON must be able to hold it."""
    return agree(work() if is_first() else None, name)[0]


def share_out(owners: list[int], work: Callable[[int], Any], name: str) -> list[Any]:
    """The results of as many pieces of work, each done by one process and told to all.

    Args:
        owners: of each piece a number; process `number % count()` does it.
        work: piece -> result, which JSON can hold. A `ConfigError` is raised on every process.
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
    said = agree([error, mine], name)
    for error, _ in said:
        if error:
            raise ConfigError(error)
    found = {place: result for _, theirs in said for place, result in theirs.items()}
    return [found[str(i)] for i in range(len(owners))]


def check_same(values: Callable[[], dict[str, Any]]) -> None:
    """Raises one `ConfigError` on every process where values differ, saying which and where."""
    if count() == 1:
        return
    first, *others = agree(values(), "what all must share")
    differ = [
        f"{name} = {theirs.get(name)!r} on process {process}, but {first.get(name)!r} on process 0"
        for process, theirs in enumerate(others, 1)
        for name in first.keys() | theirs.keys()
        if theirs.get(name) != first.get(name)
    ]
    if differ:
        raise ConfigError("; ".join(sorted(differ)))


def code_digest() -> str:
    """Tells versions of this package apart by their files."""
    folder, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
