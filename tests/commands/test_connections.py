"""Half-open connections, connections without end, and who is let in."""

import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from rude_connections import HALF_HEADERS, Flood, flood
from served import (
    Client,
    code_and_details,
    connect,
    free_port,
    http_serving,
    make_serve_config,
    messages,
    serving,
    slow_down,
)
from small_runs import ROOT

from dapo_jax.commands.serve import server
from dapo_jax.runtime.settings import ConfigError

ASKED = {"model": "policy", "prompt": "3+4=", "max_tokens": 4}
HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 9000\r\n\r\n"
) + b"x" * 8000
SILENCE = b""


def ask(port: int, **headers: str) -> int:
    """Status of a good request."""
    return connect(port, json.dumps(ASKED), **headers).getresponse().status


@pytest.mark.parametrize("sent", [SILENCE, HALF_HEADERS, HALF_BODY, HALF_BODY[:20]])
def test_half_requests_are_closed_and_others_answered(byte_folder, same_engine, tmp_path, sent):
    (log := tmp_path / "log").touch()
    with http_serving(byte_folder, request_seconds=1.0) as (served, _):
        ports = served.client.port, served.http_port
        outcome = flood(os.getpid(), ports, log, sent=sent, count=30, wait=25)
    assert outcome.gone == 30 and 0.9 < outcome.last < 20
    assert outcome.answered > 3 and outcome.wrong == 0
    assert "30 of 30 gone" in str(outcome)


def test_bytes_that_drip_keep_no_connection(byte_folder, same_engine):
    with http_serving(byte_folder, request_seconds=1.0) as (served, _):
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", served.http_port), timeout=5) as dripping:
            answer = b""
            with contextlib.suppress(ConnectionError):
                for byte in HALF_BODY:
                    dripping.sendall(bytes([byte]))
                    time.sleep(0.02)
            with contextlib.suppress(ConnectionError):
                answer = dripping.recv(1000)
        assert time.monotonic() - began < 20
        assert answer in (b"", b"HTTP/1.1 408 Request Timeout\r\n") or b" 408 " in answer


def test_an_idle_connection_is_closed_after_its_time(byte_folder, same_engine):
    with http_serving(byte_folder, idle_seconds=2, request_seconds=0.2) as (served, _):
        kept = connect(served.http_port, json.dumps(ASKED))
        assert kept.getresponse().read()
        time.sleep(0.35)  # longer than a request may take to arrive
        kept.request(
            "POST", "/v1/completions", json.dumps(ASKED), {"Content-Type": "application/json"}
        )
        assert kept.getresponse().read()
        kept.sock.settimeout(30)
        assert kept.sock.recv(1) == b""


def test_at_the_limit_the_longest_waiting_connection_is_closed(byte_folder, same_engine):
    with http_serving(byte_folder, max_connections=8) as (served, _):
        rude = Flood(served.http_port, 30, HALF_HEADERS)
        assert ask(served.http_port) == 200
        rude.wait(30, most=23)
        rude.wait(0.5)
        assert len(rude.gone) == 23  # thirty and one came, eight stay
        rude.close()


def test_unfinished_bodies_hold_only_so_many_bytes(byte_folder, same_engine):
    with http_serving(byte_folder, max_body_mb=0.01) as (served, _):
        rude = Flood(served.http_port, 100, HALF_BODY)
        rude.wait(30, most=20)
        rude.wait(0.5)
        assert 20 <= len(rude.gone) <= 23  # 64 times 10,000 bytes are held
        assert ask(served.http_port) == 200
        rude.close()


def test_an_answer_that_takes_long_is_no_half_request(byte_folder, same_engine, monkeypatch):
    slow_down(same_engine, monkeypatch, gate := threading.Event())
    body = json.dumps(ASKED).encode()
    request = HALF_BODY.split(b"\r\n\r\n")[0].replace(b"9000", b"%d" % len(body))
    with http_serving(byte_folder, request_seconds=0.3) as (served, _):
        with socket.create_connection(("127.0.0.1", served.http_port), timeout=20) as kept:
            kept.sendall((request + b"\r\n\r\n" + body) * 2)  # the second waits for the first
            time.sleep(1)
            gate.set()
            answers = b""
            while answers.count(b"HTTP/1.1 200 OK") < 2:
                assert (more := kept.recv(65536))
                answers += more


