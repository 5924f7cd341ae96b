"""What a server of Tinker's API keeps on the disk."""

import time

import pytest

from dapo_jax.commands.serve.tinker import store as stores
from dapo_jax.commands.serve.tinker.store import Request, State, Store


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
    assert again.body("m:1") == b"first" and again.count_pending() == 1
    assert again.read_result("m:1") == (State.PENDING, None) and again.read_result("x") is None
    again.close()


def test_requests_of_each_owner_wait_for_the_next_number(store):
    for number in (3, 1, 2):
        store.accept(request("a", number), b"")
    store.accept(request("b", 5), b"")
    store.accept(request("s", 0, "sample"), b"")

    def waiting() -> dict[str, tuple[int, int]]:
        rows = store.first_pending("sample")
        return {row.request.owner: (row.request.number, row.expected) for row in rows}

    assert waiting() == {"a": (1, 0), "b": (5, 0)}
    store.finish(request("a", 1), State.ANSWERED, b"{}")
    assert waiting() == {"a": (2, 2), "b": (5, 0)}
    assert [r.owner for r in store.pending("sample")] == ["s"]


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


def test_a_failed_transaction_writes_nothing(store):
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.put("model", "m", "s", {})
        raise ZeroDivisionError
    assert store.get("model", "m") is None


def test_read_results_and_expired_checkpoints_are_removed(store, monkeypatch):
    for number in range(2):
        store.accept(request("m", number), b"")
        store.finish(request("m", number), State.DONE, b"result")
    assert store.read_result("m:0") == (State.DONE, b"result")
    path = "tinker://m/weights/old"
    store.put("checkpoint", path, "m", {"expires": time.time() + 10})
    store.checkpoint_folder(path).mkdir(parents=True)
    store.tidy()
    assert store.get("checkpoint", path) is not None
    later = time.time() + stores.RESULT_SECONDS + 20
    monkeypatch.setattr(time, "time", lambda: later)
    store.tidy()
    assert store.read_result("m:0") == (State.DONE, None)  # it was read
    assert store.read_result("m:1") == (State.DONE, b"result")
    assert store.get("checkpoint", path) is None and not store.checkpoint_folder(path).exists()
