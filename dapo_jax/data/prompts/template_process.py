"""Templates are rendered by a process of their own, which is killed where one takes too long."""

import atexit
import os
import signal
import threading
import time
from typing import Any

from dapo_jax.runtime.workers.parent import WorkerProcess

SANDBOX = "dapo_jax.data.prompts.template_worker"
WAIT_SECONDS = 60.0  # for an answer, on a machine so busy that it gets no time to compute one
LONGEST_REPLY = 8 << 20  # bytes: more than the longest text, each character escaped
TOO_MUCH = "it computes for over 2 s, or needs too much memory"


class TemplateFails(Exception):
    """Attributes:
    line: of the template, where it is known.
    late: it takes too long, or too much memory.
    """

    def __init__(self, message: str, line: int | None = None, late: bool = False):
        super().__init__(message)
        self.line, self.late = line, late


class _Sandbox:
    """The process, started when it is first needed; a forked child makes its own."""

    def __init__(self):
        self._lock, self._process = threading.Lock(), None

    def ask(self, job: dict) -> dict:
        with self._lock:
            for _ in range(2):  # somebody else may have killed it
                try:
                    if self._process is None:
                        self._process = WorkerProcess(SANDBOX, longest_reply=LONGEST_REPLY)
                    return self._process.ask(job, time.monotonic() + WAIT_SECONDS)
                except (OSError, ValueError) as error:
                    if self.close() == -signal.SIGXCPU or isinstance(error, TimeoutError):
                        break
            raise TemplateFails(TOO_MUCH, late=True)

    def close(self) -> int:
        """The exit code of the process, 0 where there is none."""
        process, self._process = self._process, None
        return process.kill() if process is not None else 0


_sandbox = _Sandbox()


def _forget_parents() -> None:
    global _sandbox
    _sandbox = _Sandbox()


os.register_at_fork(after_in_child=_forget_parents)
atexit.register(lambda: _sandbox.close())


def _ask(template: str, strict: bool, **job: Any) -> dict:
    reply = _sandbox.ask({"template": template, "strict": strict} | job)
    if "error" in reply:
        raise TemplateFails(reply["error"], reply["line"])
    return reply


def render(template: str, values: dict[str, Any], *, strict: bool = False) -> str:
    """The text that a template makes of values, which are such as JSON has.

    Args:
        strict: a name that no value has raises, where it would write nothing.

    Raises `TemplateFails`.
    """
    return _ask(template, strict, values=values)["text"]


def names_read(template: str) -> frozenset[str]:
    """Names of values that the template reads. Raises `TemplateFails` where it is none."""
    return frozenset(_ask(template, True)["reads"])