LITTLE_SERVER = """
import asyncio, resource, socket, sys, time
from dapo_jax.commands.serve.http_connections import HttpServer

async def app(scope, receive, send):
    seconds = b"%f" % time.process_time()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(300 * (scope["path"] == "/long")):
        await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
    await send({"type": "http.response.body", "body": seconds})

async def main():
    listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=2048)
    limits = dict(connections=1000, idle_seconds=5, most_bytes=1000, shutdown_seconds=1)
    HttpServer(app, listening, request_seconds=float(sys.argv[2]), **limits)
    print("ready", flush=True)
    await asyncio.sleep(60)

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
asyncio.run(main())
"""


@contextlib.contextmanager
def little_server(request_seconds: float):
    """Port of a server of seconds of computing, which may open 64 files and has to log nothing."""
    port, pipe = free_port(), subprocess.PIPE
    command = [sys.executable, "-c", LITTLE_SERVER, str(port), str(request_seconds)]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield port
    finally:
        process.kill()
        assert process.communicate()[1] == b""


def used_seconds(port: int) -> float:
    """Seconds of computing of a little server."""
    web = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    web.request("GET", "/")
    return float(web.getresponse().read())


def test_at_the_limit_of_open_files_nothing_spins_or_is_logged():
    with little_server(60) as port:
        before = used_seconds(port)
        rude = Flood(port, 100, HALF_HEADERS)
        time.sleep(3)
        assert used_seconds(port) - before < 1  # of four seconds and more
        rude.close()


def test_a_client_that_does_not_read_is_closed():
    with little_server(0.5) as port, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        before = used_seconds(port)
        time.sleep(2)
        assert used_seconds(port) - before < 1  # nothing is sent to nobody
        size = 0
        with contextlib.suppress(ConnectionError):
            while part := deaf.recv(1_000_000):
                size += len(part)
        assert size < 20_000_000  # of thirty; what was under way still comes


def test_connections_fit_the_limit_of_open_files(capsys, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd")) + server.SPARE_FILES
    limits = {"now": (used + 10, used + 20)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert server.connections_within(4) == 4 and limits["now"] == (used + 10, used + 20)
    assert server.connections_within(9) == 9 and limits["now"][0] >= used + 18
    assert capsys.readouterr().err == ""
    assert server.connections_within(1000) in (9, 10)
    assert "warning: max_connections = 1000: the limit of open files" in capsys.readouterr().err
    limits["now"] = (used, used)
    with pytest.raises(ConfigError, match="leaves room for 0 .ulimit -n"):
        server.connections_within(1000)


def test_half_requests_do_not_hold_the_server_back(byte_folder, same_engine, caplog):
    silent = threading.Event()
    with http_serving(byte_folder, request_seconds=30.0) as (served, _):
        floods = [Flood(served.http_port, 20, sent) for sent in (HALF_BODY, HALF_HEADERS, SILENCE)]
        channel = grpc.insecure_channel(f"127.0.0.1:{served.client.port}")
        decode = channel.stream_stream("/jetstream_proto.Orchestrator/Decode")

        def nothing():
            silent.wait(30)
            yield from ()

        calls = [decode(nothing()) for _ in range(20)]
        time.sleep(0.5)
        began = time.monotonic()
        served.stop()
        assert time.monotonic() - began < 5
        silent.set()
        assert {call.code() for call in calls} <= {
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.UNAVAILABLE,
        }
        for rude in floods:
            rude.wait(1)
            assert len(rude.gone) == 20
    assert served.error is None and not [r for r in caplog.records if r.exc_info]


def test_a_call_of_grpc_without_its_message_ends(byte_folder, same_engine):
    with http_serving(byte_folder, request_seconds=0.5) as (served, _):
        channel = grpc.insecure_channel(f"127.0.0.1:{served.client.port}")
        silent = threading.Event()

        def nothing():
            silent.wait(10)
            yield from ()

        call = channel.stream_stream("/jetstream_proto.Orchestrator/Decode")(nothing())
        began = time.monotonic()
        code, details = code_and_details(call_samples(call))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - began < 3
        assert details == "the message has not arrived within 0.5 s"
        silent.set()
        call = channel.stream_stream("/jetstream_proto.Orchestrator/Decode")(iter(()))
        code, details = code_and_details(call_samples(call))
        assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "there is no message")


def call_samples(call):
    """The call's responses, parsed."""
    for response in call:
        yield messages.DecodeResponse.FromString(response)


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Content-Type": "text/plain"}, 415, "content-type = 'text/plain': must be application"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "must be application/json"),
        ({"Content-Type": ""}, 415, "content-type = ''"),
        ({"Content-Type": "application/json; charset=utf-8"}, 200, ""),
        ({"Content-Type": "text/plain", "Origin": "http://evil.example"}, 403, "origin = 'http:"),
        ({"Origin": "http://evil.example"}, 403, "must be of 127.0.0.1, ::1, localhost, ours"),
        ({"Origin": "null"}, 403, "origin = 'null'"),
        ({"Origin": "http://localhost:3000"}, 200, ""),
        ({"Origin": "http://localhost.evil.example"}, 403, "origin"),
        ({"Host": "evil.example"}, 403, "host = 'evil.example'"),
        ({"Host": "evil.example:8000"}, 403, "the setting allowed_hosts adds others"),
        ({"Host": "localhost@evil.example"}, 403, "host"),
        ({"Host": "[::1"}, 403, "host"),
        ({"Host": "[::1]:8000"}, 200, ""),
        ({"Host": "OURS:8000"}, 200, ""),
        ({"Host": "127.0.0.1"}, 200, ""),
    ],
)
def test_only_json_of_known_hosts_and_origins_is_served(
    byte_folder, same_engine, headers, status, message
):
    with http_serving(byte_folder, allowed_hosts="ours") as (served, _):
        answer = connect(served.http_port, json.dumps(ASKED), **headers).getresponse()
        assert answer.status == status and message in answer.read().decode()


