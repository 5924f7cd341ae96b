"""Runs whose folder is a bucket: served here, with errors, latency and outages (fake_gcs.py)."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import fake_gcs
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small_runs import make_quick_config, read_rollouts, read_rows

from dapo_jax.config.experiment import Checkpoint, Data, Evaluation, Log
from dapo_jax.run.checkpointing.integrity import COMMITTED

ROOT = pathlib.Path(__file__).parents[2]
RUN = "gs://bucket/run"
STEPS = 4
SLOWEST = 240  # seconds of a run; one that waits for ever ends here
FLAKY = fake_gcs.Faults(latency=0.05, share=0.08)

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")


@pytest.fixture
def store(tmp_path):
    with fake_gcs.serve(tmp_path, "bucket") as found:
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
    err = "".join(line for line in err.splitlines(True) if "GOOGLE_AUTH_TOKEN" not in line)
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


def saved_arrays(run_dir, step):
    """Parameters and moments of a checkpoint."""
    return ocp.PyTreeCheckpointHandler().restore(run_dir / "checkpoints" / str(step) / "state")


def check_same(store, local, folder, steps=STEPS):
    """That the run on the bucket left what the one on a disk did."""
    run_dir = download(store, folder)
    assert read_rows(run_dir) == read_rows(local)
    assert read_rollouts(run_dir) == read_rollouts(local)
    assert read_rollouts(run_dir, "evaluations") == read_rollouts(local, "evaluations")
    mine, theirs = saved_arrays(run_dir, steps), saved_arrays(local, steps)
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    names = {path.name for path in local.iterdir() if not path.name.startswith(".")}
    assert {path.name for path in run_dir.iterdir()} == names
    for name in "config.json", "summary.json":
        assert json.loads((run_dir / name).read_text()).keys()
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["3", "4"]
    assert not [key for key in store.objects["bucket"] if ".tmp" in key or "/.dapo" in key]


# --- without a model ---------------------------------------------------------------------------

CHECKPOINTS = """
from saved_states import restored, save
from dapo_jax.runtime.storage.jsonl import AppendFile, objects
from dapo_jax.runtime.storage.paths import folder_at
save("gs://bucket/run", [1, 2, 3], keep=2)
print(restored("gs://bucket/run"))
lines = AppendFile(folder_at("gs://bucket/run", "lines"))
for i in range(3):
    lines.add(b'{"i": %d}\\n' % i)
    lines.write()
