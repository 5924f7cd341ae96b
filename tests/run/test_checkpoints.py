"""Torn checkpoints, and storage that fails while one is saved. No model is needed."""

import errno
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from disks import Disk
from etils import epath

from dapo_jax.config.experiment import Checkpoint
from dapo_jax.run import store
from dapo_jax.run.export import SavedPolicy
from dapo_jax.run.identity import Record
from dapo_jax.run.store import Checkpoints, saved_steps
from dapo_jax.runtime.storage.files import NotSaved, Storage
from dapo_jax.types.errors import ConfigError

SIZE = 1000


def make_state(step, size=SIZE):
    """Return arrays that depend on the step and don't compress."""
    key = jax.random.key(step)
    return {"params": {"a": jax.random.normal(key, (size,)), "b": jnp.full((3,), float(step))}}


def save(run_dir, steps, size=SIZE, keep=9):
    with Checkpoints(run_dir, Checkpoint(keep=keep)) as checkpoints:
        for step in steps:
            checkpoints.save(Record(step, {}), {"state": make_state(step, size)})
            checkpoints.wait()


def restored(run_dir, settings=None):
    """Return the step that is resumed, after comparing its arrays, and the warnings."""
    warnings = []
    with Checkpoints(run_dir, settings, Storage(warnings.append)) as checkpoints:
        empty = jax.tree.map(jnp.zeros_like, make_state(0))
        step, state = checkpoints.newest(lambda record: (record.step, checkpoints.state(empty)))
        assert checkpoints.latest_step() == step
    jax.tree.map(np.testing.assert_array_equal, state, make_state(step))
    return step, warnings


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("two_steps")
    save(run_dir, [1, 2])
    return run_dir


@pytest.fixture
def run_dir(two_steps, tmp_path):
    """A copy of a folder with two checkpoints, to be damaged."""
    shutil.copytree(two_steps, tmp_path / "run")
    return tmp_path / "run"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def largest(folder):
    return max(files_of(folder / "state"), key=lambda path: path.stat().st_size)


DAMAGE = {
    "truncated": lambda folder: largest(folder).write_bytes(b"\0" * 100),
    "empty": lambda folder: [path.write_bytes(b"") for path in files_of(folder)],
    "missing": lambda folder: shutil.rmtree(folder / "state"),
    "record": lambda folder: (folder / "record/metadata").write_text("{"),
    "folder": lambda folder: shutil.rmtree(folder) or folder.mkdir(),
    "half_deleted": lambda folder: [path.unlink() for path in files_of(folder)[::2]],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_checkpoint_before_a_torn_one_is_used(name, run_dir):
    DAMAGE[name](run_dir / "checkpoints/2")
    step, warnings = restored(run_dir)
    assert step == 1 and len(warnings) == 1 and "\n" not in warnings[0]
    assert "checkpoints/2 can't be read (" in warnings[0] and "step 1 is used" in warnings[0]
    with pytest.raises(ConfigError, match="checkpoints/2 can't be read .*: choose another step"):
        SavedPolicy(run_dir, 2).read("a")
    assert saved_steps(run_dir) == [1, 2]  # reading changes nothing
    with Checkpoints(run_dir, Checkpoint(keep=9)) as checkpoints:  # a run saves the step again
        empty = jax.tree.map(jnp.zeros_like, make_state(0))
        assert checkpoints.newest(lambda record: checkpoints.state(empty) and record.step) == 1
        checkpoints.save(Record(2, {}), {"state": make_state(2)})
    assert restored(run_dir) == (2, [])


def test_a_run_that_went_back_keeps_what_it_saves_then(run_dir):
    """The torn step counts as the newest nowhere: `keep` would delete good ones for it."""
    DAMAGE["truncated"](run_dir / "checkpoints/2")
    (run_dir / "checkpoints/2").rename(run_dir / "checkpoints/20")
    with Checkpoints(run_dir, Checkpoint(keep=1)) as checkpoints:
        empty = jax.tree.map(jnp.zeros_like, make_state(0))
        checkpoints.newest(lambda record: checkpoints.state(empty))
        checkpoints.save(Record(3, {}), {"state": make_state(3)})
    assert saved_steps(run_dir) == [3] and restored(run_dir) == (3, [])


def test_if_no_checkpoint_can_be_read_an_error_says_what_to_do(run_dir):
    for step in 1, 2:
        DAMAGE["record"](run_dir / f"checkpoints/{step}")
    for open_it in Checkpoints, SavedPolicy:
        with pytest.raises(ConfigError, match="checkpoints/1 can't be read .*restore one") as error:
            open_it(run_dir)
        assert len(str(error.value).splitlines()) == 1
    assert saved_steps(run_dir) == [1, 2]


@pytest.mark.parametrize("entry", ["restore", "record"])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ValueError("UNAVAILABLE: busy")], ids=str
)
def test_a_checkpoint_that_may_be_whole_is_not_passed_over(entry, error, run_dir, monkeypatch):
    """Else the next save would delete it."""

    def fail(*_, **__):
        raise error

    with Checkpoints(run_dir, Checkpoint(keep=9)) as store:
        if entry == "record":
            monkeypatch.setattr("dapo_jax.run.store.read_record", fail)
        monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", fail)
        with pytest.raises(ConfigError, match="checkpoints/2 can't be read now .*start again"):
            if entry == "record":
                Checkpoints(run_dir)
            store.newest(lambda record: store.state(make_state(0)))
    assert saved_steps(run_dir) == [1, 2]


