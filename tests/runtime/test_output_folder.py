"""Commands write only into folders that are new, empty or their own, one process at a time."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from output_folders import COMMANDS, ROOT, call, snapshot

from dapo_jax.config.experiment import Config, Evaluation
from dapo_jax.run.evaluation import claim_folder
from dapo_jax.runtime.settings import ConfigError
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


def make_somebodys(path):
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


def make_run(path, name, is_folder):
    make_marked(path, '{"kind": "run"}')
    (path / name).mkdir() if is_folder else (path / name).touch()
    return path


def make_link(path):
    path.symlink_to(make_somebodys(path.with_name("target")))
    return path


BAD = {
    "somebodys": (make_somebodys, "holds 'chapters' and no mark of dapo_jax"),
    "file": (make_file, "is a file"),
    "below_a_file": (lambda path: make_file(path) / "run", "is a file"),
    "linked": (make_link, "target' holds 'chapters'"),
    "of_another_kind": (lambda path: make_marked(path, '{"kind": "trained model"}'), "marked as:"),
    "file_in_a_run": (
        lambda path: make_run(path, "rollouts", False),
        "rollouts' is a file, but a run has a folder",
    ),
    "folder_in_a_run": (
        lambda path: make_run(path, "metrics.jsonl", True),
        "metrics.jsonl' is a folder, but a run has a file",
    ),
    "broken_mark": (lambda path: make_marked(path, '{"kind": "ru'), "can't be read"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_folder_that_is_not_its_own_is_refused_untouched(bad, tmp_path):
    make, words = BAD[bad]
    folder = make(tmp_path / "mine")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="must be a new or empty") as refused:
        check_free("run_dir", str(folder), RUN)
    assert words in str(refused.value) and len(str(refused.value).splitlines()) == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_its_setting_and_refuses_a_folder_of_others(command, tmp_path, capsys):
    folder = make_somebodys(tmp_path / "mine")
    before = snapshot(tmp_path)
    assert call(command, folder) == 2
    message = capsys.readouterr().err
    flag = COMMANDS[command][2].removeprefix("--").removeprefix("config.").rstrip("=")
    setting = "evaluation.out" if command == "evaluate" else flag
    assert message.startswith(f"error: config.{setting} = {str(folder)!r}: must be a new or empty")
    assert len(message.splitlines()) == 1 and "holds 'chapters'" in message
    assert snapshot(tmp_path) == before


REAL = """
import runpy, sys
try:
    runpy.run_module("dapo_jax", run_name="__main__", alter_sys=True)
finally:
    heavy = {"tensorflow", "dapo_jax.run.components"} & set(sys.modules)
    print(heavy or "nothing was opened")
"""


def test_the_real_command_refuses_before_any_work(tmp_path):
    make_somebodys(tmp_path / "mine")
    before = snapshot(tmp_path)
    _, arguments, flag = COMMANDS["train"]
    line = [sys.executable, "-c", REAL, "train", *arguments, f"{flag}{tmp_path}/mine"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "nothing was opened\n"
    assert len(done.stderr.splitlines()) == 1 and "holds 'chapters'" in done.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", ["train", "export"])
def test_a_folder_that_cannot_be_created_is_one_line(command, saved_run, tmp_path, capsys):
    """Root may write a read-only folder, but nobody can make one in /proc."""
    parent = pathlib.Path("/proc")
    if os.geteuid():
        parent = tmp_path / "read_only"
        parent.mkdir(mode=0o555)
    assert call(command, parent / "new", run_dir=saved_run[0]) == 2
    message = capsys.readouterr().err
    assert "can't be written" in message and len(message.splitlines()) == 1, message


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "circle", ""])
def test_a_name_that_no_folder_can_have_is_refused(name, tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match="config.run_dir = .*must be a new or empty folder"):
        with claim("run_dir", name and f"{tmp_path}/{name}", RUN):
            pass


def test_neither_home_nor_the_current_folder_is_used_even_if_empty(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for folder in (".", "../here", tmp_path / "home"):
        with pytest.raises(ConfigError, match="is your home or the current folder"):
            check_free("run_dir", folder, RUN)
    (tmp_path / "here" / MARK).write_text(json.dumps({"kind": RUN}))
    check_free("run_dir", ".", RUN)  # a run may be resumed from inside its folder


def test_an_empty_folder_is_removed_at_the_end(tmp_path):
    with pytest.raises(ZeroDivisionError), claim("run_dir", tmp_path / "a/b", RUN):
        assert (tmp_path / "a/b" / MARK).exists()
        raise ZeroDivisionError
    assert not any(tmp_path.iterdir())
    with contextlib.ExitStack() as stack:
        config = Config(run_dir=str(tmp_path / "run"), evaluation=Evaluation(out=""))
        assert claim_folder(config, None, stack).is_dir()
    assert not any(tmp_path.iterdir())


# --- one process at a time --------------------------------------------------------------------

HOLDER = """
import os, subprocess, sys, time
from dapo_jax.commands.evaluate import main as evaluate_main
from dapo_jax.runtime.storage.output_folder import claim
with claim("run_dir", sys.argv[1], "run"):
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    there, here = os.pipe()
    forked = os.fork()
    if not forked:
        os.write(here, b"forked")
        time.sleep(60)
    os.read(there, 6)
    print(worker.pid, forked, flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_while_the_first_lives_and_goes_on_after_a_kill(tmp_path):
    """Also where a worker and a forked child of the killed run live on."""
    line = [sys.executable, "-c", HOLDER, tmp_path / "run"]
    holder = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    children = [int(pid) for pid in holder.stdout.readline().split()]
    try:
        words = f"run' is being written by process {holder.pid} on {os.uname().nodename}"
        for _ in range(3):  # a refused one takes nothing from who holds it
            with pytest.raises(ConfigError, match=words), claim("run_dir", tmp_path / "run", RUN):
                pass
        holder.kill()
        holder.wait()
        for child in children:
            os.kill(child, 0)  # still there
        with claim("run_dir", tmp_path / "run", RUN) as folder:
            assert f"process {os.getpid()} " in (folder / LOCK).read_text()
        assert set(os.listdir(tmp_path / "run")) == {MARK, LOCK}
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        holder.stdout.close()


@pytest.mark.parametrize("kind", [RUN, EVALUATION, TRAINED, EXPORTED])
def test_a_folder_that_another_process_writes_is_refused(kind, tmp_path):
    folder = str(tmp_path / "out")
    write = replace if kind in (TRAINED, EXPORTED) else claim
    words = f"is being written by process {os.getpid()} on"
    with write("out", folder, kind), pytest.raises(ConfigError, match=words):
        with write("out", folder, kind):
            pass


def test_an_evaluation_writes_beside_a_run_that_trains(tmp_path):
    config = Config(run_dir=str(tmp_path))
    with claim("run_dir", config.run_dir, RUN), contextlib.ExitStack() as stack:
        folder = claim_folder(config, None, stack)
        (folder / "responses.jsonl").write_text("")
    assert json.loads((folder / MARK).read_text()) == {"kind": EVALUATION}
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARK, LOCK, "evaluations"]


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, capsys):
    def no_lock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with claim("run_dir", tmp_path / "run", RUN) as folder:
        assert folder.is_dir()
    assert "can't be locked (No locks available)" in capsys.readouterr().err
