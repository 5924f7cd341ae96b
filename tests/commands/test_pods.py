"""Arrays of compiled programs, and programs compiled for a TPU pod. Needs libtpu (tpu extra)."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "pods.py"


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("mesh", ["fsdp=8,tensor=2", "fsdp=8,decode_tensor=2"])
def test_a_small_model_fits_a_pod_without_a_square_of_the_length(mesh):
    shape = ["--row_tokens", "2048", "--prompt_tokens", "256", "--microbatches", "4"]
    run = ["--model", "tiny", "--topology", "v5e:4x4", "--mesh", mesh, "--remat", "attention"]
    command = [sys.executable, SCRIPT, *run, *shape, "--load_layers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
    lines = {line["program"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(lines) == {"update", "score", "load", "prefill", "insert", "decode"}
    for line in lines.values():
        assert line["fits"] and line["peak_gib"] <= line["together_gib"] < 1
        assert not line["T x T"] and not line["V x T"]
        assert not line.get("copies of a cache")
    update = lines["update"]
    # Attention is kept, so its forward kernel is in the program once.
    assert [name.split("_segmented")[0] for name in update["kernels"]] == [
        "1 x splash_mha_dkv",
        "1 x splash_mha_dq",
        "1 x splash_mha_fwd",
    ]
    gathers = [line for line in update["head exchanges"] if "all-gather" in line]
    assert len(gathers) == 1 and gathers[0].startswith("1 x all-gather bf16[512,")
    # No row is gathered from all devices: 8 or 16 rows of 2,048 tokens.
    assert not any("16384" in line or "32768" in line for line in update["largest"])
