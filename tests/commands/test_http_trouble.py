"""HTTP server in trouble: hostile bodies, overload, clients that leave, threads that die."""

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from served import BUDGET, TOKENIZER, connect, http_serving, slow_down

ASKED = {"model": "policy", "prompt": "3+4="}
MESSAGES = [{"role": "user", "content": "3+4="}]


def test_hostile_bodies_are_refused_and_the_server_lives(byte_folder, same_engine):
    bodies = {
        b"": "is not JSON",
        b"{": "is not JSON",
        b"[1]": "the body = [1]: must be a valid dictionary",
        b"\xff\xfe": "is not JSON",
        b"[" * 100_000: "is not JSON",
        b'{"temperature": NaN}': "temperature = nan",
        b'{"n": ' + b"9" * 5000 + b"}": "is not JSON",
        b'{"x": ' + b'{"x":' * 500 + b"1" + b"}" * 501: "is not JSON",
        b'{"x": {}}': "prompt is missing",
        b'{"model": "policy", "prompt": "\\ud800"}': "is not JSON",
        b'{"\\ud800": 1}': "is not JSON",
        b'{"prompt": "a", "model": {"policy": 1}}': "there is only 'policy'",
        b'{"model": "policy"}': "prompt is missing",
        b'{"model": "policy", "prompt": "a", "temperature": 1e999}': "temperature = inf",
        b'{"model": "policy", "prompt": "a", "stop": [["a"]]}': "stop[0] = ['a']: must be",
        b"x" * 5_000_000: "at most 1000000 bytes",
    }
    with http_serving(byte_folder) as (server, client):
        for body, message in bodies.items():
            answer = connect(server.http_port, body).getresponse()
            assert answer.status in (400, 404, 413), body[:50]
            assert message in json.load(answer)["error"]["message"], body[:50]
        chunks = (b"x" * 100_000 for _ in range(50))  # of no announced length
        answer = connect(server.http_port, chunks).getresponse()
        assert answer.status == 413 and "at most" in json.load(answer)["error"]["message"]
        assert client.completions.create(**ASKED).choices
        with pytest.raises(openai.BadRequestError, match="folder has no chat template"):
            client.chat.completions.create(model="policy", messages=MESSAGES)
    assert server.error is None


def test_too_many_responses_at_once_are_refused_whole(
    byte_folder, same_engine, byte_responses, monkeypatch
):
    gate = threading.Event()
    steps = slow_down(same_engine, monkeypatch, gate)
    with http_serving(byte_folder, waiting=8) as (_, client), ThreadPoolExecutor(3) as pool:
        running = [pool.submit(client.completions.create, **ASKED, n=8)]
        while not steps:
            time.sleep(0.01)
        time.sleep(0.3)  # four are in slots, some more on their way there, the others wait
        running.append(pool.submit(client.completions.create, **ASKED, n=1))
        time.sleep(0.1)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**ASKED, n=8)
        assert refused.value.response.headers["retry-after"] == "1"
        gate.set()
        texts = [choice.text for answer in running for choice in answer.result().choices]
        assert texts == 9 * [TOKENIZER.decode(byte_responses["3+4="])]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(
    byte_folder, same_engine, byte_responses, monkeypatch, stream
):
    gate = threading.Event()
    steps = slow_down(same_engine, monkeypatch, gate)
    with http_serving(byte_folder) as (server, client):
        body = json.dumps(ASKED | {"n": 12, "stream": stream}).encode()
        leaving = connect(server.http_port, body)
        while not steps:
            time.sleep(0.01)
        leaving.close()
        time.sleep(0.3)
        gate.set()
        answer = client.completions.create(model="policy", prompt="a")
        assert answer.choices[0].text == TOKENIZER.decode(byte_responses["a"])
        assert len(steps) < 2 * BUDGET  # 12 responses by 4 slots take three times as many


def test_a_client_that_leaves_within_its_request_is_no_error(byte_folder, same_engine, caplog):
    with http_serving(byte_folder) as (server, client):
        half = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
        half.putrequest("POST", "/v1/completions")
        half.putheader("Content-Length", "1000")
        half.putheader("Content-Type", "application/json")
        half.endheaders(b"{")
        half.close()
        time.sleep(0.3)
        assert client.completions.create(**ASKED).choices
    assert not [record for record in caplog.records if "uvicorn" in record.name]


def test_a_stop_frees_the_slot(byte_folder, same_engine, byte_responses, monkeypatch):
    gate = threading.Event()
    steps = slow_down(same_engine, monkeypatch, gate)
    gate.set()
    stop = TOKENIZER.decode(byte_responses["3+4="])[1]
    with http_serving(byte_folder) as (_, client):
        assert client.completions.create(**ASKED, stop=stop).choices[0].finish_reason == "stop"
        time.sleep(0.3)
    assert len(steps) < BUDGET


def test_running_requests_end_before_the_server_leaves(
    byte_folder, same_engine, byte_responses, monkeypatch
):
    gate = threading.Event()
    slow_down(same_engine, monkeypatch, gate)
    with http_serving(byte_folder) as (server, client), ThreadPoolExecutor(2) as pool:
        whole = pool.submit(client.completions.create, **ASKED)
        stream = pool.submit(lambda: list(client.completions.create(**ASKED, stream=True)))
        time.sleep(0.3)
        server.stop(wait=False)
        time.sleep(0.3)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(**ASKED)
        gate.set()
        text = TOKENIZER.decode(byte_responses["3+4="])
        assert whole.result().choices[0].text == text
        assert "".join(chunk.choices[0].text for chunk in stream.result()) == text
        server.join()
    assert server.error is None


def test_requests_that_take_too_long_are_cut_off_when_the_server_leaves(
    byte_folder, same_engine, monkeypatch
):
    gate = threading.Event()
    slow_down(same_engine, monkeypatch, gate)
    with (
        http_serving(byte_folder, shutdown_seconds=0.2) as (server, client),
        ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(client.completions.create, **ASKED)
        time.sleep(0.3)
        server.stop(wait=False)
        with pytest.raises(openai.APIError):
            whole.result()
        gate.set()
        server.join()
    assert server.error is None


def test_clients_learn_that_the_decoding_thread_has_failed(byte_folder, same_engine, monkeypatch):
    gate = threading.Event()

    def fail(*args, **options):
        gate.wait(30)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(same_engine, "generate", fail)
    with http_serving(byte_folder) as (server, client), ThreadPoolExecutor(2) as pool:
        whole = pool.submit(client.completions.create, **ASKED)
        stream = pool.submit(lambda: list(client.completions.create(**ASKED, stream=True)))
        time.sleep(0.3)
        gate.set()
        with pytest.raises(openai.InternalServerError, match="device thread has failed"):
            whole.result()
        with pytest.raises(openai.APIError, match="device thread has failed"):
            stream.result()
        server.join()
    assert server.failure == "the device thread has failed"
