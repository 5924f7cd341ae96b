"""launch/tpu_vm.sh with a stub of `gcloud` whose workers run what they receive; launch/local.sh."""

import itertools
import json
import os
import pathlib
import pty
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from clouds import AT, JOBSET, ROOT, STUBS, output_of, wait_for
from row_files import read_table

TRAINER = ("--config=x", "--config.run_dir=gs://b")
STEPS = [f"step {i} of worker 0" for i in range(1, 7)]
HOSTILE = read_table(__file__, "hostile")
BEGINNINGS = {"tpu_vm": ("run", *AT), "tpu_gke": (*JOBSET, "--config.run_dir=gs://b"), "local": ()}


def test_a_run_on_four_workers_is_created_watched_and_deleted(cloud):
    cloud.plays(workers=4)
    output = cloud.runs("--type=v6e-16", "--spot")
    assert [line for line in output.splitlines() if line.startswith("step")] == STEPS
    (create,) = cloud.calls("tpu-vm", "create")
    assert {"--spot", "--accelerator-type=v6e-16", "--version=v2-alpha-tpuv6e"} <= set(create)
    assert all(len(cloud.starts(worker)) == 1 for worker in range(4))
    assert "scoped_vmem_limit_kib=98304" in cloud.starts()[0]["env"]["LIBTPU_INIT_ARGS"]
    assert not cloud.exists() and "dapo is deleted" in output


@pytest.mark.slow
def test_a_machine_that_is_there_is_reused_without_installing_again(cloud):
    cloud.runs("--keep")
    output = cloud.runs()
    assert len(cloud.calls("tpu-vm", "create")) == 1 and len(cloud.starts()) == 2
    assert (cloud.folder / "workers/0/pip.log").read_text().count("-e .[tpu]") == 1
    assert cloud.exists() and "is still there and costs money" in output  # not made by the second


@pytest.mark.parametrize("queued", [[], pytest.param(["--queued"], marks=pytest.mark.slow)])
def test_preempted_while_running_it_is_made_again_and_goes_on(cloud, queued):
    cloud.plays(runs=[{"preempt": 3}, {}])
    output = cloud.runs("--spot", *queued)
    assert "try 1 of 10: dapo is PREEMPTED" in output
    assert "trying again; the run goes on from gs://b/r" in output
    assert "from step 3" in output and "launch: done" in output and len(cloud.starts()) == 2
    kind = "queued-resources" if queued else "tpu-vm"
    assert len(cloud.calls(kind, "create")) == 2 and len(cloud.calls(kind, "delete")) == 2


@pytest.mark.slow
def test_a_machine_that_shuts_down_has_not_finished(cloud):
    """systemd's SIGTERM makes the trainer save and exit 143, after which it is started again."""
    cloud.plays(runs=[{"seconds": 0.3, "steps": 30}, {"steps": 1}])
    process = cloud.start("run", *AT, "--yes", *TRAINER)
    wait_for(lambda: cloud.starts(1) and cloud.starts(0))
    for path in cloud.folder.glob("workers/*/dapo_jax_run/*.session"):
        os.kill(int(path.read_text()), signal.SIGTERM)
        os.kill(int(path.with_suffix(".pid").read_text()), signal.SIGTERM)
    assert "told to shut down; the run has saved" in output_of(process)
    assert len(cloud.starts()) == 2


@pytest.mark.slow
def test_a_broken_machine_of_somebody_else_is_left_alone(cloud):
    (cloud.folder / "node.json").write_text('{"state": "PREEMPTED", "label": ""}')
    assert "was not made by this script" in cloud.runs(expect=1)
    assert not cloud.calls("tpu-vm", "delete")


def test_a_worker_that_can_not_install_is_named_and_nothing_starts(cloud):
    cloud.plays(workers=3)
    (cloud.folder / "install_fails").write_text("1")
    output = cloud.runs("--tries=2", expect=1)
    assert "launch: worker 1: installing" in output and "ERROR: no matching distribution" in output
    assert "worker 0:" not in output and "worker 2:" not in output
    assert output.count("installing failed on worker 1 of 3") == 2
    assert not any(cloud.starts(worker) for worker in range(3)) and not cloud.exists()


