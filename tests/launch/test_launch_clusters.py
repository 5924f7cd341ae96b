"""launch/slurm.sbatch and launch/skypilot.yaml with stubs; the manifest for a Kueue queue."""

import re
import signal
import subprocess

import pytest
import yaml
from clouds import ROOT, STUBS, wait_for
from shown_commands import split_commands, what_is_wrong

SLURM, SKYPILOT = "slurm.sbatch", ROOT / "launch/skypilot.yaml"
TRAINER = ("--config=configs/arithmetic.py", "--config.run_dir=/shared/runs/a")
RUN_DIR = "gs://b/r"


@pytest.fixture
def machine(cloud):
    (cloud.folder / "node.json").write_text('{"state": "READY"}')
    return cloud


@pytest.fixture
def task() -> dict:
    return yaml.safe_load(SKYPILOT.read_text())


def trainer_of(text: str, **values: str) -> list[str]:
    """Return the trainer's command in a script, with the given values of its variables."""
    for name, value in values.items():
        text = text.replace(f"${name}", value)
    words = [words for words in split_commands(text) if "dapo_jax" in words][-1]
    start = words.index("-m")
    return ["python", *[word for word in words[start:] if "$" not in word]]


def submit(
    machine, *words: str, expect: int = 0, restarts: int = 0, trainer: tuple[str, ...] = TRAINER
) -> str:
    """Run the batch script as Slurm does on one node with two GPUs; return what it requeued."""
    variables = {
        "SLURM_SUBMIT_DIR": str(machine.tree),
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        machine.call(*trainer, *words, script=SLURM, path=str(STUBS / "worker"), expect=expect)
    record = machine.folder / "scontrol"
    return record.read_text() if record.exists() else ""


def start_task(machine, task: dict, *values: str) -> subprocess.Popen:
    """Run SkyPilot's task with its run_dir, data, model and trainer."""
    python = machine.tree / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        python.symlink_to(STUBS / "worker/python3")
    environment = machine.environment() | {"STUB_WORKER": "0", "HOME": str(machine.folder)}
    environment |= zip(("RUN_DIR", "DATA", "MODEL", "TRAINER"), values, strict=True)
    environment["PATH"] = f"{STUBS}/worker:{environment['PATH']}"
    return subprocess.Popen(["bash", "-c", task["run"]], cwd=machine.tree, env=environment)


def test_a_slurm_job_trains_on_every_gpu_of_its_node(machine):
    assert not submit(machine, "--config.seed=1")
    (start,) = machine.starts()
    assert start["arguments"] == [*TRAINER, "--config.seed=1"]
    assert start["env"]["JAX_LOCAL_DEVICE_IDS"] == "0,1"
    assert "[cuda]" in (machine.folder / "pip.log").read_text()


def test_slurm_and_skypilot_start_samplers(machine, task):
    words = "sampler", "--run=/shared/runs/a", "--trainer=http://host:8200"
    assert not submit(machine, trainer=words)
    process = start_task(machine, task, words[1][6:], "d", "a/b", words[2][10:])
    assert process.wait(30) == 0
    assert (machine.folder / "samplers").read_text() == f"{words[1]} {words[2]}\n" * 2
    assert (machine.folder / "downloads.0").exists() and not machine.starts()


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (75, 0, True),
        (75, 10, False),
        (2, 0, False),
        (4, 0, False),
        (130, 0, False),  # scancel --signal=INT
        (128 + signal.SIGUSR1, 99, True),  # the time limit
        (128 + signal.SIGTERM, 99, True),  # a preemption
    ],
)
def test_a_slurm_job_is_requeued_if_another_start_may_help(machine, code, restarts, requeued):
    machine.plays(runs=[{"code": code, "at": 2}])
    told = submit(machine, expect=code, restarts=restarts)
    assert told == ("requeue 7\n" if requeued else "")


def test_skypilot_runs_a_trainer_that_exists(task):
    words = trainer_of(task["run"], RUN_DIR=RUN_DIR, DATA="gs://b/data")
    assert f"--config.run_dir={RUN_DIR}" in words and not what_is_wrong(words)
    # The config's variant, the flags and the runtime are those of the machine.
    generation = re.fullmatch(r"tpu-(v\d\w)-\d+", task["resources"]["accelerators"])[1]
    assert f"source launch/env.sh tpu-{generation}\n" in task["run"]
    assert any(f":{generation}_" in word for word in words)
    assert generation in task["resources"]["accelerator_args"]["runtime_version"]
    used = set(re.findall(r"\$([A-Z_]{4,})", task["run"]))
    assert used == set(task["envs"])


@pytest.mark.parametrize(("asked", "model"), [(False, "a/b"), (True, "gs://b/m")])
def test_skypilot_starts_a_host_again_that_was_shut_down(machine, task, asked, model):
    machine.plays(runs=[{"seconds": 0.1, "steps": 50 if asked else 2}])
    process = start_task(machine, task, RUN_DIR, "gs://b/data", model, "")
    if asked:
        wait_for(machine.starts)
        process.send_signal(signal.SIGTERM)
    code = process.wait(30)
    assert code == (143 if asked else 0)
    assert {75, 143} <= set(task["resources"]["job_recovery"]["recover_on_exit_codes"])
    (start,) = machine.starts()
    assert (f"--config.model.folder={model}" in start["arguments"]) == model.startswith("gs://")
    assert (machine.folder / "downloads.0").exists() != model.startswith("gs://")
    assert start["env"]["JAX_COMPILATION_CACHE_DIR"] == f"{RUN_DIR}/jax_cache"
    assert "vmem" in start["env"]["LIBTPU_INIT_ARGS"]
