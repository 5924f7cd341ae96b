"""Runs that kill themselves at a chosen place, and what of a resumed run must be the same bits."""

import pathlib
import signal

import forked
import numpy as np
from small_runs import read_rollouts, read_rows

from dapo_jax.run.export import SavedPolicy

# Patches of a program, which run first.
IN_STEP_3 = """
import os, signal
from dapo_jax.run.console import Progress
show = Progress.step
def step(self, number, *rest):
    show(self, number, *rest)
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
Progress.step = step
"""
DURING_SAVE_2 = """
import os, signal
from dapo_jax.run.store import Checkpoints
save = Checkpoints.save
def save_and_die(self, record, states):
    save(self, record, states)
    if record.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Checkpoints.save = save_and_die
"""


def run_killed(program: str, *arguments: object, **changed: str) -> None:
    """Run a patched program, which must be killed by its patch."""
    killed = forked.run(program, *arguments, **changed)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]


def assert_same_bits(run_dir: pathlib.Path, expected: pathlib.Path) -> None:
    """Compare metrics without times, recorded responses and the newest parameters of two runs."""
    assert read_rows(run_dir) == read_rows(expected)
    for folder in "rollouts", "evaluations":
        assert read_rollouts(run_dir, folder) == read_rollouts(expected, folder)
    ours, other = SavedPolicy(run_dir), SavedPolicy(expected)
    assert ours.step == other.step and ours.shapes() == other.shapes()
    for path in ours.shapes():
        np.testing.assert_array_equal(ours.read(path), other.read(path))
