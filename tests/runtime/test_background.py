"""Background writes run in order and raise their errors; what a process runs out of is one line."""

import errno
import os
import pathlib
import resource
import subprocess
import sys
import threading
import types
from unittest import mock

import pytest

from dapo_jax.config.experiment import Config
from dapo_jax.run.checks import guarded
from dapo_jax.runtime.nonfinite import NotFinite
from dapo_jax.runtime.storage import files
from dapo_jax.runtime.storage.files import MAX_WAITING, Storage
from dapo_jax.runtime.storage.output_folder import try_bucket
from dapo_jax.types.errors import ConfigError


def test_writes_run_in_order_and_drain_waits_for_them_and_raises_their_errors():
    storage, done, start = Storage(), [], threading.Event()
    storage.attempt_later("it", start.wait)
    for i in range(MAX_WAITING):
        storage.attempt_later("it", lambda i=i: done.append(i))
    assert done == []
    start.set()
    storage.drain()
    assert done == list(range(MAX_WAITING))
    storage.attempt_later("it", lambda: 1 / 0)  # an error that is not of storage
    with pytest.raises(ZeroDivisionError):
        storage.drain()


def test_a_program_that_fails_finishes_its_writes(tmp_path):
    code = (
        "import time\nfrom dapo_jax.runtime.storage.files import Storage\n"
        f"slow = lambda: time.sleep(0.3) or open({str(tmp_path / 'it')!r}, 'w').close()\n"
        "Storage().attempt_later('it', slow)\nraise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3
    assert (tmp_path / "it").exists()


# --- limits of a process -------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parents[2]
BASE = f"--config={ROOT}/configs/arithmetic_base.py"


@pytest.mark.parametrize("megabytes", [400, 2900])
def test_too_few_addresses_are_one_line(megabytes, tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    command = [sys.executable, "-m", "dapo_jax", "sft", BASE, f"--config.out={tmp_path}/out"]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr[-2000:]
    assert done.stderr.startswith(f"error: ulimit -v = {megabytes << 10}: must be unlimited")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "error: not enough memory (in fail, "),
        (RuntimeError("can't start new thread"), "a limit of this machine is reached: can't"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "a limit of"),
        (OSError(errno.EMFILE, "Too many open files"), "reached: [Errno 24] Too many open files"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating\n"), "memory: RESOURCE_EXH"),
    ],
)
def test_what_runs_out_in_a_command_is_one_line_with_its_place(error, words, capsys):
    source = compile("def fail(error):\n    raise error", "/x/dapo_jax/learner/update.py", "exec")
    exec(source, names := {})
    assert guarded(lambda: names["fail"](error)) == os.EX_OSERR
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and "update.py:2)" in said


# It has no address.
RESET = type("ClientOSError", (OSError,), {"__module__": "aiohttp"})(
    errno.ECONNRESET, "it is reset"
)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RESET, 74, "gs://bucket/run can't be read or written: it is reset"),
        (NotFinite("the parameters are not finite"), 4, "the parameters are not finite"),
    ],
)
def test_an_error_has_its_exit_code_and_a_bucket_its_name(error, code, line, capsys):
    work = mock.Mock(side_effect=error)
    assert guarded(work, Config(run_dir="gs://bucket/run")) == code
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_checkpoint_that_a_bucket_takes_ends_the_wait_of_other_files(monkeypatch):
    """Rollouts would otherwise be lost for as long again as the outage took."""
    now, warnings = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(files, "time", clock)
    storage = Storage(warnings.append)

    def fail():
        now[0] += 30
        raise type("ServerError", (Exception,), {"__module__": "gcsfs"})("busy")

    assert not storage.attempt("rollouts/", fail)
    assert not storage.attempt("rollouts/", list)  # the bucket is left alone until second 60
    storage.report_recovery("the checkpoint")
    assert storage.attempt("rollouts/", list)
    assert warnings[-1] == "rollouts/ can be written again"


def test_a_bucket_that_is_away_is_no_wrong_setting():
    folder = mock.MagicMock()
    for error, raised in (RESET, type(RESET)), (OSError("none"), ConfigError):
        (folder / "").write_bytes.side_effect = error
        with pytest.raises(raised):
            try_bucket(folder, "run_dir", "gs://bucket/run")
