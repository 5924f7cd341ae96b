"""The HTTP server: access, hostile bodies, overload, clients that leave, failures, budgets."""

import contextlib
import functools
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from row_files import read_table
from served import (
    BUDGET,
    BYTES_DECODER,
    TOKENIZER,
    connect,
    free_port,
    http_serving,
    likeliest,
    make_openai,
    make_serve_config,
    reopen,
    serving,
)
from small_runs import ROOT

import dapo_jax
from dapo_jax.extras.arithmetic import make_problem
from dapo_jax.extras.serve import policy
from dapo_jax.run import memory
from dapo_jax.runtime.keys import read_key
from dapo_jax.types.errors import ConfigError

ASKED = {"model": "policy", "prompt": "3+4="}
MESSAGES = [{"role": "user", "content": "3+4="}]


@pytest.fixture(scope="module")
def server(byte_folder, byte_engine):
    """Server that takes the likeliest token; tests of this module share it."""
    config = make_serve_config(byte_folder, served_name="policy", allowed_hosts="ours")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # until it has started
            patch.setattr(policy, "load_served", reopen(byte_engine))
            patch.setattr(policy, "warm_up", lambda *args: None)
            server = stack.enter_context(serving(config))
        yield server
    assert server.error is None


@pytest.fixture
def gate(same_engine, monkeypatch):
    """Decoding goes on only while it is open; `gate.steps` grows with each step that has begun."""
    original, gate = same_engine.generate, threading.Event()
    gate.steps = []

    def generate(*args, **options):
        gate.steps.append(1)
        gate.wait(30)
        return original(*args, **options)

    monkeypatch.setattr(same_engine, "generate", generate)
    return gate


def ask(port: int, body=ASKED | {"max_tokens": 4}, **headers: str) -> http.client.HTTPResponse:
    body = json.dumps(body) if isinstance(body, dict) else body
    return connect(port, body, **headers).getresponse()


def send_half(port: int) -> http.client.HTTPConnection:
    """Connection after the beginning of a request's body."""
    half = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    half.putrequest("POST", "/v1/completions")
    half.putheader("Content-Length", "1000")
    half.putheader("Content-Type", "application/json")
    half.endheaders(b"{")
    return half


# --- access and limits of connections -------------------------------------------------------------


def test_connections_beyond_the_limit_get_503(byte_folder, same_engine):
    with http_serving(byte_folder, max_connections=2) as (served, _):
        address = ("127.0.0.1", served.http_port)
        with socket.create_connection(address), socket.create_connection(address):
            assert ask(served.http_port).status == 503


def test_a_body_that_does_not_arrive_gets_408(byte_folder, same_engine):
    with http_serving(byte_folder, request_seconds=0.3) as (served, _):
        answer = send_half(served.http_port).getresponse()
        assert answer.status == 408 and answer.headers["connection"] == "close"
        assert "not arrived within 0.3 s" in json.load(answer)["error"]["message"]


def test_only_json_of_known_hosts_and_origins_is_served(server, byte_folder, same_engine):
    for headers, status, message in read_table(__file__, "headers"):
        answer = ask(server.http_port, **headers)
        assert answer.status == status and message in answer.read().decode(), headers
    with http_serving(byte_folder, allowed_hosts="*") as (served, _):
        any_site = {"Host": "any.example", "Origin": "https://any.example"}
        assert ask(served.http_port, **any_site).status == 200


@pytest.mark.parametrize("from_file", [True, False])
def test_a_key_lets_in_those_who_have_it(
    byte_folder, same_engine, tmp_path, monkeypatch, from_file
):
    (tmp_path / "key").write_text("s3cret\n")
    settings = {"api_key_file": str(tmp_path / "key")} if from_file else {}
    if not from_file:
        monkeypatch.setenv("DAPO_API_KEY", "s3cret")
    with http_serving(byte_folder, **settings) as (served, client):
        answer = ask(served.http_port)
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.load(answer)["error"]["code"] == "invalid_api_key"
        for sent in "Bearer s3cre", "Bearer", "s3cret", "Bearer s3cret1", "Bearer \xe9":
            assert ask(served.http_port, Authorization=sent).status == 401
        assert ask(served.http_port, Authorization="Bearer s3cret").status == 200
        assert client.with_options(api_key="s3cret").models.list().data
        with pytest.raises(Exception, match="the key is missing or wrong"):
            client.models.list()


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "caf\xe9"])
def test_a_key_that_is_none_is_refused_and_not_shown(tmp_path, text):
    (tmp_path / "key").write_text(text)
    config = make_serve_config(tmp_path, api_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="must hold a key: one line") as refused:
        read_key(config.api_key_file, "api_key_file")
    assert text.strip() == "" or text.strip() not in str(refused.value)
    config.api_key_file = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="config.api_key_file = .*: can't be read"):
        read_key(config.api_key_file, "api_key_file")


