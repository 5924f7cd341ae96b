"""Limits that a machine sets on memory and processes: seen at the door, and told in one line.

Beyond them the libraries of JAX end the process by themselves, with a dump of their stack.
"""

import contextlib
import errno
import os
import resource
import threading
import traceback
from collections.abc import Iterator

from dapo_jax.runtime.settings import ConfigError

# Measured on two cores, for the command that needs least: below, a library can't be loaded.
MIN_ADDRESSES = 3 << 30  # bytes; what is resident is a tenth of it
MIN_THREADS, THREADS_PER_CORE = 24, 4
NO_MORE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def check_limits() -> None:
    """Raises `ConfigError` where the process may have too little memory, or too few threads."""
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY and addresses < MIN_ADDRESSES:
        raise ConfigError(
            f"ulimit -v = {addresses >> 10}: must be unlimited, or at least "
            f"{MIN_ADDRESSES >> 10} (kB), which the libraries reserve"
        )
    wanted = MIN_THREADS + THREADS_PER_CORE * (os.cpu_count() or 1)
    started = _startable(wanted)
    if started < wanted:
        raise ConfigError(
            f"only {started} more threads can be started: must be at least {wanted} (ulimit -u, "
            "or the limit of a container on processes)"
        )


def _startable(wanted: int) -> int:
    """Number of threads, up to `wanted`, that can live at once beside those that do."""
    done = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        pass
    finally:
        done.set()
    for thread in threads:
        thread.join()
    return len(threads)


@contextlib.contextmanager
def memory_error_as_config_error(what: str) -> Iterator[None]:
    """Context in which missing memory becomes a `ConfigError` about `what`."""
    try:
        yield
    except MemoryError:
        raise ConfigError(f"{what}: takes more memory than there is") from None


def told(error: BaseException) -> str | None:
    """Line about memory, threads or files that ran out, with the place; None of other errors."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        reason = "not enough memory" + f": {text}" * bool(text)
    elif isinstance(error, OSError) and error.errno in NO_MORE or "start new thread" in text:
        reason = f"a limit of this machine is reached: {text}"
    else:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}dapo_jax{os.sep}" in frame.filename]
    place = f" (in {own[-1].name}, {own[-1].filename}:{own[-1].lineno})" if own else ""
    return reason + place
