"""A package that is not ours adds a plug-in of every kind, by entry points alone."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import forked
import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOREIGN = ROOT / "tests/support/foreign"
BASE = ROOT / "dapo_jax/data/policies/arithmetic_base"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """PYTHONPATH with the folder that the package is installed into."""
    source = shutil.copytree(FOREIGN, tmp_path_factory.mktemp("foreign") / "source")
    target = source.parent / "installed"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-compile", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return os.pathsep.join([str(target), os.environ["PYTHONPATH"]])


def run(path: str, *arguments) -> str:
    environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": forked.one_device()}
    done = subprocess.run(
        [sys.executable, "-m", "dapo_jax", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_command_of_another_package_is_listed_and_runs(path):
    assert "hello       of the package dapo-jax-foreign" in run(path, "--help")
    assert run(path, "hello") == "hello from another package\n"


def test_a_run_uses_plug_ins_of_another_package(path, tmp_path):
    """Its family, source, environment, sampler, verifier, reward part and sink."""
    model = shutil.copytree(BASE, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text()) | {"model_type": "otter"}
    (model / "config.json").write_text(json.dumps(settings))
    flags = (
        f"model.folder={model} data.source=counting:3 data.train_problems=40 "
        "data.heldout_problems=8 environment.name=echo environment.max_turns=2 "
        "environment.max_observation_tokens=4 reward.verifier=last_digit "
        "reward.parts=rule=1,brevity=0.1,environment=0.1 extras.brevity.longest=1000 "
        "log.sinks=lines "
        "total_steps=1 optimizer.warmup_steps=0 "
        "rollout.prompts_per_step=4 rollout.samples_per_prompt=4 rollout.max_sample_rounds=1 "
        "algorithm.dynamic_sampling=false sampler.engine=counted sampler.slots=16 "
        "evaluation.every_steps=0 "
        f"packing.rows_per_microbatch=4 log.report=false run_dir={tmp_path / 'run'}"
    )
    shown = run(path, "train", "arithmetic", *(f"--config.{flag}" for flag in flags.split()))
    assert re.search(r"warning: [1-9]\d* requests", shown)
    assert (tmp_path / "run/lines.txt").read_text().startswith("1 ")
    (line, *_) = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    recorded = json.loads(line)
    assert recorded["prompt"].startswith("3+")
    assert {"rule", "brevity", "environment"} <= recorded["reward_parts"].keys()
    assert recorded["reward_parts"]["brevity"] >= 0.09  # with its weight, of at most 100 characters