def test_a_server_for_all_without_a_key_warns(byte_folder, same_engine, tmp_path, capsys):
    (tmp_path / "key").write_text("s3cret")
    for settings, warns in (
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key_file": str(tmp_path / "key")}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
    ):
        with serving(make_serve_config(byte_folder, **settings)) as served:
            assert served.http_port > 0
        assert (
            "warning: anyone who can reach 0.0.0.0 can use the server" in capsys.readouterr().err
        ) == warns


def test_only_this_machine_is_listened_to(server):
    others = [a[4][0] for a in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in {a for a in others if not a.startswith("127.")}:
        with pytest.raises(OSError):
            socket.create_connection((address, server.http_port), timeout=2)


def test_a_taken_port_is_named_before_a_model_is_loaded(server):
    port = server.http_port
    config = make_serve_config("no such folder", http_port=port)
    with pytest.raises(ConfigError, match=f"config.http_port = {port}: on 127.0.0.1: .*in use"):
        with serving(config):
            pass


# --- trouble --------------------------------------------------------------------------------------


def test_hostile_bodies_are_refused_and_the_server_lives(server):
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
    for body, message in bodies.items():
        answer = ask(server.http_port, body)
        assert answer.status in (400, 404, 413), body[:50]
        assert message in json.load(answer)["error"]["message"], body[:50]
    answer = ask(server.http_port, (b"x" * 100_000 for _ in range(50)))  # of no announced length
    assert answer.status == 413 and "at most" in json.load(answer)["error"]["message"]
    client = make_openai(server.http_port)
    assert client.completions.create(**ASKED).choices
    with pytest.raises(openai.BadRequestError, match="folder has no chat template"):
        client.chat.completions.create(model="policy", messages=MESSAGES)


def test_too_many_responses_at_once_are_refused_whole(byte_folder, byte_responses, gate):
    with http_serving(byte_folder, waiting=8) as (_, client), ThreadPoolExecutor(3) as pool:
        running = [pool.submit(client.completions.create, **ASKED, n=8)]
        while not gate.steps:
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
def test_a_client_that_leaves_frees_its_slots(byte_folder, byte_responses, gate, stream):
    with http_serving(byte_folder) as (server, client):
        leaving = connect(server.http_port, json.dumps(ASKED | {"n": 12, "stream": stream}))
        while not gate.steps:
            time.sleep(0.01)
        leaving.close()
        time.sleep(0.3)
        gate.set()
        answer = client.completions.create(model="policy", prompt="a")
        assert answer.choices[0].text == TOKENIZER.decode(byte_responses["a"])
        assert len(gate.steps) < 2 * BUDGET  # 12 responses by 4 slots take three times as many


def test_a_client_that_leaves_within_its_request_is_no_error(server, caplog):
    send_half(server.http_port).close()
    time.sleep(0.3)
    assert make_openai(server.http_port).completions.create(**ASKED).choices
    assert not [record for record in caplog.records if "uvicorn" in record.name]


def test_a_stop_frees_the_slot(byte_folder, byte_responses, gate):
    gate.set()
    stop = TOKENIZER.decode(byte_responses["3+4="])[1]
    with http_serving(byte_folder) as (_, client):
        assert client.completions.create(**ASKED, stop=stop).choices[0].finish_reason == "stop"
        time.sleep(0.3)
    assert len(gate.steps) < BUDGET


def test_running_requests_end_before_the_server_leaves(byte_folder, byte_responses, gate):
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


def test_requests_that_take_too_long_are_cut_off_when_the_server_leaves(byte_folder, gate):
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


# --- budgets -------------------------------------------------------------------------------------


def test_the_longest_prompt_is_answered_whole(server):
    ids = TOKENIZER.encode("0123456789abcdefghij")
    create = make_openai(server.http_port).completions.create
    wanted = TOKENIZER.decode(likeliest(ids, 4))
    for prompt in "0123456789abcdefghij", ids:
        assert create(model="policy", prompt=prompt, max_tokens=4).choices[0].text == wanted


AUTO = {"max_prompt_tokens": -1, "max_response_tokens": -1}


@pytest.fixture
def model(byte_folder, tmp_path):
    """Copies of a model folder with another context."""

    def make(context) -> str:
        for path in byte_folder.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        described = json.loads((byte_folder / "config.json").read_text())
        described["max_position_embeddings"] = context
        (tmp_path / "config.json").write_text(json.dumps(described))
        return str(tmp_path)

    return make


def test_budgets_are_those_of_the_context(model, one_device, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: 1e12)
    for context, settings, wanted in read_table(__file__, "budgets"):
        config = make_serve_config(model(context), **settings)
        resolved, whole = policy.resolve(config, BYTES_DECODER, one_device)
        budgets = resolved.max_prompt_tokens, resolved.max_response_tokens
        assert (*budgets, whole) == wanted, (context, settings)


def test_budgets_are_halved_until_all_slots_fit(model, one_device, monkeypatch):
    config = make_serve_config(model(16_384), **AUTO)
    seen = set()
    for room in (1e12, 1e9, 1e8, 1e7, 1e5):
        monkeypatch.setattr(memory, "available_bytes", lambda mesh, room=room: room)
        resolved, whole = policy.resolve(config, BYTES_DECODER, one_device)
        taken = sum(policy.memory_needs(resolved, BYTES_DECODER, one_device).values())
        assert taken <= room / 2 or whole == 1024  # no shorter one is made
        seen.add(whole)
    assert max(seen) == 16_384 and len(seen) >= 3


def test_a_budget_beyond_the_context_is_refused(model, one_device):
    config = make_serve_config(model(100), **AUTO | {"max_response_tokens": 100})
    with pytest.raises(ConfigError, match="max_response_tokens = 100: must be below the context"):
        policy.resolve(config, BYTES_DECODER, one_device)


@pytest.mark.usefixtures("alone")
def test_prompt_and_response_share_the_context(model, monkeypatch):
    with http_serving(model(600), **AUTO) as (served, client):
        create = client.completions.create
        answer = create(model="policy", prompt=[65] * 590, extra_body={"return_token_ids": True})
        assert answer.usage.completion_tokens <= 10
        with pytest.raises(openai.BadRequestError, match="from 1 to 10 after a prompt of 590"):
            create(model="policy", prompt=[65] * 590, max_tokens=11)
        with pytest.raises(openai.BadRequestError, match="must have from 1 to 599"):
            create(model="policy", prompt=[65] * 600, max_tokens=1)
        # Caches that have grown for it give the same answers, and so do those that shrink again.
        long = create(model="policy", prompt="3+4=", max_tokens=580, temperature=1.0, seed=3)
        again = create(model="policy", prompt="3+4=", max_tokens=580, temperature=1.0, seed=3)
        short = create(model="policy", prompt="3+4=", max_tokens=5, temperature=1.0, seed=3)
        assert long.choices[0].text == again.choices[0].text
        assert short.choices[0].text and long.choices[0].text.startswith(short.choices[0].text)
        long_prompt = [65 + i % 26 for i in range(500)]
        answers = {create(model="policy", prompt=long_prompt, max_tokens=90).choices[0].text}
        answers |= {create(model="policy", prompt=long_prompt, max_tokens=90).choices[0].text}
        assert len(answers) == 1
    assert served.error is None


@pytest.mark.slow
def test_the_command_answers_thirty_two_clients_and_leaves_on_sigterm():
    """With the greedy responses of `sample`."""
    model, port = "dapo_jax:arithmetic_base", free_port()
    flags = [f"--http_port={port}", "--temperature=0", "--slots=8", "--max_response_tokens=24"]
    command = [sys.executable, "-m", "dapo_jax", "serve", model, *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert f":{port}/v1" in process.stdout.readline()
        create = functools.partial(make_openai(port).completions.create, model="arithmetic_base")
        prompts = [make_problem("heldout", 0, i, 2, 3).text for i in range(32)]
        with ThreadPoolExecutor(32) as pool:
            replies = pool.map(lambda prompt: create(prompt=prompt), prompts)
            texts = [reply.choices[0].text for reply in replies]
        own = dapo_jax.sample(model, prompts, temperature=0, max_response_tokens=24)
        assert texts == [response.text for (response,) in own]
        assert [choice.text for choice in create(prompt=prompts).choices] == texts
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
