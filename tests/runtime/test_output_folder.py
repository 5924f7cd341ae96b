"""Commands write only into folders that are new, empty or their own, one process at a time."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import forked
import numpy as np
import pytest
from conftest import TINY
from disks import limited
from output_folders import COMMANDS, ROOT, call, snapshot
from safetensors.numpy import save_file

from dapo_jax.config.experiment import Config
from dapo_jax.model import save_huggingface
from dapo_jax.run.evaluate import claim_folder
from dapo_jax.runtime.storage.output_folder import (
    EVALUATION,
    EXPORTED,
    LOCK,
    MARK,
    RUN,
    TRAINED,
    check_free,
    claim,
    replace,
)
from dapo_jax.types.errors import ConfigError


def make_foreign(path):
    (path / "chapters").mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")
    (path / "config.json").write_text("{}")
    return path


def make_file(path):
    path.write_text("a file")
    return path


def make_marked(path, mark):
    path.mkdir()
    (path / MARK).write_text(mark)
    return path


def make_link(path):
    path.symlink_to(make_foreign(path.with_name("target")))
    return path


BAD = {
    "foreign": (make_foreign, "holds 'chapters' and no mark of dapo_jax"),
    "file": (make_file, "is a file"),
    "below_a_file": (lambda path: make_file(path) / "run", "can't be written: Not a directory"),
    "linked": (make_link, "target' holds 'chapters'"),
    "of_another_kind": (lambda path: make_marked(path, '{"kind": "trained model"}'), "marked as:"),
    "broken_mark": (lambda path: make_marked(path, '{"kind": "ru'), "can't be read"),
    "zero_byte": (lambda path: f"{path}\0", "null"),
    "long": (lambda path: f"{path}{'x' * 300}", "name too long"),
    "empty": (lambda path: "", "names no folder"),
    "tilde": (lambda path: "~/run", "write \\$HOME"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_folder_of_others_and_an_impossible_name_are_rejected(bad, tmp_path):
    make, words = BAD[bad]
    folder = str(make(tmp_path / "mine"))
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=f"(?i)must be a new or empty.*{words}") as rejected:
        with claim("run_dir", folder, RUN):
            pass
    assert len(str(rejected.value).splitlines()) == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_its_setting_and_rejects_a_folder_of_others(command, tmp_path, capsys):
    folder = make_foreign(tmp_path / "mine")
    before = snapshot(tmp_path)
    assert call(command, folder) == 2
    message = capsys.readouterr().err
    flag = COMMANDS[command][2].removeprefix("--").removeprefix("config.").rstrip("=")
    setting = "evaluation.out" if command == "evaluate" else flag
    assert message.startswith(f"error: config.{setting} = {str(folder)!r}: must be a new or empty")
    assert len(message.splitlines()) == 1 and "holds 'chapters'" in message
    assert snapshot(tmp_path) == before


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path, capsys):
    """Root may write a read-only folder, but nobody can make one in /proc."""
    parent = pathlib.Path("/proc")
    if os.geteuid():
        parent = tmp_path / "read_only"
        parent.mkdir(mode=0o555)
    assert call("train", parent / "new") == 2
    message = capsys.readouterr().err
    assert "can't be written" in message and len(message.splitlines()) == 1, message


def test_a_new_folder_that_stays_empty_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), claim("run_dir", tmp_path / "a", RUN):
        assert (tmp_path / "a" / MARK).exists()
        raise ZeroDivisionError
    assert not any(tmp_path.iterdir())


# --- one process at a time --------------------------------------------------------------------

HOLDER = """
import os, subprocess, sys, time
from dapo_jax.commands.evaluate import main as evaluate_main
from dapo_jax.runtime.storage.output_folder import claim
with claim("run_dir", sys.argv[1], "run"):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    reader, writer = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(writer, b"forked")
        time.sleep(60)
    os.read(reader, 6)
    print(worker.pid, forked, flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_rejected_while_the_first_lives_and_resumes_after_a_kill(tmp_path):
    """Also if a worker and a forked child of the killed run live on."""
    line = [sys.executable, "-c", HOLDER, tmp_path / "run"]
    holder = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    children = [int(pid) for pid in holder.stdout.readline().split()]
    try:
        words = f"run' is being written by process {holder.pid} on {os.uname().nodename}"
        for _ in range(3):  # a rejected one does not break the lock of the holder
            with pytest.raises(ConfigError, match=words), claim("run_dir", tmp_path / "run", RUN):
                pass
        holder.kill()
        holder.wait()
        for child in children:
            os.kill(child, 0)  # still alive
        with claim("run_dir", tmp_path / "run", RUN) as folder:
            assert f"process {os.getpid()} " in (folder / LOCK).read_text()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        holder.stdout.close()


@pytest.mark.parametrize("kind", [RUN, EVALUATION, TRAINED, EXPORTED])
def test_a_folder_that_another_process_writes_is_rejected(kind, tmp_path):
    folder = str(tmp_path / "out")
    write = replace if kind in (TRAINED, EXPORTED) else claim
    words = f"is being written by process {os.getpid()} on"
    with write("out", folder, kind), pytest.raises(ConfigError, match=words):
        with write("out", folder, kind):
            pass


def test_an_evaluation_writes_beside_a_run_that_trains(tmp_path):
    config = Config(run_dir=str(tmp_path))
    with claim("run_dir", config.run_dir, RUN), contextlib.ExitStack() as stack:
        folder, _ = claim_folder(config, None, stack, print)
        (folder / "responses.jsonl").write_text("")
    assert json.loads((folder / MARK).read_text()) == {"kind": EVALUATION}
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARK, LOCK, "evaluations"]


