"""Damaged checkpoints, and storage that fails while one is saved. No model is needed."""

import random
import shutil
import threading
import time

import pytest
from disks import Disk
from etils import epath
from saved_states import SIZE, make_state, restored, save

from dapo_jax.config.experiment import Checkpoint
from dapo_jax.run.checkpointing import checkpoints
from dapo_jax.run.checkpointing.checkpoints import (
    CHECKSUMS,
    UNLISTED,
    Checkpoints,
    SavedPolicy,
    damage,
    saved_steps,
)
from dapo_jax.run.checkpointing.same_run import Record
from dapo_jax.runtime.storage.retries import NotSaved, Storage
from dapo_jax.types.errors import ConfigError


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


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


def test_every_flipped_bit_is_detected(run_dir):
    """One random bit of one random file, many times, the list of checksums among them."""
    folder = run_dir / "checkpoints/2"
    rng = random.Random(0)
    paths = [
        path for path in files_of(folder) if path.name not in UNLISTED or path.parent != folder
    ]
    paths = [path for path in paths if path.stat().st_size]
    for _ in range(100):
        path = rng.choice(paths)
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        text = damage(epath.Path(folder))
        assert text, f"bit {bit} of {path}"
        assert path.name == CHECKSUMS or str(path.relative_to(folder)) in text
        flip(path, bit)
    assert damage(epath.Path(folder)) == ""


def test_files_without_a_checksum_are_not_needed(run_dir):
    """Orbax writes on in two files after the list is made; nothing that is read needs them."""
    for name in UNLISTED:
        for step in 1, 2:
            (run_dir / "checkpoints" / str(step) / name).write_bytes(b"\xff\x00{")
    assert restored(run_dir) == (2, [])
    assert SavedPolicy(run_dir).shapes() == {"a": (SIZE,), "b": (3,)}


def largest(folder):
    return max(files_of(folder / "state"), key=lambda path: path.stat().st_size)


def flip_an_array(folder):
    path = largest(folder)
    flip(path, 4 * path.stat().st_size)


DAMAGE = {
    "flipped": (flip_an_array, "is not what was written"),
    "truncated": (
        lambda folder: largest(folder).write_bytes(b"\0" * 100),
        "is not what was written",
    ),
    "empty": (lambda folder: largest(folder).write_bytes(b""), "is not what was written"),
    "missing": (lambda folder: shutil.rmtree(folder / "state"), "No such file or directory"),
    "record": (lambda folder: (folder / "record/metadata").write_text("{"), "record/metadata"),
    "list": (lambda folder: (folder / CHECKSUMS).write_text("{"), f"{CHECKSUMS} can't be read"),
    "folder": (lambda folder: shutil.rmtree(folder) or folder.mkdir(), None),
    "half_deleted": (lambda folder: (folder / CHECKSUMS).unlink(), None),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_used(name, run_dir):
    spoil, text = DAMAGE[name]
    spoil(run_dir / "checkpoints/2")
    step, warnings = restored(run_dir)
    assert step == 1 and len(warnings) == bool(text)
    if text:  # on one line; a half-deleted checkpoint needs no warning
        assert text in warnings[0] and "\n" not in warnings[0]
        assert "checkpoints/2 is damaged" in warnings[0]
    assert SavedPolicy(run_dir).step == 1
    with pytest.raises(ConfigError, match="step = 2: must be 0 or one of .* not damaged"):
        SavedPolicy(run_dir, 2)
    assert saved_steps(run_dir) == [1, 2]  # reading changes nothing
    # A run that goes on saves that step anew; what was there is kept beside it.
    assert restored(run_dir, Checkpoint(keep=9))[0] == 1
    save(run_dir, [2])
    assert restored(run_dir) == (2, [])
    assert [path.name for path in (run_dir / "damaged_checkpoints").iterdir()] == ["2"]


def test_if_every_checkpoint_is_damaged_an_error_says_what_to_do(run_dir):
    flip_an_array(run_dir / "checkpoints/1")
    flip_an_array(run_dir / "checkpoints/2")
    for open_it in Checkpoints, SavedPolicy:
        with pytest.raises(ConfigError, match="checkpoints/2 is damaged .*restore one") as error:
            open_it(run_dir)
        assert len(str(error.value).splitlines()) == 1
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
    monkeypatch.setattr(checkpoints, "LAST_PAUSES", (0, 0, 0))
    with pytest.raises(NotSaved, match="step 8"):
        training.checkpoints.save_last(training.save)
    disk.free()
    training.step(9, due=True)
    training.settle()
    training.step(10, due=False)
    assert training.said[1:] == ["the checkpoint can be written again"]
    training.checkpoints.save_last(training.save)
    assert saved_steps(run_dir) == [9, 10] and damage(epath.Path(run_dir / "checkpoints/10")) == ""
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
    monkeypatch.setattr(checkpoints, "LAST_PAUSES", (0, 0, 0))
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
    seal = checkpoints.seal
    monkeypatch.setattr(checkpoints, "seal", lambda folder: (slow.wait(60), seal(folder)))
    training.step(1, due=True)
    training.step(2, due=False)
    assert training.tried == [1] and saved_steps(tmp_path) == []
    threading.Timer(0.3, slow.set).start()
    training.step(3, due=True)
    assert training.tried == [1, 3] and slow.is_set() and 1 in saved_steps(tmp_path)
    training.checkpoints.save_last(training.save)
    assert saved_steps(tmp_path) == [1, 3] and training.said == []
    training.checkpoints.close()