def test_every_host_where_all_are_allowed(byte_folder, same_engine):
    with http_serving(byte_folder, allowed_hosts="*") as (served, _):
        assert ask(served.http_port, Host="any.example", Origin="https://any.example") == 200


@pytest.mark.parametrize("from_file", [True, False])
def test_a_key_lets_in_those_who_have_it(
    byte_folder, same_engine, tmp_path, monkeypatch, from_file
):
    (tmp_path / "key").write_text("s3cret\n")
    settings = {"api_key_file": str(tmp_path / "key")} if from_file else {}
    if not from_file:
        monkeypatch.setenv("DAPO_API_KEY", "s3cret")
    with http_serving(byte_folder, **settings) as (served, client):
        answer = connect(served.http_port, json.dumps(ASKED)).getresponse()
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.load(answer)["error"]["code"] == "invalid_api_key"
        for sent in "Bearer s3cre", "Bearer", "s3cret", "Bearer s3cret1", "Bearer \xe9":
            assert ask(served.http_port, Authorization=sent) == 401
        assert ask(served.http_port, Authorization="Bearer s3cret") == 200
        assert client.with_options(api_key="s3cret").models.list().data
        with pytest.raises(Exception, match="the key is missing or wrong"):
            client.models.list()
        assert served.client.is_live()
        code, _ = code_and_details(served.client.stream("3+4=", 4))
        assert code == grpc.StatusCode.UNAUTHENTICATED
        request = messages.DecodeRequest(
            text_content=messages.DecodeRequest.TextContent(text="3+4="), max_tokens=4
        )
        metadata = [("authorization", "Bearer s3cret")]
        assert list(served.client.stub.Decode(request, metadata=metadata, timeout=60))


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "caf\xe9"])
def test_a_key_that_is_none_is_refused_and_not_shown(tmp_path, text):
    (tmp_path / "key").write_text(text)
    config = make_serve_config(tmp_path, api_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="must hold a key: one line") as refused:
        server.read_key(config)
    assert text.strip() == "" or text.strip() not in str(refused.value)
    config.api_key_file = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="config.api_key_file = .*: can't be read"):
        server.read_key(config)


def test_a_server_for_all_without_a_key_warns(byte_folder, same_engine, tmp_path, capsys):
    (tmp_path / "key").write_text("s3cret")
    for settings, warns in (
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key_file": str(tmp_path / "key")}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
    ):
        with serving(make_serve_config(byte_folder, **settings)) as served:
            assert isinstance(served.client, Client)
        assert (
            "warning: who reaches 0.0.0.0 may use the server" in capsys.readouterr().err
        ) == warns
