"""launch/local.sh with a stub of everything that it starts."""

import pytest
from clouds import STUBS


def run_here(cloud, *words) -> tuple[int, str]:
    """launch/local.sh on a machine with two GPUs."""
    (cloud.folder / "node.json").write_text('{"state": "READY"}')
    process = cloud.start(*words, script="local.sh", path=str(STUBS / "worker"))
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(("words", "extra", "platforms", "flags"), [
    (["--tpu=v6e"], "[tpu]", "tpu,cpu", ["async_collective_fusion=true", "vmem_limit_kib=98304"]),
    (["--tpu"], "[tpu]", "tpu,cpu", ["async_collective_fusion=true"]),
    ([], "[cuda]", None, []), (["--cpu"], "", "cpu", []), (["--devices=2"], "", "cpu", []),
])  # fmt: skip
def test_this_machine_is_installed_and_flagged_for_its_devices(
    cloud, monkeypatch, words, extra, platforms, flags
):
    monkeypatch.delenv("JAX_PLATFORMS")
    code, said = run_here(cloud, *words, "--config.seed=1")
    assert code == 0 and "step 6 of worker 0" in said
    installed, (start,) = (cloud.folder / "pip.log").read_text(), cloud.starts()
    assert installed.strip().endswith(f"-e .{extra}")
    assert start["arguments"] == ["--config=configs/arithmetic.py", "--config.seed=1"]
    told = start["env"].get("LIBTPU_INIT_ARGS", "")
    assert start["env"].get("JAX_PLATFORMS") == platforms and bool(told) == bool(flags)
    assert all(flag in told for flag in flags) and ("vmem" in told) == (words == ["--tpu=v6e"])


@pytest.mark.parametrize(("words", "text"), [
    (["--tpu=6e"], "--tpu=6e: must be a generation"),
    (["--tpu", "--processes=2"], "of virtual CPU devices, not of a TPU"),
])  # fmt: skip
def test_flags_that_mean_nothing_here_stop_before_installing(cloud, words, text):
    code, said = run_here(cloud, *words)
    assert code == 2 and text in said and not (cloud.folder / "pip.log").exists()


def test_help_is_the_head_of_the_script(cloud):
    code, said = run_here(cloud, "--help")
    assert code == 0 and "--tpu[=GENERATION]" in said and "nothing is started again." in said
    assert "set -" not in said
