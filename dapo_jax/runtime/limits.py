"""Errors of exhausted resources (memory, threads, open files) as one line."""

import errno
import os
import resource
import traceback

from dapo_jax.types.errors import ConfigError

# Measured on two cores: with less, JAX's libraries abort while they are loaded.
MIN_ADDRESS_SPACE = 3 << 30  # bytes
RESOURCE_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def check_limits() -> None:
    """Raise `ConfigError` if the address space of the process is too small."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        raise ConfigError(
            f"ulimit -v = {limit >> 10}: must be unlimited, or at least "
            f"{MIN_ADDRESS_SPACE >> 10} (kB), which the libraries reserve"
        )


def resource_error_message(error: BaseException) -> str | None:
    """Return a line about exhausted memory, threads or files; None for other errors."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        reason = "not enough memory" + (f": {text}" if text else "")
    elif getattr(error, "errno", None) in RESOURCE_ERRORS or "start new thread" in text:
        reason = f"a limit of this machine is reached: {text}"
    else:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}dapo_jax{os.sep}" in frame.filename]
    place = f" (in {ours[-1].name}, {ours[-1].filename}:{ours[-1].lineno})" if ours else ""
    return reason + place
