"""Model folders are replaced whole, and nothing that somebody put into them is lost."""

import errno
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import TINY
from disks import limited
from output_folders import ROOT, snapshot
from safetensors.numpy import save_file

from dapo_jax.model import save_huggingface
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.storage.output_folder import LOCK, MARK, TRAINED, check_free, replace


def write(out, text, names=("a.bin", "b.bin")):
    with replace("out", str(out), TRAINED) as folder:
        for name in names:
            (folder / name).write_text(text)


def contents(folder):
    theirs = (path for path in folder.iterdir() if path.name not in (MARK, LOCK))
    return {path.name: path.read_text() for path in theirs}


def test_its_own_folder_is_replaced_whole(tmp_path):
    out = tmp_path / "out"
    write(out, "old", ("a.bin", "b.bin", "c.bin"))
    out.chmod(0o750)
    write(out, "new")
    assert contents(out) == {"a.bin": "new", "b.bin": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o777 == 0o750
    (tmp_path / "link").symlink_to(out)
    write(tmp_path / "link", "newer")
    assert contents(out)["a.bin"] == "newer" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("place", ["out", "out.unfinished", "out.replaced"])
def test_a_folder_with_files_of_others_is_rejected_and_kept(place, tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    words = f"{place}' (also )?holds 'notes.txt'"
    with pytest.raises(ConfigError, match=words):
        check_free("out", str(tmp_path / "out"), TRAINED)
    with pytest.raises(ConfigError, match=words):
        write(tmp_path / "out", "new")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("change", ["content", "folder", "link"])
def test_a_changed_file_is_kept(change, tmp_path):
    write(tmp_path / "out", "old")
    path = tmp_path / "out/a.bin"
    os.rename(path, tmp_path / "kept")
    if change == "content":
        path.write_text("own")
    elif change == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "kept")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="also holds 'a.bin', which is new or was changed"):
        write(tmp_path / "out", "new")
    assert snapshot(tmp_path) == before


def test_a_file_that_appears_during_the_write_is_kept_and_so_is_the_result(tmp_path):
    out = tmp_path / "out"
    write(out, "old")
    with pytest.raises(ConfigError, match="also holds 'notes.txt'.*complete in '.*unfinished'"):
        with replace("out", str(out), TRAINED) as folder:
            (folder / "a.bin").write_text("new")
            (out / "notes.txt").write_text("mine")
    assert contents(out) == {"a.bin": "old", "b.bin": "old", "notes.txt": "mine"}
    assert contents(tmp_path / "out.unfinished") == {"a.bin": "new"}


def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path):
    write(tmp_path / "out", "old")
    before = snapshot(tmp_path / "out")
    with pytest.raises(ZeroDivisionError):
        with replace("out", str(tmp_path / "out"), TRAINED) as folder:
            (folder / "a.bin").write_text("new")
            raise ZeroDivisionError
    assert snapshot(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("save", [pathlib.Path.write_bytes, lambda p, b: save_file({"a": b}, p)])
def test_a_full_disk_is_one_line_and_keeps_the_old_folder(save, tmp_path):
    write(tmp_path / "out", "old")
    before, content = snapshot(tmp_path / "out"), np.zeros(1000)
    with pytest.raises(ConfigError, match="with free space; .*can't be written: File too large$"):
        with replace("out", str(tmp_path / "out"), TRAINED) as folder:
            with limited(folder / "a.bin", 100):
                save(folder / "a.bin", content)
    assert snapshot(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_folder_stays_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    rename = pathlib.Path.rename

    def fail(path, target):
        if path.name == "out.unfinished":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="complete in '.*unfin"):
        patch.setattr(pathlib.Path, "rename", fail)
        write(tmp_path / "out", "new")
    assert contents(tmp_path / "out") == {"a.bin": "old", "b.bin": "old"}
    assert contents(tmp_path / "out.unfinished") == {"a.bin": "new", "b.bin": "new"}
    write(tmp_path / "out", "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, signal, sys
from dapo_jax.runtime.storage.output_folder import replace
calls = 0
def deadly(function):
    def call(*arguments, **named):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call
for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "open"):
    setattr(os, name, deadly(getattr(os, name)))
with replace("out", sys.argv[1], "trained model") as folder:
    for name in ("a.bin", "b.bin"):
        (folder / name).write_text("new")
print(calls)
"""


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(every, tmp_path):
    """Between the two renames neither has the name; the next command puts the old one back."""
    out, missing = tmp_path / "out", 0
    old, new = dict.fromkeys(["a.bin", "b.bin"], "old"), dict.fromkeys(["a.bin", "b.bin"], "new")
    write(out, "old")
    for kills in range(1, 99, every):
        missing += not out.exists()
        with pytest.raises(ZeroDivisionError):
            with replace("out", str(out), TRAINED):
                assert contents(out) in (old, new)
                raise ZeroDivisionError
        write(out, "old")
        assert [path.name for path in tmp_path.iterdir()] == ["out"] and contents(out) == old
        line = [sys.executable, "-c", KILLED, out, str(kills)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if out.exists():
            files = {name: text for name, text in contents(out).items() if name in old}
            assert files in (old, new)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert contents(out) == new and kills > 8
    assert missing <= 1


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_have_the_modes_that_the_umask_allows(umask, tiny_params, tmp_path):
    before = os.umask(umask)
    try:
        with replace("out", str(tmp_path / "out"), TRAINED) as folder:
            save_huggingface.save_weights(folder, save_huggingface.flatten(tiny_params), TINY)
    finally:
        os.umask(before)
    paths = [tmp_path / "out", *(tmp_path / "out").iterdir()]
    assert len(paths) > 2
    for path in paths:
        whole = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == whole & ~umask, path
