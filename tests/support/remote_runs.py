"""Runs of a trainer and samplers that are commands: started, stopped and killed by tests."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from kept_groups import make_kept
from served import free_port
from small_runs import ROOT

from dapo_jax.config.experiment import Checkpoint, Config, Rollout
from dapo_jax.config.settings import open_extras

SECONDS = 600.0  # for a run to end


def make_remote(
    folders, run_dir, setting="plain", staleness=2, engine="samplers", **changes
) -> Config:
    """Five steps of a tiny policy, saved after every second one, with groups in files."""
    rollout = Rollout(4, 4, 2, staleness=staleness)
    sections = {
        "rollout": rollout,
        "total_steps": 5,
        "checkpoint": Checkpoint(every_steps=2, keep=1, keep_groups=True),
    }
    if engine != "own":
        extras = {"samplers.port": free_port(), "samplers.lease_seconds": 3.0}
        sections |= {"sampler": {"engine": engine}, "extras": open_extras(extras)}
    return make_kept(setting, *folders, run_dir, **sections | changes)


class Processes:
    """The trainer of a run and its samplers."""

    def __init__(self, config: Config):
        self.config = config
        self.run_dir = pathlib.Path(config.run_dir)
        self.file = self.run_dir.with_suffix(".json")
        self.file.write_text(json.dumps(dataclasses.asdict(config)))
        self.log = self.run_dir.with_suffix(".log").open("ab")
        self.samplers: list[subprocess.Popen] = []

    def start(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dapo_jax", *arguments]
        one_device = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
        output = {"stdout": self.log, "stderr": self.log}
        return subprocess.Popen(command, cwd=ROOT, env=one_device, **output)

    def train(self) -> subprocess.Popen:
        return self.start("train", str(self.file))

    def add_sampler(self, port: int = 0, *arguments: str) -> subprocess.Popen:
        """Start a sampler; `port` is the trainer's or leads to it."""
        trainer = f"--trainer=http://127.0.0.1:{port or self.config.extras.samplers.port}"
        self.samplers.append(self.start("sampler", f"--run={self.run_dir}", trainer, *arguments))
        return self.samplers[-1]

    def output(self) -> str:
        return self.run_dir.with_suffix(".log").read_text(errors="replace")


@contextlib.contextmanager
def processes_of(config: Config) -> Iterator[Processes]:
    made = Processes(config)
    try:
        yield made
    finally:
        for child in made.samplers:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)
            child.kill()
            child.wait()
