"""What a server of Tinker's API keeps on the disk."""

import time

import pytest

from dapo_jax.extras.tinker import store as stores
from dapo_jax.extras.tinker.store import Request, State, Store


def request(owner: str, number: int, kind: str = "optim_step") -> Request:
    return Request(f"{owner}:{number}", owner, number, kind)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.close()


def test_a_repeated_request_is_stored_once_and_survives_a_new_start(store, tmp_path):
    store.accept(request("m", 1), b"first")
    store.accept(request("m", 1), b"second")
    again = Store(tmp_path)
    assert again.body(request("m", 1)) == b"first" and len(again.pending()) == 1
    assert again.result("m:1") == (State.PENDING, None) and again.result("x") is None
    again.close()


def test_requests_wait_until_they_have_a_result(store):
    for number in (3, 1, 2):
        store.accept(request("a", number), b"")
    assert [r.number for r in store.pending()] == [3, 1, 2] and store.last_number("a") == -1
    store.finish(request("a", 1), State.ANSWERED, b"{}")
    assert [r.number for r in store.pending()] == [3, 2] and store.last_number("a") == 1


def test_changes_replay_until_the_file_has_them(store):
    kinds = ["create_model", "forward_backward", "forward", "optim_step", "optim_step"]
    for number, kind in enumerate(kinds):
        store.accept(request("m", number, kind), b"body")
        failed = number == 3
        store.finish(request("m", number, kind), State.FAILED if failed else State.DONE, b"")
    assert [r.number for r in store.changes("m", -1)] == [0, 1, 4]
    store.forget_bodies("m", 1)
    assert [r.number for r in store.changes("m", 1)] == [4]
    assert store.last_number("m") == 4 and store.last_number("other") == -1


def test_old_results_and_expired_checkpoints_are_removed(store, monkeypatch):
    for number in range(2):
        store.accept(request("m", number), b"")
    store.finish(request("m", 0), State.DONE, b"result")
    path = "tinker://m/weights/old"
    store.put("checkpoint", path, {"expires": time.time() + 10}, "m")
    store.checkpoint_folder(path).mkdir(parents=True)
    store.tidy()
    assert store.get("checkpoint", path) is not None
    assert store.result("m:0") == (State.DONE, b"result")
    later = time.time() + stores.RESULT_SECONDS + 20
    monkeypatch.setattr(time, "time", lambda: later)
    store.tidy()
    assert store.result("m:0") == (State.DONE, None)
    assert store.result("m:1") == (State.PENDING, None)
    assert store.get("checkpoint", path) is None and not store.checkpoint_folder(path).exists()
