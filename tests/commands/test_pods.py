"""Arrays of compiled programs, and programs compiled for a TPU pod. Needs libtpu (tpu extra)."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import hlo_arrays
import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "pods.py"
TEXT = pathlib.Path(__file__).with_suffix(".hlo").read_text()


def test_arrays_and_collectives_are_read_from_a_compiled_text():
    made = hlo_arrays.instructions(TEXT)
    expected = ["all-reduce", "fusion", "all-gather", "all-reduce", "copy", "copy"]
    assert [array.operation for array in made] == expected
    assert hlo_arrays.largest(made, 1) == ["all-gather f32[16,96] 0.00 GiB (f/jvp(head)/x)"]
    assert hlo_arrays.square(made, 64) == []  # only inside a fusion, so never in memory
    assert hlo_arrays.over(made, {96}, {16}) == ["all-gather f32[16,96]"]
    assert hlo_arrays.copies(made, 1024) == ["1 x copy bf16[4,8,32]"]  # and no matrix
    assert hlo_arrays.copies(made, 1025) == []
    assert hlo_arrays.collectives(made, "head") == ["1 x all-gather f32[16,96] over 4"]
    assert hlo_arrays.collectives(made, sizes={96}) == ["1 x all-gather f32[16,96] over 4"]
    assert hlo_arrays.collectives(made, looped=True) == ["1 x all-reduce f32[16] over 2"]
    assert "1 x all-reduce f32[16] over 8" in hlo_arrays.collectives(made)


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
