"""Loss of power: the content of a loop device at a random moment, mounted again.

What a file system has not handed to its device is lost, as it is with the power.
"""

import contextlib
import json
import random
import shutil
import subprocess
import sys
import time

import pytest

from dapo_jax.runtime.storage.jsonl import objects

# Appends rows, replaces a file and a file of a new name; says a number once it counts.
WRITER = """
import pathlib, sys
from dapo_jax.runtime.storage.jsonl import AppendFile
from dapo_jax.runtime.storage.retries import replacing, write_text
folder = pathlib.Path(sys.argv[1])
rows = AppendFile(folder / "metrics.jsonl")
for step in range(1_000_000):
    rows.add(b'{"step": %d}\\n' % step)
    rows.write()
    write_text(folder / "summary.json", '{"step": %d}' % step)
    with replacing(folder / f"group_{step:06d}.npz") as file:
        file.write(bytes([step % 251]) * 5_000)
    print(step, flush=True)
"""


@contextlib.contextmanager
def mounted(image, folder):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def image(tmp_path):
    """A file with an empty file system that this process may mount."""
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", path], check=True, capture_output=True)
        with mounted(path, tmp_path / "tried"):
            pass
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a loop device")
    return path


@pytest.mark.parametrize("seed", range(2))
def test_what_counts_is_there_after_a_loss_of_power(image, seed, tmp_path):
    rng = random.Random(seed)
    with mounted(image, tmp_path / "disk_of_run") as folder:
        command = [sys.executable, "-c", WRITER, str(folder)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "0\n"
        for _ in range(rng.randint(11, 60)):
            writer.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.1))
        writer.send_signal(19)  # SIGSTOP: the snapshot is of one moment
        time.sleep(0.05)
        shutil.copy(image, tmp_path / "snapshot")
        writer.kill()
        counted = int(writer.communicate()[0].split()[-1])
    assert counted > 10
    with mounted(tmp_path / "snapshot", tmp_path / "after") as folder:
        steps = [row["step"] for row in objects(folder / "metrics.jsonl")]
        assert steps == list(range(len(steps))) and len(steps) > counted
        assert json.loads((folder / "summary.json").read_text())["step"] >= counted
        for step in range(counted + 1):
            content = (folder / f"group_{step:06d}.npz").read_bytes()
            assert content == bytes([step % 251]) * 5_000
