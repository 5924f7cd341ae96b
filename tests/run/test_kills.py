"""Runs with a package of verifiers, a game of Gymnasium and programs in the sandbox: a run that is
killed after step 2 of 4 resumes bit for bit.
"""

import pathlib
import shutil

import bench
import forked
import pytest
from kills import IN_STEP_3, assert_same_bits, run_killed
from small_runs import ROOT, read_rows

from dapo_jax.run.checkpointing.checkpoints import latest_valid

TRAIN = "from dapo_jax.commands.train import main\nassert main() == 0"
PROGRAMS = "import programs\nprograms.main()"
SMALL = bench.flags(
    "total_steps=4 rollout.prompts_per_step=4 rollout.samples_per_prompt=4 "
    "checkpoint.every_steps=1 data.heldout_problems=8 evaluation.every_steps=2 log.report=false"
)


def command(name: str, folder: pathlib.Path) -> tuple[str, list[object]]:
    """Return the program that trains in `folder / "run"`, and its arguments."""
    if name == "programs":
        return PROGRAMS, ["--folder", folder, "--sft_steps", 100, *SMALL]
    config = ROOT / f"configs/{name}.py"
    return TRAIN, [f"--config={config}", f"--config.run_dir={folder / 'run'}", *SMALL]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_sums", "blackjack", "programs"])
def test_a_killed_run_resumes_bit_for_bit(name, tmp_path, compiled_once):
    if name == "programs" and not shutil.which("bwrap"):
        pytest.skip("needs bubblewrap")
    if name != "programs":
        pytest.importorskip({"two_sums": "verifiers.v1", "blackjack": "gymnasium"}[name])
    program, arguments = command(name, tmp_path)
    flags = {"XLA_FLAGS": forked.one_device()}
    done = forked.run(program, *arguments, **flags)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = (tmp_path / "run").rename(tmp_path / "expected")
    run_killed(f"{IN_STEP_3}\n{program}", *arguments, **flags)
    assert latest_valid(tmp_path / "run", field="run") == 2
    done = forked.run(program, *arguments, **flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_bits(tmp_path / "run", expected)
    assert any(0 < row["accuracy"] < 1 for row in read_rows(expected)[1:])
