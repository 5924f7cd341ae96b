"""launch/tpu_gke.sh with a stub of `kubectl`; launch/gpu.sh with a stub of nvidia-smi."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from clouds import JOBSET, STUBS, output_of, wait_for

TRAINER = ("--", "--config=x", "--config.run_dir=gs://b/r")
SAMPLERS = ("--samplers=4", "--sampler-spot", "--sampler-flag=--config.mesh.decode_tensor=8")
MANIFEST = pathlib.Path(__file__).with_name("jobset.yaml")
HOSTILE = ["$(touch trap)", "$HOME $$(A)", "a: \"b\" \\ 'c' # d", "- {e: f}", "", "two\nlines\té *"]


def launch(cloud, *words: str, expect: int = 0) -> str:
    return cloud.call(*words, script="tpu_gke.sh", expect=expect)


def manifest(cloud) -> dict:
    return yaml.safe_load((cloud.folder / "manifest.yaml").read_text())


def container(cloud) -> dict:
    slices = manifest(cloud)["spec"]["replicatedJobs"][0]
    return slices["template"]["spec"]["template"]["spec"]["containers"][0]


def test_a_jobset_of_two_slices_with_samplers_is_made_and_watched(cloud):
    words = "--tries=4", *SAMPLERS, "--secret-env=DAPO_API_KEY=s/k", "--queue=q"
    output = launch(cloud, *JOBSET, *words, *TRAINER)
    lines = [line for line in output.splitlines() if line.startswith("attempt")]
    assert lines == [f"attempt 0 line {i}" for i in range(3)]
    assert manifest(cloud) == yaml.safe_load(MANIFEST.read_text())


def test_the_cluster_starts_again_and_the_new_pod_is_followed(cloud):
    cloud.plays(jobset=[{"code": 75}, {"cut": 2}])
    output = launch(cloud, *JOBSET, *TRAINER)
    assert "started again by the cluster: 1 of 9 times" in output and "launch: done" in output
    lines = [line for line in output.splitlines() if line.startswith("attempt")]
    assert lines == [f"attempt {a} line {i}" for a in range(2) for i in range(3)]  # each once


@pytest.mark.parametrize("code", [3, 1])
def test_a_failed_jobset_ends_with_the_trainers_code(cloud, code):
    cloud.plays(jobset=[{"code": code}])
    output = launch(cloud, *JOBSET, "--tries=2", *TRAINER, expect=code)
    assert output.count("started again") == (1 if code == 1 else 0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_pod_that_is_told_to_go_does_not_pass_for_the_end(cloud, asked):
    """The container's own command runs here, with the trainer of the stubs."""
    launch(cloud, *JOBSET, *TRAINER)
    cloud.plays(runs=[{"seconds": 0.1, "steps": 50 if asked else 2}])
    (cloud.folder / "node.json").write_text('{"state": "READY"}')
    (cloud.folder / "bin").mkdir()
    (cloud.folder / "bin/python").symlink_to(STUBS / "worker/python3")
    environment = cloud.environment() | {"STUB_WORKER": "0"}
    environment["PATH"] = f"{cloud.folder}/bin:{environment['PATH']}"
    command = container(cloud)["command"]
    process = subprocess.Popen(command, cwd=cloud.tree, env=environment, start_new_session=True)
    if asked:
        wait_for(cloud.starts)
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == (143 if asked else 0)
    assert "async_collective_fusion=true" in cloud.starts()[0]["env"]["LIBTPU_INIT_ARGS"]


def test_hostile_arguments_stand_in_the_manifest_as_they_are(cloud):
    words = [f"--config.data.source={text}" for text in HOSTILE]
    launch(cloud, *JOBSET, *[f"--env=A{i}={t}" for i, t in enumerate(HOSTILE)], *TRAINER, *words)

    # Nothing is left that Kubernetes would replace; it reads $$ as $.
    made = container(cloud)
    assert not any("$(" in text.replace("$$", "") for text in made["command"][4:])
    assert [text.replace("$$", "$") for text in made["command"][-len(words) :]] == words
    values = [v["value"] for v in made["env"] if not v["name"].startswith("JAX")]
    assert [value.replace("$$", "$") for value in values] == HOSTILE
    assert not (cloud.tree / "trap").exists()


