"""gRPC server in trouble: overload, clients that leave, signals, threads that die."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from served import BUDGET, code_and_details, make_serve_config, serving, slow_down

from dapo_jax.commands.serve import server as serve
from dapo_jax.commands.serve.generator import Generator


def test_too_many_requests_are_refused_and_the_others_answered(
    byte_folder, same_engine, byte_responses, monkeypatch
):
    gate = threading.Event()
    slow_down(same_engine, monkeypatch, gate)
    config = make_serve_config(byte_folder, waiting=2)
    with serving(config) as server, ThreadPoolExecutor(64) as pool:

        def ask(_):
            try:
                return server.client.ask("3+4=", BUDGET)[1]
            except grpc.RpcError as error:
                gate.set()  # nothing is answered before the first one is refused
                return error.code()

        answers = list(pool.map(ask, range(64)))
    refused = answers.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert refused > 0
    assert answers.count(byte_responses["3+4="]) == 64 - refused >= config.slots


def test_a_cancelled_request_gives_its_slot_back(
    byte_folder, same_engine, byte_responses, monkeypatch
):
    gate = threading.Event()
    steps = slow_down(same_engine, monkeypatch, gate)
    cancelled = threading.Semaphore(0)
    cancel = Generator.cancel

    def count_cancelled(generator, request):
        cancel(generator, request)
        cancelled.release()

    monkeypatch.setattr(Generator, "cancel", count_cancelled)
    with serving(make_serve_config(byte_folder)) as server:
        calls = [
            server.client.stream("3+4=", BUDGET) for _ in range(same_engine.max_concurrent_decodes)
        ]
        while not steps:
            threading.Event().wait(0.01)
        for call in calls:
            call.cancel()
        for _ in calls:
            assert cancelled.acquire(timeout=30)
        gate.set()
        assert server.client.ask("a", 2)[1] == byte_responses["a"][:2]
        assert len(steps) < BUDGET  # nobody waited for 24 tokens that nobody reads


def test_requests_that_take_too_long_are_cancelled_when_the_server_leaves(
    byte_folder, same_engine, monkeypatch
):
    gate = threading.Event()
    slow_down(same_engine, monkeypatch, gate)
    with serving(make_serve_config(byte_folder, shutdown_seconds=0.2)) as server:
        call = server.client.stream("3+4=", BUDGET)
        threading.Event().wait(0.3)
        server.stop(wait=False)
        code, _ = code_and_details(call)
        assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        gate.set()
        server.join()
    assert server.error is None


@pytest.mark.parametrize("call", ["prefill", "insert", "generate"])
def test_clients_learn_that_the_decoding_thread_has_failed(
    byte_folder, same_engine, monkeypatch, call
):
    with serving(make_serve_config(byte_folder)) as server:
        assert server.client.is_live()

        def fail(*args, **options):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(same_engine, call, fail)
        code, details = code_and_details(server.client.stream("3+4=", BUDGET))
        assert code == grpc.StatusCode.INTERNAL
        assert details == "the decoding thread has failed"
        server.join()
    assert isinstance(server.error, serve.ServingFailed)
