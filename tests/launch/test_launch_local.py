"""launch/local.sh with a stub of everything that it starts."""

import pytest
from clouds import STUBS


def run_here(cloud, *words: str, expect: int = 0) -> str:
    """Call launch/local.sh on a machine with two GPUs."""
    (cloud.folder / "node.json").write_text('{"state": "READY"}')
    return cloud.call(*words, script="local.sh", path=str(STUBS / "worker"), expect=expect)


@pytest.mark.parametrize(("words", "extra", "platforms", "flags"), [
    (["--tpu=v6e"], "[tpu]", "tpu,cpu", ["async_collective_fusion=true", "vmem_limit_kib=98304"]),
    (["--tpu"], "[tpu]", "tpu,cpu", ["async_collective_fusion=true"]),
    ([], "[cuda]", None, []), (["--cpu"], "", "cpu", []), (["--devices=2"], "", "cpu", []),
])  # fmt: skip
def test_this_machine_is_installed_and_flagged_for_its_devices(
    cloud, monkeypatch, words, extra, platforms, flags
):
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "step 6 of worker 0" in run_here(cloud, *words, "--config.seed=1")
    installed, (start,) = (cloud.folder / "pip.log").read_text(), cloud.starts()
    assert installed.strip().endswith(f"-e .{extra}")
    assert start["arguments"] == ["--config=configs/arithmetic.py", "--config.seed=1"]
    given = start["env"].get("LIBTPU_INIT_ARGS", "")
    assert start["env"].get("JAX_PLATFORMS") == platforms and bool(given) == bool(flags)
    assert all(flag in given for flag in flags) and ("vmem" in given) == (words == ["--tpu=v6e"])


@pytest.mark.parametrize(("words", "text"), [
    (["--tpu=6e"], "--tpu=6e: must be a generation"),
    (["--tpu", "--processes=2"], "of virtual CPU devices, not of a TPU"),
])  # fmt: skip
def test_flags_that_mean_nothing_here_stop_before_installing(cloud, words, text):
    assert text in run_here(cloud, *words, expect=2) and not (cloud.folder / "pip.log").exists()
