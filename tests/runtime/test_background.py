"""Background writes run in order, do not pile up, and raise their errors in the caller."""

import subprocess
import sys
import threading

import pytest

from dapo_jax.runtime.storage.retries import MAX_WAITING, Storage


def test_writes_run_in_order_and_drain_waits_for_them():
    storage, done, start = Storage(), [], threading.Event()
    storage.attempt_later("it", start.wait)
    for i in range(MAX_WAITING):
        storage.attempt_later("it", lambda i=i: done.append(i))
    assert done == []
    start.set()
    storage.drain()
    assert done == list(range(MAX_WAITING))


def test_the_caller_waits_if_too_many_writes_wait():
    storage, start = Storage(), threading.Event()
    for _ in range(1 + MAX_WAITING):
        storage.attempt_later("it", start.wait)
    caller = threading.Thread(target=storage.attempt_later, args=("it", start.wait))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    start.set()
    caller.join(5)
    assert not caller.is_alive()
    storage.drain()


def test_an_error_that_is_not_of_storage_is_raised_in_the_caller():
    storage = Storage()
    storage.attempt_later("it", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        storage.drain()


def test_a_program_that_fails_finishes_its_writes(tmp_path):
    code = (
        "import time\nfrom dapo_jax.runtime.storage.retries import Storage\n"
        f"slow = lambda: time.sleep(0.3) or open({str(tmp_path / 'it')!r}, 'w').close()\n"
        "Storage().attempt_later('it', slow)\nraise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3
    assert (tmp_path / "it").exists()
