"""Runs whose folder is a bucket: served here, with errors, latency and outages (fake_gcs.py)."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import fake_gcs
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from row_files import read_table
from small_runs import make_quick_config, read_rollouts, read_rows

from dapo_jax.config.experiment import Checkpoint, Data, Evaluation, Log
from dapo_jax.run.store import COMMITTED

ROOT = pathlib.Path(__file__).parents[2]
RUN = "gs://bucket/run"
STEPS = 4
LIBRARY_LOG = re.compile(
    r"GOOGLE_AUTH_TOKEN|absl::InitializeLog|^[IWE]\d{4} |^\d{4}-\d\d-\d\d |^To enable"
)
SLOWEST = 240  # seconds of a run; one that waits for ever ends here


@pytest.fixture
def store():
    with fake_gcs.serve("bucket") as found:
        yield found


@pytest.fixture(scope="module")
def command(base, tmp_path_factory):
    """The command line of a small run; flags that come later win."""
    config = make_quick_config(
        base,
        RUN,
        total_steps=STEPS,
        data=Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=8),
        checkpoint=Checkpoint(every_steps=1, keep=2),
        evaluation=Evaluation(every_steps=2, samples_per_problem=2, top_p=1.0),
        log=Log(0, tensorboard=True, rollouts=True, report=True),
    )
    path = tmp_path_factory.mktemp("config") / "small.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    return [sys.executable, "-m", "dapo_jax", "train", f"--config={path}"]


def start(command, store=None, **variables):
    """A process that takes the store for Google's; it has one device, not this one's eight."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = os.environ | {"XLA_FLAGS": flags} | (store.environment if store else {})
    return subprocess.Popen(
        command,
        env=environment | variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    """What it said on standard output and as errors."""
    try:
        out, err = process.communicate(timeout=SLOWEST)
    finally:
        process.kill()
    err = "".join(line for line in err.splitlines(True) if not LIBRARY_LOG.search(line))
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    return out, err


@pytest.fixture(scope="module")
def local(command, tmp_path_factory):
    """The folder of the same run on a disk."""
    folder = tmp_path_factory.mktemp("local") / "run"
    finish(start([*command, f"--config.run_dir={folder}"]))
    return folder


def download(store, folder, name="run/"):
    """The run's objects as files."""
    for key, found in store.objects["bucket"].items():
        if key.startswith(name) and not key.endswith("/"):
            path = folder / key.removeprefix(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(found.content)
    return folder


def saved_arrays(run_dir):
    """Parameters and moments of the last checkpoint."""
    return ocp.PyTreeCheckpointHandler().restore(run_dir / f"checkpoints/{STEPS}/state")


def check_same(store, local, folder):
    """That the run on the bucket left what the one on a disk did."""
    run_dir = download(store, folder)
    assert read_rows(run_dir) == read_rows(local)
    assert read_rollouts(run_dir) == read_rollouts(local)
    assert read_rollouts(run_dir, "evaluations") == read_rollouts(local, "evaluations")
    jax.tree.map(np.testing.assert_array_equal, saved_arrays(run_dir), saved_arrays(local))
    names = {path.name for path in local.iterdir() if not path.name.startswith(".")}
    assert {path.name for path in run_dir.iterdir()} == names
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["3", "4"]
    assert not [key for key in store.objects["bucket"] if ".tmp" in key or "/.dapo" in key]


# --- whole runs --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_a_bucket_is_the_run_on_a_disk(command, local, store, tmp_path):
    store.faults = fake_gcs.Faults(latency=0.05, share=0.08)
    out, err = finish(start(command, store))
    assert "could not be written" not in out + err and store.failed
    check_same(store, local, tmp_path / "copy")


# The object and the request at which the run is killed.
MOMENTS = {
    "its arrays": ("checkpoints/2/state/ocdbt", "POST"),
    "its mark": ("checkpoints/3/commit_success.txt", "POST"),
    "removing an older one": ("checkpoints/1/", "DELETE"),
    "rollouts": ("rollouts/step_000003.jsonl", "POST"),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_from_the_bucket(moment, command, local, store, tmp_path):
    text, method = MOMENTS[moment]
    keeps_groups = moment == "rollouts"
    command = [*command, f"--config.checkpoint.keep_groups={keeps_groups}"]
    process = start(command, store)

    def kill(asked, name):
        if asked == method and text in name:
            process.kill()

    store.before = kill
    process.communicate()
    store.before = lambda method, name: None
    assert process.returncode == -signal.SIGKILL
    assert any("run/groups/" in name for name in store.objects["bucket"]) == keeps_groups
    finish(start(command, store))
    if not keeps_groups:
        check_same(store, local, tmp_path / "copy")
        return
    copy = download(store, tmp_path / "copy")
    assert not [key for key in store.objects["bucket"] if "/groups/" in key]
    jax.tree.map(np.testing.assert_array_equal, saved_arrays(copy), saved_arrays(local))


# --- a bucket that is away or refuses ----------------------------------------------------------


@pytest.mark.slow
def test_an_outage_stops_saving_but_not_the_run(command, store, tmp_path):
    """Nothing answers from a save in the background until the rollouts could not be written."""

    def leave(method, name):
        if method == "POST" and "checkpoints/4/state/ocdbt" in name:
            store.faults.away = True
            store.before = lambda method, name: None

    store.before = leave
    flags = ["--config.total_steps=16", "--config.checkpoint.every_steps=2"]
    process = start([*command, *flags], store)
    timer = threading.Timer(SLOWEST, process.kill)
    timer.daemon = True
    timer.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "rollouts/ could not be written" in line:
            store.faults.away = False
    finish(process)
    # Of a save that failed something may stay until the next start, but not its mark.
    marks = [key for key in store.objects["bucket"] if key.count("/") == 3 and COMMITTED in key]
    assert sorted(key.split("/")[2] for key in marks) == ["14", "16"]
    rows = read_rows(download(store, tmp_path / "copy"))
    assert [row["step"] for row in rows] == list(range(17))
    failed = [line.split(" could not be")[0] for line in lines if "could not be written" in line]
    again = [line.split(" can be")[0] for line in lines if "can be written again" in line]
    assert "warning: rollouts/" in failed and len(failed) == len(set(failed))
    assert set(again) == set(failed)


@pytest.mark.slow
@pytest.mark.parametrize(("forbidden", "run_dir", "status"), read_table(__file__, "refuses"))
def test_a_bucket_that_refuses_is_one_line(forbidden, run_dir, status, command, store):
    store.faults.forbidden = forbidden
    _, err = finish(start([*command, f"--config.run_dir={run_dir}"], store), code=2)
    assert len(err.splitlines()) == 1 and status in err and run_dir.rpartition("/")[0] in err


@pytest.mark.slow
def test_a_run_does_not_begin_anew_where_its_bucket_does_not_answer(command, store):
    finish(start([*command, "--config.total_steps=1"], store))
    before = {name: one.content for name, one in store.objects["bucket"].items()}
    store.faults.away = True
    _, err = finish(start(command, store), code=74)
    assert len(err.splitlines()) == 1 and "gs://bucket/run" in err
    assert {name: one.content for name, one in store.objects["bucket"].items()} == before