@pytest.mark.slow
@pytest.mark.parametrize("gcloud_repeats", [False, True])
def test_a_lost_connection_is_taken_up_and_the_run_not_started_again(cloud, gcloud_repeats):
    cloud.plays(runs=[{"seconds": 0.2}], follow_lines=[3, 4, 99], repeats=gcloud_repeats)
    output = cloud.runs()
    assert output.count("the connection was lost; the run goes on") == (0 if gcloud_repeats else 2)
    steps = [line for line in output.splitlines() if line.startswith("step")]
    assert steps == STEPS  # each once
    assert len(cloud.starts()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("code", "starts", "text"), read_table(__file__, "exit_codes"))
def test_exit_codes_say_whether_another_try_makes_sense(cloud, code, starts, text):
    cloud.plays(runs=[{"code": code, "at": 2}, {}])
    output = cloud.runs(expect=code if code in (2, 3, 4) else 0)
    assert text in output and "error: what is wrong" in output
    assert len(cloud.starts()) == starts and len(cloud.calls("tpu-vm", "create")) == 1


def test_one_launch_at_a_time_per_name(cloud):
    cloud.plays(runs=[{"seconds": 0.3}])
    first = cloud.start("run", *AT, "--yes", *TRAINER)
    wait_for(cloud.starts)
    assert "another launch of tpu-dapo is going on" in cloud.runs(expect=1)
    # From another machine there is no such lock, but the workers say so.
    (cloud.folder / "state/dapo_jax/tpu-dapo.lock").unlink()
    assert "a run is going on there already" in cloud.runs(expect=1)
    assert first.wait(60) == 0 and len(cloud.starts()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["creating", "training", "deaf"])
def test_after_ctrl_c_nothing_is_left(cloud, moment):
    cloud.plays(
        create=[{"seconds": 1} if moment == "creating" else {}],
        runs=[{"seconds": 0.1, "steps": 99, "ignore": moment == "deaf"}],
    )
    process = cloud.start("run", *AT, *TRAINER)
    wait_for(cloud.exists if moment == "creating" else cloud.is_training)
    os.killpg(process.pid, signal.SIGINT)
    output = output_of(process, 130)
    assert not cloud.exists() and not cloud.is_training()
    assert ("did not save within 2 s: killed" in output) == (moment == "deaf"), output


@pytest.mark.slow
def test_a_detached_run_goes_on_and_is_attached_stopped_and_deleted(cloud):
    cloud.plays(runs=[{"seconds": 0.1, "steps": 99}])
    output = cloud.runs("--detach")
    assert "bash launch/tpu_vm.sh attach --name=dapo --zone=us-east5-b" in output
    wait_for(cloud.is_training)
    assert "worker 1: running" in cloud.does("status")
    attached = cloud.start("attach", *AT)
    time.sleep(0.5)
    cloud.does("stop")
    assert "stopped by SIGTERM; saved" in output_of(attached, 130) and not cloud.is_training()
    assert "worker 0: exited" in cloud.does("status")
    assert "not deleted" in cloud.does("delete", expect=1) and cloud.exists()
    cloud.does("delete", "--yes")
    assert not cloud.exists()


def test_deleting_asks(cloud):
    (cloud.folder / "node.json").write_text('{"state": "READY", "label": "dapo"}')
    ours, theirs = pty.openpty()
    process = cloud.start("delete", *AT, stdin=theirs)
    os.write(ours, b"y\n")
    output_of(process)
    assert not cloud.exists()


def test_a_dry_run_prints_every_command_and_does_none(cloud):
    output = cloud.runs("--dry-run", "--spot")
    assert not cloud.calls() and not cloud.exists()
    printed = [line.split()[4] for line in output.splitlines() if line.startswith("gcloud")]
    cloud.runs("--spot")
    # A slow machine is looked at, and its workers asked, once more; Ctrl-C's stop is printed too.
    asked = itertools.groupby(call for call in cloud.calls("tpu-vm") if call[1] != "describe")
    *done, _ = [call[1] for call, _ in asked]
    assert [verb for verb in printed if verb != "describe"] == [*done, "ssh", "delete"]


def test_hostile_arguments_arrive_unharmed_and_are_evaluated_nowhere(cloud):
    trap = cloud.folder / "trap"
    words = [f"--config.data.source={text.format(trap)}" for text in HOSTILE]
    environment = [f"--env=TEST_{i}={text.format(trap)}" for i, text in enumerate(HOSTILE)]
    cloud.runs(*environment, "--", "--config.a=b", *words)
    start = cloud.starts(1)[0]
    assert start["arguments"][1 : 1 + len(words)] == words
    assert [start["env"][f"TEST_{i}"] for i in range(len(HOSTILE))] == [
        t.format(trap) for t in HOSTILE
    ]
    assert not trap.exists()