print(list(objects(lines.path)))
"""


@pytest.mark.slow
def test_a_bucket_that_fails_now_and_then_keeps_checkpoints_and_lines(store):
    store.faults = fake_gcs.Faults(share=0.02)
    out, _ = finish(start([sys.executable, "-c", CHECKPOINTS], store))
    assert out.splitlines() == ["(3, [])", "[{'i': 0}, {'i': 1}, {'i': 2}]"]
    steps = {key.split("/")[2] for key in store.objects["bucket"] if "/checkpoints/" in key}
    assert steps - {""} == {"2", "3"}
    assert store.failed
    # Where there is no need, nothing is read to be added to, and nothing copied to be renamed.
    assert not [one for one in store.asked if one[0] == "GET" and one[1].endswith("lines/")]


# --- whole runs --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("faults", [fake_gcs.Faults(), FLAKY], ids=["sound", "flaky"])
def test_a_run_on_a_bucket_is_the_run_on_a_disk(faults, command, local, store, tmp_path):
    store.faults = dataclasses.replace(faults)
    out, err = finish(start(command, store))
    assert "could not be written" not in out + err
    check_same(store, local, tmp_path / "copy")
    assert bool(store.failed) == bool(faults.share)


def killed_at(store, process, text, method="POST"):
    """Kills it when a request of that kind comes."""

    def kill(asked, name):
        if asked == method and text in name:
            process.kill()

    store.before = kill
    process.communicate()
    store.before = lambda method, name: None
    assert process.returncode == -9


MOMENTS = {
    "the first file of a save": ("checkpoints/2/", "POST"),
    "its arrays": ("checkpoints/2/state/ocdbt", "POST"),
    "its list": ("checkpoints/3/checksums.json", "POST"),
    "its mark": ("checkpoints/3/commit_success.txt", "POST"),
    "removing an older one": ("checkpoints/1/", "DELETE"),
    "a row": ("metrics.jsonl", "POST"),
    "rollouts": ("rollouts/step_000003.jsonl", "POST"),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_from_the_bucket(moment, command, local, store, tmp_path):
    text, method = MOMENTS[moment]
    killed_at(store, start(command, store), text, method)
    finish(start(command, store))
    check_same(store, local, tmp_path / "copy")


@pytest.mark.slow
def test_groups_that_are_kept_are_read_back(command, local, store, tmp_path):
    command = [*command, "--config.checkpoint.keep_groups=true"]
    killed_at(store, start(command, store), "rollouts/step_000003.jsonl")
    names = list(store.objects["bucket"])
    assert any("run/groups/" in name for name in names)
    finish(start(command, store))
    copy = download(store, tmp_path / "copy")
    assert not [key for key in store.objects["bucket"] if "/groups/" in key]
    jax.tree.map(np.testing.assert_array_equal, saved_arrays(copy, 4), saved_arrays(local, 4))


# --- a bucket that is away or refuses ----------------------------------------------------------


# The request at which it begins, and what could not be written when it ends.
OUTAGES = {
    "a save begins": ("checkpoints/4/state/", "the checkpoint"),
    "a save in the background": ("checkpoints/4/state/ocdbt", "rollouts/"),
}


@pytest.mark.slow
@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_stops_saving_but_not_the_run(outage, command, store, tmp_path):
    """Nothing answers for a while."""
    begins, ends = OUTAGES[outage]
    gone = []

    def leave(method, name):
        if method == "POST" and begins in name and not gone:
            gone.append(name)
            store.faults.away = True

    store.before = leave
    flags = ["--config.total_steps=16", "--config.checkpoint.every_steps=2"]
    process = start([*command, *flags], store)
    timer = threading.Timer(SLOWEST, process.kill)
    timer.daemon = True
    timer.start()
    said = []
    for line in process.stdout:
        said.append(line)
        if f"{ends} could not be written" in line:
            store.faults.away = False
    finish(process)
    # Of a save that failed something may stay until the next start, but not its mark.
    marks = [key for key in store.objects["bucket"] if key.count("/") == 3 and COMMITTED in key]
    assert sorted(key.split("/")[2] for key in marks) == ["14", "16"]
    rows = read_rows(download(store, tmp_path / "copy"))
    assert [row["step"] for row in rows] == list(range(17))
    told = [line.split(" could not be")[0] for line in said if "could not be written" in line]
    again = [line.split(" can be")[0] for line in said if "can be written again" in line]
    assert f"warning: {ends}" in told and len(told) == len(set(told)) and set(again) == set(told)


REFUSED = {
    "everything": ("GET", "PUT", "POST", "DELETE"),
    "writing": ("PUT", "POST", "DELETE"),
    "removing": ("DELETE",),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_a_bucket_that_refuses_is_one_line(what, command, store):
    store.faults.forbidden = REFUSED[what]
    _, err = finish(start(command, store), code=2)
    assert len(err.splitlines()) == 1 and "403" in err and "gs://bucket/run" in err


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_line(command, store):
    _, err = finish(start([*command, "--config.run_dir=gs://other/run"], store), code=2)
    assert len(err.splitlines()) == 1 and "404" in err and "gs://other/run" in err


@pytest.mark.slow
def test_a_run_does_not_begin_anew_where_its_bucket_does_not_answer(command, store):
    finish(start([*command, "--config.total_steps=1"], store))
    before = {name: one.content for name, one in store.objects["bucket"].items()}
    store.faults.away = True
    _, err = finish(start(command, store), code=74)
    assert len(err.splitlines()) == 1 and "gs://bucket/run" in err
    assert {name: one.content for name, one in store.objects["bucket"].items()} == before


# --- damage ------------------------------------------------------------------------------------


def flip(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


DAMAGE = {
    "flipped": (flip, "is not what was written"),
    "truncated": (lambda content: content[:100], "has 100 bytes, not"),
    "empty": (lambda content: b"", "has 0 bytes, not"),
    "missing": (lambda content: None, "No such file or directory"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_object_costs_the_newest_checkpoint(name, command, local, store, tmp_path):
    spoil, text = DAMAGE[name]
    finish(start([*command, "--config.total_steps=3"], store))
    objects = store.objects["bucket"]
    arrays = [key for key in objects if key.startswith("run/checkpoints/3/state/ocdbt")]
    largest = max(arrays, key=lambda key: len(objects[key].content))
    content = spoil(objects[largest].content)
    objects.pop(largest) if content is None else store.write("bucket", largest, content)
    out, err = finish(start(command, store))
    assert " ".join((out + err).split()).count("checkpoints/3 is damaged") == 1
    assert text in " ".join((out + err).split())
    assert [key for key in objects if key.startswith("run/damaged_checkpoints/3/state")]
    # Beside that it left what ended with the third step.
    for key in [key for key in objects if "damaged_checkpoints" in key or "step_000003.j" in key]:
        if "rollouts" not in key:
            del objects[key]
    check_same(store, local, tmp_path / "copy")


# --- other commands ----------------------------------------------------------------------------


@pytest.mark.slow
def test_other_commands_read_a_run_on_a_bucket(command, store, tmp_path):
    finish(start([*command, "--config.total_steps=2"], store))
    python, _, _, config = command
    evaluate = [python, "-m", "dapo_jax", "evaluate", config]
    for flags in ["--k=2"], ["--k=3"]:  # which adds to what is there
        out, _ = finish(start([*evaluate, *flags], store))
        assert json.loads(out.splitlines()[-1])["samples_per_problem"] == int(flags[0][-1])
    lines = [
        found.content.splitlines()
        for key, found in store.objects["bucket"].items()
        if key.endswith("responses.jsonl")
    ]
    assert len(lines) == 1 and len(lines[0]) == 24
    for name, flags in {
        "export": [f"--config.run={RUN}", f"--config.out={tmp_path / 'model'}"],
        "report": [f"--run={RUN}", f"--out={tmp_path / 'page.html'}"],
    }.items():
        finish(start([python, "-m", f"dapo_jax.{name}", *flags], store))
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "page.html").stat().st_size > 1e6