def test_a_second_jobset_of_the_name_is_refused(cloud):
    launch(cloud, *JOBSET, "--detach", *TRAINER)
    assert "AlreadyExists" in launch(cloud, *JOBSET, *TRAINER, expect=1)
    assert "big: Running, started again 0 times" in launch(cloud, "status", "--name=big")
    assert "attempt 0 line 2" in launch(cloud, "attach", "--name=big")
    assert "not deleted" in launch(cloud, "delete", "--name=big", expect=1)
    launch(cloud, "delete", "--name=big", "--yes")
    assert not (cloud.folder / "jobset.json").exists()


def test_ctrl_c_deletes_the_jobset(cloud):
    cloud.plays(jobset=[{"lines": 99, "seconds": 0.2}])
    process = cloud.start(*JOBSET, *TRAINER, script="tpu_gke.sh")
    wait_for(lambda: cloud.kubectl("logs"))
    os.killpg(process.pid, signal.SIGINT)
    output_of(process, 130)
    assert not (cloud.folder / "jobset.json").exists()


def test_a_dry_run_prints_the_manifest_and_calls_nothing(cloud):
    output = launch(cloud, *JOBSET, "--dry-run", "--spot", *TRAINER)
    assert not cloud.kubectl("create") and "kubectl --namespace=default create -f -" in output
    launch(cloud, *JOBSET, "--spot", *TRAINER)
    assert (cloud.folder / "manifest.yaml").read_text() in output
    kept = {"name": "JAX_COMPILATION_CACHE_DIR", "value": "gs://b/jax_cache"}
    assert container(cloud)["env"] == [kept]
    assert output.count("gke-spot") == 2 and "sampler" not in output


def test_a_config_for_other_chips_is_an_error_before_anything_is_made(cloud):
    cloud.python = sys.executable
    words = ["--", "--config=dapo_qwen2p5_32b", "--config.run_dir=gs://b/r"]  # for 64 chips of v5p
    output = launch(cloud, *JOBSET, "--emit-manifest", *words, expect=2)
    assert "its variant v5p_64 is not for 128 chips of v5p" in output
    assert "kind: JobSet" not in output and not cloud.kubectl("create")


def on_gpus(cloud, *words: str, expect: int = 0) -> str:
    (cloud.folder / "node.json").write_text('{"state": "READY"}')
    return cloud.call(*words, *TRAINER, script="gpu.sh", path=STUBS / "worker", expect=expect)


def test_a_run_on_gpus_is_started_again_and_ends(cloud, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    cloud.plays(runs=[{"code": 75, "at": 2}, {}])
    output = on_gpus(cloud)
    assert "launch: 2 GPU(s)" in output and "from step 2" in output
    assert "try 1 of 3: ended with exit code 75" in output
    assert "jax_cache" in cloud.starts()[0]["env"]["JAX_COMPILATION_CACHE_DIR"]
    assert "[cuda]" in (cloud.folder / "pip.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_on_gpus_saves_when_asked(cloud, number):
    cloud.plays(runs=[{"seconds": 0.1, "steps": 99}])
    (cloud.folder / "node.json").write_text('{"state": "READY"}')
    process = cloud.start(*TRAINER, script="gpu.sh", path=STUBS / "worker")
    wait_for(lambda: (cloud.folder / "gs/step_0").exists())
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    output = output_of(process, 128 + number)
    assert "saved" in output and "the same command resumes it" in output
    assert not cloud.is_training() and len(cloud.starts()) == 1


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has GPUs")
def test_a_machine_without_gpus_or_with_an_old_driver_is_refused(cloud):
    assert "no NVIDIA GPU" in cloud.call(*TRAINER, script="gpu.sh", expect=1)
    (cloud.folder / "gpus").write_text("A100, 40 GiB, 470.82")
    assert "CUDA 12 needs 525" in on_gpus(cloud, expect=1) and not cloud.starts()