def test_a_secret_is_read_on_the_workers_and_stands_nowhere(cloud):
    name = "projects/p/secrets/hf/versions/latest"
    cloud.runs("--keep", f"--secret-env=TEST_TOKEN={name}")
    secret = f"read from {name}"
    assert cloud.starts(1)[0]["env"]["TEST_TOKEN"] == secret
    records = [p for p in cloud.folder.rglob("*") if p.is_file() and p.name != "starts.jsonl"]
    assert not [path for path in records if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize(("script", "words", "text"), read_table(__file__, "wrong"))
def test_what_is_wrong_is_said_before_anything_is_made(cloud, script, words, text):
    line = *BEGINNINGS[script], *words, "--config=x"
    path = STUBS / "worker" if script == "local" else ""
    output = cloud.call(*line, script=f"{script}.sh", path=path, expect=2)
    assert text in output and "hf_abc" not in output and not cloud.made()


def test_the_trainers_arguments_are_checked_before_anything_is_made(cloud):
    assert "settings are not checked: dapo_jax is not installed" in cloud.runs("--dry-run")
    cloud.python = sys.executable
    packaged = ["--config.run_dir=gs://b/r", "--", "--config=qwen2p5_7b_math:v6e_8"]
    output = cloud.does("run", "--dry-run", "--type=v6e-64", *packaged, expect=2)
    assert "its variant v6e_8 is not for 64 chips of v6e" in output and "gcloud" not in output
    assert "gcloud" in cloud.does("run", "--dry-run", "--type=v6e-8", *packaged)
    assert "gcloud" in cloud.runs("--dry-run", "--no-check")  # --config=x


def test_a_config_that_is_not_sent_is_an_error(cloud):
    (cloud.tree / "mine.py").write_text("")
    output = cloud.does("run", "--config=mine.py:v6e_8", "--config.run_dir=gs://b", expect=2)
    assert "--config = 'mine.py': must be a file of --ref = HEAD" in output
    assert not cloud.calls("tpu-vm", "create")


def test_every_script_passes_shellcheck(tmp_path):
    """Those inside of the Dockerfile and of SkyPilot's task too."""
    scripts = [*(ROOT / "launch").glob("*.s[hb]*")]
    docker = re.sub(r"\\\n\s*", "", (ROOT / "launch/Dockerfile").read_text())
    task = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
    parts = [task["setup"], task["run"], *re.findall("^RUN (.*)", docker, re.M)]
    parts.append(json.loads(re.findall("^ENTRYPOINT (.*)", docker, re.M)[0])[2])
    for number, part in enumerate(parts):
        scripts.append(tmp_path / f"part{number}.sh")
        scripts[-1].write_text(f"#!/usr/bin/env bash\nexport DEVICE=cpu\n{part}\n")
    checker = pathlib.Path(sys.executable).with_name("shellcheck")
    command = [checker, "-x", "-S", "style", "-e", "SC1090,SC1091", *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tpu-v5p", "tpu-v6e"])
def test_libtpu_knows_every_flag(kind):
    pytest.importorskip("libtpu")
    ask = "from jax.experimental import topologies as t; t.get_topology_desc('v5p:2x2x1', 'tpu')"
    line = f"source launch/env.sh {kind}; {sys.executable} -c {shlex.quote(ask)}"
    wrong = "LIBTPU_INIT_ARGS=--xla_tpu_no_such_flag=true "  # what the check is worth
    for before, good in (("", True), (wrong, False)):
        environment = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "true", "TPU_SKIP_MDS_QUERY": "1"}
        command = ["bash", "-c", (f"export {before}; " if before else "") + line]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) is good, done.stderr
        assert good or "Unknown command line flag" in done.stdout + done.stderr


# --- errors --------------------------------------------------------------------------------------

NEVER = read_table(__file__, "never")


@pytest.mark.parametrize("error", NEVER)
def test_a_permanent_error_ends_the_launch_at_once(cloud, error):
    queued = "Quota" in error
    cloud.plays(create=[{"error": error}])
    assert error in cloud.runs(*["--queued"] * queued, expect=1)
    assert len(cloud.calls("queued-resources" if queued else "tpu-vm", "create")) == 1


@pytest.mark.slow
def test_a_lack_of_capacity_is_tried_again(cloud):
    cloud.plays(create=[{"error": "RESOURCE_EXHAUSTED: There is no more capacity in the zone"}, {}])
    output = cloud.runs()
    assert "try 1 of 10: dapo was not created: no capacity now" in output and "done" in output


