"""A long run holds no more and more."""

import pathlib
from typing import NamedTuple

import pytest
from small_runs import make_quick_config

from dapo_jax.config.experiment import Checkpoint, Evaluation, Log, Rollout
from dapo_jax.run.run import train

MAX_GROWTH = 32 << 20  # bytes of memory


class Held(NamedTuple):
    """Resources of this process: threads, open files, bytes of memory."""

    threads: int
    files: int
    memory: int

    @classmethod
    def now(cls) -> "Held":
        folder = pathlib.Path("/proc/self")
        pages = int((folder / "statm").read_text().split()[1])
        count = [sum(1 for _ in (folder / name).iterdir()) for name in ("task", "fd")]
        return cls(*count, pages * 4096)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_two_thousand_steps_hold_no_more_than_four_hundred(base, tmp_path):
    """With all that is written: checkpoints, responses, TensorBoard. `pytest -s` shows them."""
    held: dict[int, Held] = {}

    def look(step, _):
        if step % 200 == 0:
            held[step] = Held.now()
            print(step, held[step])

    config = make_quick_config(
        base,
        tmp_path / "run",
        total_steps=2000,
        rollout=Rollout(4, 4, 2, max_sample_rounds=2, when_starved="partial"),
        checkpoint=Checkpoint(every_steps=10),
        evaluation=Evaluation(every_steps=50, samples_per_problem=2),
        log=Log(show_group_every_steps=0, report=False),
    )
    config.data.heldout_problems = 16
    assert train(config, look)["steps"] == 2000
    early, late = held[400], held[2000]
    # They vary by so many.
    assert late.threads <= early.threads + 3 and late.files <= early.files + 8
    assert late.memory < early.memory + MAX_GROWTH
