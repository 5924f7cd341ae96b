"""Programs in forks of one process that has imported JAX and the library: no fork imports again.

That process starts no thread and no device before it forks. A program gets its environment after
JAX has read its settings; XLA and `processes.run` read theirs later.
"""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

Program = str | pathlib.Path  # Python text, or a script
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["small_runs"])


def one_device() -> str:
    """Return the value of XLA_FLAGS with which a program has one virtual device."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"  # the last counts


class Child:
    """A running program; its output and errors go to two files."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[object],
        outputs: Sequence[pathlib.Path],
        changed: Mapping[str, str],
    ):
        words, folder = list(map(str, arguments)), os.getcwd()
        target = program, words, outputs, folder, os.environ | changed
        self._process = CONTEXT.Process(target=_execute, args=target)
        self._process.start()

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit code; raise `subprocess.TimeoutExpired` after `seconds`."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("program", seconds or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def run(program: Program, *arguments: object, **changed: str) -> subprocess.CompletedProcess:
    """Run a program as `subprocess.run` does; `changed` are variables of its environment."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder, name) for name in ("out", "error")]
        code = Child(program, arguments, outputs, changed).wait()
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in outputs))


def _execute(program: Program, arguments, outputs, folder: str, environment) -> None:
    for number, path in enumerate(outputs, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if isinstance(program, pathlib.Path):
        sys.argv = [str(program), *arguments]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
