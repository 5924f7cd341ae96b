"""launch/tpu_gke.sh with a stub of `kubectl`; launch/gpu.sh with a stub of nvidia-smi."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from clouds import STUBS, output_of, wait_for
from row_files import read_table

RUN = ("run", "--name=big", "--image=host/p/dapo:1", "--type=v5p", "--topology=4x4x4", "--slices=2")
TRAINER = ("--", "--config=x", "--config.run_dir=gs://b/r")
HOSTILE = ["$(touch trap)", "$HOME $$(A)", "a: \"b\" \\ 'c' # d", "- {e: f}", "", "two\nlines\té *"]


def launch(cloud, *words: str, expect: int = 0) -> str:
    return cloud.call(*words, script="tpu_gke.sh", expect=expect)


def calls(cloud, verb: str) -> list[list[str]]:
    path = cloud.folder / "kubectl.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [call for call in (json.loads(line)[1:] for line in lines) if call[0] == verb]


def manifest(cloud) -> dict:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((cloud.folder / "manifest.yaml").read_text())


def container(cloud) -> dict:
    slices = manifest(cloud)["spec"]["replicatedJobs"][0]
    return slices["template"]["spec"]["template"]["spec"]["containers"][0]


def test_a_jobset_of_two_slices_is_made_and_watched(cloud):
    output = launch(cloud, *RUN, "--spot", "--tries=4", *TRAINER)
    assert [line for line in output.splitlines() if line.startswith("attempt")] == [
        f"attempt 0 line {i}" for i in range(3)
    ]
    spec = manifest(cloud)["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    slices = spec["replicatedJobs"][0]
    job = slices["template"]["spec"]
    assert (slices["replicas"], job["completions"], job["parallelism"]) == (2, 16, 16)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    # podFailurePolicy needs both.
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4]
    assert container(cloud)["resources"] == {"limits": {"google.com/tpu": 4}}


def test_samplers_are_a_second_job_that_never_ends_the_run(cloud):
    words = "--samplers=4", "--sampler-spot", "--sampler-flag=--config.mesh.decode_tensor=8"
    launch(cloud, *RUN, *words, "--secret-env=DAPO_API_KEY=s/k", "--queue=q", *TRAINER)
    made = manifest(cloud)
    spec = made["spec"]
    slices, samplers = spec["replicatedJobs"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [slices["name"]]}
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    # Several samplers share a node pool; a slice has its own.
    assert "exclusive" in str(slices["template"]["metadata"])
    assert "metadata" not in samplers["template"] and samplers["replicas"] == 4
    job = samplers["template"]["spec"]
    assert job["completions"] == 1 and job["backoffLimit"] > 10_000
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["Ignore"]
    pod, trainer = job["template"]["spec"], slices["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["tolerations"] and "tolerations" not in trainer
    (sampler,) = pod["containers"]
    assert sampler["resources"] == {"limits": {"google.com/tpu": 8}}
    assert sampler["command"][4:] == [
        "--run=gs://b/r",
        "--trainer=http://big-slice-0-0.big:8200",
        "--config.mesh.decode_tensor=8",
    ]
    assert sampler["env"] == trainer["containers"][0]["env"]
    flags = trainer["containers"][0]["command"][4:]
    assert {"--config.sampler.engine=samplers", "--config.extras.samplers.host=0.0.0.0"} <= set(
        flags
    )


def test_the_cluster_starts_again_and_the_new_pod_is_followed(cloud):
    cloud.plays(jobset=[{"code": 75}, {"cut": 2}])
    output = launch(cloud, *RUN, *TRAINER)
    assert "started again by the cluster: 1 of 9 times" in output and "launch: done" in output
    lines = [line for line in output.splitlines() if line.startswith("attempt")]
    assert lines == [f"attempt {a} line {i}" for a in range(2) for i in range(3)]  # each once


@pytest.mark.parametrize("code", [3, 1])
def test_a_failed_jobset_ends_with_the_trainers_code(cloud, code):
    cloud.plays(jobset=[{"code": code}])
    output = launch(cloud, *RUN, "--tries=2", *TRAINER, expect=code)
    assert output.count("started again") == (1 if code == 1 else 0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_pod_that_is_told_to_go_does_not_pass_for_the_end(cloud, asked):
    """The container's own command runs here, with the trainer of the stubs."""
    launch(cloud, *RUN, *TRAINER)
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
    launch(cloud, *RUN, *[f"--env=A{i}={t}" for i, t in enumerate(HOSTILE)], *TRAINER, *words)

    # Nothing is left that Kubernetes would replace; it reads $$ as $.
    made = container(cloud)
    assert not any("$(" in text.replace("$$", "") for text in made["command"][4:])
    assert [text.replace("$$", "$") for text in made["command"][-len(words) :]] == words
    values = [v["value"] for v in made["env"] if not v["name"].startswith("JAX")]
    assert [value.replace("$$", "$") for value in values] == HOSTILE
    assert not (cloud.tree / "trap").exists()


