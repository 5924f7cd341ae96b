"""The measurements of tests/device at toy sizes, and parts that fail."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests/device/run.sh"
IMAGE = """absl-py cloudpickle etils filelock flax huggingface-hub jax jaxtyping jinja2 numpy optax
orbax-checkpoint prometheus-client protobuf pyarrow pyyaml rich safetensors sympy tokenizers"""
NEEDS_GPU = ("cuDNN is not detected", "compute.attention = 'cudnn'")


def run_kit(folder: pathlib.Path, **variables: str) -> list[dict]:
    """Return the lines of a run of the kit on one virtual device."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    changed = {"TOY": "1", "PYTHON": sys.executable, "XLA_FLAGS": flags, **variables}
    done = subprocess.run(
        ["bash", SCRIPT, folder], env=os.environ | changed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "device.jsonl").read_text().splitlines()]


def test_the_image_and_the_collected_wheels_are_what_the_library_requires():
    setup = ast.parse((ROOT / "setup.py").read_text())
    keywords = [node for node in ast.walk(setup) if isinstance(node, ast.keyword)]
    (required,) = (node.value for node in keywords if node.arg == "install_requires")
    names = {Requirement(text).name for text in ast.literal_eval(required)}
    (packed,) = re.findall(r"^packages=\((.*)\)$", (SCRIPT.parent / "pack.sh").read_text(), re.M)
    of_others = {"array-record", "portpicker"}  # grain's and pydantic's
    of_others |= {"annotated-types", "pydantic-core", "typing-inspection"}
    assert names - set(IMAGE.split()) == set(packed.split()) - of_others


@pytest.mark.slow
def test_a_part_that_fails_or_is_too_slow_costs_no_other_part(tmp_path):
    lines = run_kit(tmp_path, PARTS="unknown=60 attention=1 versions=60", LIMIT="120")
    errors = {line["part"]: line["error"] for line in lines if "error" in line}
    assert errors == {"unknown": "exit code 1, limit 60 s", "attention": "exit code 137, limit 1 s"}
    assert [line["case"] for line in lines if "case" in line] == ["versions", "driver"]
    assert {line["part"] for line in lines if "part_seconds" in line} == {
        "unknown",
        "attention",
        "versions",
    }


def test_no_part_starts_after_the_limit(tmp_path):
    lines = run_kit(tmp_path, PARTS="versions=60", LIMIT="5")
    assert lines == [{"part": "versions", "error": "no time was left"}]


@pytest.mark.slow
def test_every_part_measures_on_a_cpu_what_needs_no_gpu(tmp_path):
    parts = "versions decoding steps resume rows_0p6b rows_4b attention"
    lines = run_kit(tmp_path, PARTS=" ".join(f"{p}=900" for p in parts.split()), LIMIT="5400")
    for line in lines:
        error = line.get("error", "")
        assert not error or any(reason in error for reason in NEEDS_GPU), line
    measured = {(line["part"], line["case"]): line for line in lines if "case" in line}
    assert measured["resume", "kill and resume"]["killed"]
    for same in ("same_metrics", "same_weights"):
        assert measured["resume", "kill and resume"][same]
    assert measured["steps", "arithmetic"]["seconds_update"] > 0
    assert measured["steps", "SmolLM2-135M, random"]["steps"] == 3
    assert measured["rows_0p6b", "Qwen3-0.6B RL LoRA 16384"]["tokens_per_second"] > 0
    kernels = {line["kernel"] for line in lines if line["part"] == "attention" and "output" in line}
    assert kernels == {"plain", "blocked"}