@pytest.mark.parametrize("progress", [{}, {"progress": {"carried": []}}])
def test_a_checkpoint_of_another_version_is_rejected_in_one_line(progress):
    content = {"step": 3, "settings": {}, "inputs": {}} | progress
    with pytest.raises(ConfigError, match="checkpoints/3 was saved by another version") as error:
        Record.read(content, epath.Path("checkpoints/3"))
    assert len(str(error.value).splitlines()) == 1


# --- storage that fails ------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.free()


class Training:
    """Steps that save, as a run's do; nothing is trained."""

    def __init__(self, run_dir, size=SIZE):
        self.said, self.size = [], size
        storage = Storage(self.said.append)
        self.checkpoints = Checkpoints(run_dir, Checkpoint(keep=2), storage)
        self.tried = []

    def step(self, step, due):
        def save():
            self.tried.append(step)
            states = {"state": make_state(step, self.size)}
            self.checkpoints.save(Record(step, {}), states)

        self.checkpoints.after_step(due, save)
        self.save = save

    def settle(self):
        """Lets what goes on in the background come to its end, good or bad."""
        while self.checkpoints.is_saving():
            time.sleep(0.01)


def test_a_full_disk_stops_saving_but_not_the_run(disk, capfd, monkeypatch):
    run_dir = disk.folder / "run"
    training = Training(run_dir, 300_000)
    training.step(1, due=True)
    training.settle()
    training.step(2, due=False)
    assert training.said == [] and saved_steps(run_dir) == [1]
    disk.fill()
    for step in range(3, 9):
        training.step(step, due=step == 3)
        training.settle()
    assert training.tried[1:] == [3, 4, 5]  # a few times, not for ever
    assert len(training.said) == 1 and "File too large" in training.said[0]
    assert "the checkpoint could not be written: step 3" in training.said[0]
    assert saved_steps(run_dir) == [1]  # nothing else is left that a resume would take
    monkeypatch.setattr(store, "LAST_PAUSES", (0, 0, 0))
    with pytest.raises(NotSaved, match="step 8"):
        training.checkpoints.save_last(training.save)
    disk.free()
    training.step(9, due=True)
    training.settle()
    training.step(10, due=False)
    assert training.said[1:] == ["the checkpoint can be written again"]
    training.checkpoints.save_last(training.save)
    assert saved_steps(run_dir) == [9, 10]
    training.checkpoints.close()
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"9", "10"}  # nor anything that takes space, once a save has succeeded
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err + shown.out and len(shown.err.splitlines()) < 5


def test_a_read_only_disk_is_reported_at_once(disk, capfd, monkeypatch):
    """Folders that could not be made were once waited for, for five minutes."""
    run_dir = disk.folder / "run"
    training = Training(run_dir)
    training.step(1, due=True)
    training.settle()
    monkeypatch.setattr(store, "LAST_PAUSES", (0, 0, 0))
    with disk.read_only(run_dir / "checkpoints"):
        before = time.monotonic()
        training.step(2, due=True)
        training.settle()
        training.step(3, due=False)
        with pytest.raises(NotSaved):
            training.checkpoints.save_last(training.save)
        assert time.monotonic() - before < 30
        assert len(training.said) == 1 and "the checkpoint could not be" in training.said[0]
    training.checkpoints.save_last(training.save)
    assert saved_steps(run_dir) == [1, 3]
    training.checkpoints.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_save_that_is_due_waits_for_the_one_before_it(tmp_path, monkeypatch):
    training, slow = Training(tmp_path), threading.Event()
    finish = ocp.CheckpointManager._finalize
    monkeypatch.setattr(
        ocp.CheckpointManager, "_finalize", lambda *args: (slow.wait(60), finish(*args))
    )
    training.step(1, due=True)
    training.step(2, due=False)
    assert training.tried == [1]
    threading.Timer(0.3, slow.set).start()
    training.step(3, due=True)
    assert training.tried == [1, 3] and slow.is_set() and 1 in saved_steps(tmp_path)
    training.checkpoints.save_last(training.save)
    assert saved_steps(tmp_path) == [1, 3] and training.said == []
    training.checkpoints.close()
