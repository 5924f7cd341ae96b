"""Whole runs of minutes: killed and resumed, the main job as a user runs it, and a long one."""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

import bench
import forked
import pytest
from kills import IN_STEP_3, assert_same_bits, run_killed
from small_runs import ROOT, make_quick_config, read_rows

from dapo_jax.config.experiment import Checkpoint, Evaluation, Log, Rollout
from dapo_jax.run.loop import train
from dapo_jax.run.store import newest_step

TRAIN = "from dapo_jax.commands.train import main\nassert main() == 0"
SMALL = bench.flags(
    "total_steps=4 rollout.prompts_per_step=4 rollout.samples_per_prompt=4 "
    "checkpoint.every_steps=1 data.heldout_problems=8 evaluation.every_steps=2 log.report=false "
    "rollout.reward_bursts=1"  # else the surplus depends on the clock
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arithmetic", "two_sums"])
def test_a_killed_run_resumes_bit_for_bit(name, tmp_path, compiled_once):
    if name == "two_sums":
        pytest.importorskip("verifiers.v1")
    config, run_dir = ROOT / f"configs/{name}.py", tmp_path / "run"
    arguments = [f"--config={config}", f"--config.run_dir={run_dir}", *SMALL]
    flags = {"XLA_FLAGS": forked.one_device()}
    done = forked.run(TRAIN, *arguments, **flags)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = run_dir.rename(tmp_path / "expected")
    run_killed(f"{IN_STEP_3}\n{TRAIN}", *arguments, **flags)
    assert newest_step(run_dir, field="run") == 2
    done = forked.run(TRAIN, *arguments, **flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_bits(run_dir, expected)
    assert any(0 < row["accuracy"] < 1 for row in read_rows(expected)[1:])


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", "dapo_jax", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dapo_teaches_the_embedded_task(seed, tmp_path):
    """From a base of its own: 30 to 60 % of held-out problems before, at least 90 % after."""
    base, run_dir = tmp_path / "base", tmp_path / "run"
    common = [f"--config.seed={seed}"]
    run("sft", "--config=configs/arithmetic_base.py", f"--config.out={base}", *common)
    run(
        "train",
        "--config=configs/arithmetic.py",
        f"--config.model.folder={base}",
        f"--config.run_dir={run_dir}",
        *common,
    )
    summary = json.loads((run_dir / "summary.json").read_text())
    assert 0.3 <= summary["heldout_accuracy_before"] <= 0.6
    assert summary["heldout_accuracy_after"] >= 0.9


@pytest.mark.slow
def test_truncated_sampling_teaches_it_too(tmp_path):
    flags = [f"--config.{section}.top_p=0.9" for section in ("sampler", "evaluation")]
    run("train", "--config=configs/arithmetic.py", f"--config.run_dir={tmp_path}", *flags)
    assert json.loads((tmp_path / "summary.json").read_text())["heldout_accuracy_after"] >= 0.9


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