def test_a_second_jobset_of_the_name_is_refused(cloud):
    launch(cloud, *RUN, "--detach", *TRAINER)
    assert "AlreadyExists" in launch(cloud, *RUN, *TRAINER, expect=1)
    assert "big: Running, started again 0 times" in launch(cloud, "status", "--name=big")
    assert "attempt 0 line 2" in launch(cloud, "attach", "--name=big")
    assert "not deleted" in launch(cloud, "delete", "--name=big", expect=1)
    launch(cloud, "delete", "--name=big", "--yes")
    assert not (cloud.folder / "jobset.json").exists()


def test_ctrl_c_deletes_the_jobset(cloud):
    cloud.plays(jobset=[{"lines": 99, "seconds": 0.2}])
    process = cloud.start(*RUN, *TRAINER, script="tpu_gke.sh")
    wait_for(lambda: calls(cloud, "logs"))
    os.killpg(process.pid, signal.SIGINT)
    output_of(process, 130)
    assert not (cloud.folder / "jobset.json").exists()


def test_a_dry_run_prints_the_manifest_and_calls_nothing(cloud):
    output = launch(cloud, *RUN, "--dry-run", *TRAINER)
    assert not calls(cloud, "create") and "kubectl --namespace=default create -f -" in output
    launch(cloud, *RUN, *TRAINER)
    assert (cloud.folder / "manifest.yaml").read_text() in output
    kept = {"name": "JAX_COMPILATION_CACHE_DIR", "value": "gs://b/jax_cache"}
    assert container(cloud)["env"] == [kept]


@pytest.mark.parametrize(("words", "text"), read_table(__file__, "wrong"))
def test_what_is_wrong_is_said_before_anything_is_made(cloud, words, text):
    output = launch(cloud, *RUN, "--config.run_dir=gs://b", *words, expect=2)
    assert text in output and not calls(cloud, "create")


def test_a_config_for_other_chips_is_an_error_before_anything_is_made(cloud):
    cloud.python = sys.executable
    words = ["--", "--config=dapo_qwen2p5_32b", "--config.run_dir=gs://b/r"]  # for 64 chips of v5p
    output = launch(cloud, *RUN, "--emit-manifest", *words, expect=2)
    assert "its variant v5p_64 is not for 128 chips of v5p" in output
    assert "kind: JobSet" not in output and not calls(cloud, "create")


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


def test_a_machine_with_an_old_driver_is_refused(cloud):
    (cloud.folder / "gpus").write_text("A100, 40 GiB, 470.82")
    assert "CUDA 12 needs 525" in on_gpus(cloud, expect=1) and not cloud.starts()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has GPUs")
def test_a_machine_without_gpus_is_refused(cloud):
    assert "no NVIDIA GPU" in cloud.call(*TRAINER, script="gpu.sh", expect=1)