# --- folders that are replaced as a whole ------------------------------------------------------


def write_files(out, text, names=("a.bin", "b.bin")):
    with replace("out", str(out), TRAINED) as folder:
        for name in names:
            (folder / name).write_text(text)


def contents(folder):
    files = (path for path in folder.iterdir() if path.name not in (MARK, LOCK))
    return {path.name: path.read_text() for path in files}


def test_an_own_folder_is_replaced_as_a_whole(tmp_path):
    out = tmp_path / "out"
    write_files(out, "old", ("a.bin", "b.bin", "c.bin"))
    out.chmod(0o750)
    write_files(out, "new")
    assert contents(out) == {"a.bin": "new", "b.bin": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o777 == 0o750
    (tmp_path / "link").symlink_to(out)
    write_files(tmp_path / "link", "newer")
    assert contents(out)["a.bin"] == "newer" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("place", ["out", "out.unfinished", "out.replaced"])
def test_a_folder_with_files_of_others_is_rejected_and_kept(place, tmp_path):
    write_files(tmp_path / "out", "old")
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    words = f"{place}' (also )?holds 'notes.txt'"
    with pytest.raises(ConfigError, match=words):
        check_free("out", str(tmp_path / "out"), TRAINED)
    with pytest.raises(ConfigError, match=words):
        write_files(tmp_path / "out", "new")
    assert snapshot(tmp_path) == before


def fail(path):
    raise ZeroDivisionError


def fill(write):
    def work(path):
        with limited(path, 100):
            write(path, np.zeros(1000))

    return work


@pytest.mark.parametrize(
    ("work", "error", "words"),
    [
        (fail, ZeroDivisionError, ""),
        (fill(pathlib.Path.write_bytes), ConfigError, "free space; .*can't be written: File too"),
        (fill(lambda path, a: save_file({"a": a}, path)), ConfigError, "written: File too large$"),
    ],
)
def test_a_full_disk_is_one_line_and_keeps_the_old_folder(work, error, words, tmp_path):
    write_files(tmp_path / "out", "old")
    before = snapshot(tmp_path / "out")
    with pytest.raises(error, match=words):
        with replace("out", str(tmp_path / "out"), TRAINED) as folder:
            work(folder / "a.bin")
    assert snapshot(tmp_path / "out") == before
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


def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(tmp_path):
    """Between the two renames neither has the name; the next command puts the old one back."""
    out, missing = tmp_path / "out", 0
    old, new = dict.fromkeys(["a.bin", "b.bin"], "old"), dict.fromkeys(["a.bin", "b.bin"], "new")
    write_files(out, "old")
    for kills in range(1, 99):
        missing += not out.exists()
        with pytest.raises(ZeroDivisionError):
            with replace("out", str(out), TRAINED):
                assert contents(out) in (old, new)
                raise ZeroDivisionError
        write_files(out, "old")
        assert [path.name for path in tmp_path.iterdir()] == ["out"] and contents(out) == old
        done = forked.run(KILLED, out, kills)
        if out.exists():
            files = {name: text for name, text in contents(out).items() if name in old}
            assert files in (old, new)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert contents(out) == new and kills > 8 and missing <= 1


@pytest.mark.parametrize("umask", [0o022, 0o077])
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