AGENT = (
    'SSH Key is not present in the SSH agent. Please run "ssh-add /h/k" to add it, and try again.'
)


def test_a_key_that_no_agent_has_is_said_in_gclouds_words_and_ends_at_once(cloud):
    cloud.plays(workers=16, ssh=[AGENT])
    output = cloud.runs(expect=1)
    assert output.count(AGENT) == 2 and "ssh-add ~/.ssh/google_compute_engine" in output
    assert "no answer of worker 0 1 2 3" in output and "can't fix that" in output
    assert len(cloud.calls("tpu-vm", "ssh")) == 1 and not cloud.exists()  # nothing is left to pay


@pytest.mark.parametrize(("key", "agent", "text"), read_table(__file__, "keys"))
def test_a_key_that_can_not_reach_several_workers_costs_nothing(cloud, key, agent, text):
    folder = cloud.folder / ".ssh"
    folder.mkdir()
    if key:
        (folder / "google_compute_engine").write_text(key)
    if agent:
        (cloud.folder / "agent").write_text(agent)
    assert text in cloud.runs("--type=v6e-16", expect=1) and not cloud.calls("tpu-vm", "create")
    cloud.runs("--type=v6e-8")  # gcloud asks for an agent for several workers only


# --- this machine --------------------------------------------------------------------------------


def run_here(cloud, *words: str, expect: int = 0) -> str:
    """Call launch/local.sh on a machine with two GPUs."""
    (cloud.folder / "node.json").write_text('{"state": "READY"}')
    return cloud.call(*words, script="local.sh", path=str(STUBS / "worker"), expect=expect)


@pytest.mark.parametrize(("words", "extra", "platforms", "flags"), [
    (["--tpu=v6e"], "[tpu]", "tpu,cpu", ["async_collective_fusion=true", "vmem_limit_kib=98304"]),
    (["--tpu=tpu7x"], "[tpu]", "tpu,cpu", ["vmem_limit_kib=61440"]),
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
    assert all(flag in given for flag in flags) and ("vmem" in given) == ("vmem" in str(flags))


def test_samplers_start_beside_several_processes_that_train(cloud):
    run_here(cloud, "--cpu", "--processes=2", "--samplers=2", "--config.run_dir=r")
    trainers = [start["arguments"] for start in cloud.starts()]
    port = trainers[0][-1].removeprefix("--config.extras.samplers.port=")
    assert trainers[0] == trainers[1] and "--config.sampler.engine=samplers" in trainers[0]
    samplers = (cloud.folder / "samplers").read_text().splitlines()
    assert samplers == [f"--run=r --trainer=http://127.0.0.1:{port}"] * 2


# --- models --------------------------------------------------------------------------------------


def test_a_model_and_data_are_downloaded_by_every_worker_with_a_token_that_is_said_nowhere(cloud):
    token = cloud.folder / "hub"
    token.write_text("hf_secret")
    words = ("--model=Qwen/Qwen2.5-0.5B", "--data=openai/gsm8k", f"--token-file={token}")
    output = cloud.runs("--keep", *words)
    for worker in (0, 1):
        asked, held = (cloud.folder / f"downloads.{worker}").read_text().splitlines()
        assert asked.startswith("launch/download.py --model=Qwen/Qwen2.5-0.5B --data=openai/gsm8k")
        assert held == "hf_secret" and len(cloud.starts(worker)) == 1
        (there,) = (cloud.folder / f"workers/{worker}").glob("dapo_jax_token")
        assert there.stat().st_mode & 0o077 == 0
        there.unlink()  # what the real script does
    token.unlink()
    assert "hf_secret" not in output
    records = [p for p in cloud.folder.rglob("*") if p.is_file() and "downloads" not in p.name]
    assert not [path for path in records if b"hf_secret" in path.read_bytes()]


def test_a_model_of_a_bucket_is_a_setting_and_nothing_is_downloaded_unasked(cloud):
    token = cloud.folder / "hub"
    token.write_text("hf_secret")
    places = "--model=gs://b/models/Qwen", "--data=gs://b/data"
    cloud.runs("--keep", *places, f"--token-file={token}")
    assert not list(cloud.folder.glob("workers/*/dapo_jax_token"))  # nobody there needs it
    arguments = set(cloud.starts()[0]["arguments"])
    assert "--config.model.folder=gs://b/models/Qwen" in arguments
    assert "--config.data.folder=gs://b/data" in arguments
    assert not list(cloud.folder.glob("downloads.*"))
