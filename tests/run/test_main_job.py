"""The main job as a user runs it; minutes long, so marked slow."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


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
