"""A plain run, and one with a package of verifiers, are killed in step 3 of 4, and resume."""

import bench
import forked
import pytest
from kills import IN_STEP_3, assert_same_bits, run_killed
from small_runs import ROOT, read_rows

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
