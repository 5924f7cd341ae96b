"""What tests of several processes share: starting them on one machine, and waiting for them."""

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
GONE_SECONDS = 30  # after which nobody may still wait for a dead process

PROGRAM = """
import os, signal, sys
sys.path.insert(0, "tests")
import conftest
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={devices}"
from small_runs import *
from dapo_jax import cli, processes
from dapo_jax.experiment.config import *
from dapo_jax.run import train
INDEX = int(os.environ.get("DAPO_PROCESS_ID", "0"))
config = make_config({base!r}, {run_dir!r}, {changes})
{patch}
sys.exit(processes.run(lambda: cli.guarded(lambda: train(config))))
"""


@dataclasses.dataclass
class Ended:
    """What is left of a process."""

    code: int
    out: str
    err: str


class Several:
    """Processes of one program, joined over loopback."""

    def __init__(self, folder: pathlib.Path, command: list[str], count: int, **variables: str):
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._paths = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(count)]
        self.children = []
        for i, (out, err) in enumerate(self._paths):
            told = {"DAPO_COORDINATOR": f"127.0.0.1:{port}", "DAPO_PROCESSES": str(count)}
            told |= {"DAPO_PROCESS_ID": str(i), "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
            told = told if count > 1 else {"DAPO_PROCESSES": "1", "PYTHONPATH": str(ROOT)}
            with out.open("w") as stdout, err.open("w") as stderr:
                self.children.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=os.environ | told | variables,
                        stdout=stdout,
                        stderr=stderr,
                    )
                )

    def wait(self, seconds: float = 240) -> list[Ended]:
        """All of them ended; fails, and ends them, where one is still there after `seconds`."""
        until = time.monotonic() + seconds
        try:
            codes = [c.wait(max(0.1, until - time.monotonic())) for c in self.children]
        finally:
            for child in self.children:
                child.kill()
        texts = [(out.read_text(), err.read_text()) for out, err in self._paths]
        return [Ended(code, *both) for code, both in zip(codes, texts, strict=True)]


def start_training(
    base, run_dir, count: int, devices: int, *, changes: str = "", patch: str = ""
) -> Several:
    """`count` processes of `devices` virtual devices each that train together.

    Args:
        changes: arguments of `make_config`, as Python.
        patch: run in each before it joins; it knows its number as INDEX, and `config`.
    """
    program = PROGRAM.format(
        base=str(base), run_dir=str(run_dir), devices=devices, changes=changes, patch=patch
    )
    folder = pathlib.Path(f"{run_dir}_output")
    return Several(folder, [sys.executable, "-c", program], count)
