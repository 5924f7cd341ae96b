"""Ports and budgets of a served policy."""

import contextlib
import json
import socket

import openai
import pytest
from row_files import read_table
from served import (
    BYTES_DECODER,
    TOKENIZER,
    http_serving,
    likeliest,
    make_openai,
    make_serve_config,
    reopen,
    serving,
)

from dapo_jax.extras.serve import policy
from dapo_jax.run import memory
from dapo_jax.types.errors import ConfigError


@pytest.fixture(scope="module")
def server(byte_folder, byte_engine):
    """Server that takes the likeliest token."""
    config = make_serve_config(byte_folder, served_name="policy")
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # until it has started
            patch.setattr(policy, "load_served", reopen(byte_engine))
            server = stack.enter_context(serving(config))
        yield server


def test_the_longest_prompt_is_answered_whole(server):
    ids = TOKENIZER.encode("0123456789abcdefghij")
    ask = make_openai(server.http_port).completions.create
    wanted = TOKENIZER.decode(likeliest(ids, 4))
    for prompt in "0123456789abcdefghij", ids:
        assert ask(model="policy", prompt=prompt, max_tokens=4).choices[0].text == wanted


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


def test_a_start_prints_that_it_compiles(byte_folder, byte_engine, monkeypatch, capfd):
    monkeypatch.setattr(policy, "load_served", reopen(byte_engine))
    with serving(make_serve_config(byte_folder)):
        slots = byte_engine.engine.max_concurrent_decodes
        assert f"compiling for {slots} slots: " in capfd.readouterr().err


# --- budgets -------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("context", "settings", "wanted"), read_table(__file__, "budgets"))
def test_budgets_are_those_of_the_context(
    model, one_device, monkeypatch, context, settings, wanted
):
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: 1e12)
    config = make_serve_config(model(context), **settings)
    resolved, context = policy.resolve(config, BYTES_DECODER, one_device)
    budgets = resolved.max_prompt_tokens, resolved.max_response_tokens
    assert (*budgets, context) == wanted


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
        ask = client.completions.create
        answer = ask(model="policy", prompt=[65] * 590, extra_body={"return_token_ids": True})
        assert answer.usage.completion_tokens <= 10
        with pytest.raises(openai.BadRequestError, match="from 1 to 10 after a prompt of 590"):
            ask(model="policy", prompt=[65] * 590, max_tokens=11)
        with pytest.raises(openai.BadRequestError, match="must have from 1 to 599"):
            ask(model="policy", prompt=[65] * 600, max_tokens=1)
        # Caches that have grown for it give the same answers, and so do those that shrink again.
        long = ask(model="policy", prompt="3+4=", max_tokens=580, temperature=1.0, seed=3)
        again = ask(model="policy", prompt="3+4=", max_tokens=580, temperature=1.0, seed=3)
        short = ask(model="policy", prompt="3+4=", max_tokens=5, temperature=1.0, seed=3)
        assert long.choices[0].text == again.choices[0].text
        assert short.choices[0].text and long.choices[0].text.startswith(short.choices[0].text)
        long_prompt = [65 + i % 26 for i in range(500)]
        answers = {ask(model="policy", prompt=long_prompt, max_tokens=90).choices[0].text}
        answers |= {ask(model="policy", prompt=long_prompt, max_tokens=90).choices[0].text}
        assert len(answers) == 1
    assert served.error is None
