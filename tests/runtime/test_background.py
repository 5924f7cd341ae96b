"""Work in the background is done in order, waits for none, piles up nowhere and hides no error."""

import subprocess
import sys
import threading

import pytest
from dapo_jax.runtime.storage.background import MAX_WAITING, Background


def test_work_is_done_in_order_and_drain_waits_for_it():
    background, done, going = Background(), [], threading.Event()
    background.give(going.wait)
    for i in range(MAX_WAITING):
        background.give(lambda i=i: done.append(i))
    assert done == []
    going.set()
    background.drain()
    assert done == list(range(MAX_WAITING))


def test_the_caller_waits_where_too_much_waits():
    background, going = Background(), threading.Event()
    for _ in range(1 + MAX_WAITING):
        background.give(going.wait)
    caller = threading.Thread(target=background.give, args=(going.wait,))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    going.set()
    caller.join(5)
    assert not caller.is_alive()
    background.drain()


@pytest.mark.parametrize("later", ["give", "drain"])
def test_an_error_comes_up_in_the_caller(later):
    background = Background()
    background.give(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.drain() if later == "drain" else [background.give(int) for _ in range(99)]


def test_a_program_that_fails_has_done_what_was_given(tmp_path):
    code = (
        "import time\nfrom dapo_jax.runtime.storage.background import Background\n"
        f"slow = lambda: time.sleep(0.3) or open({str(tmp_path / 'it')!r}, 'w').close()\n"
        "Background().give(slow)\nraise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 3
    assert (tmp_path / "it").exists()
