"""Access control: content type, hosts, origins, API keys, and limits of connections."""

import http.client
import json
import socket

import pytest
from row_files import read_table
from served import connect, http_serving, make_serve_config, serving

from dapo_jax.runtime.keys import read_key
from dapo_jax.types.errors import ConfigError

ASKED = {"model": "policy", "prompt": "3+4=", "max_tokens": 4}


def ask(port: int, **headers: str) -> int:
    """Status of a good request."""
    return connect(port, json.dumps(ASKED), **headers).getresponse().status


def test_an_idle_connection_is_closed_after_its_time(byte_folder, same_engine):
    with http_serving(byte_folder, idle_seconds=0.5) as (served, _):
        kept = connect(served.http_port, json.dumps(ASKED))
        assert kept.getresponse().read()
        kept.sock.settimeout(30)
        assert kept.sock.recv(1) == b""


def test_connections_beyond_the_limit_get_503(byte_folder, same_engine):
    with http_serving(byte_folder, max_connections=2) as (served, _):
        address = ("127.0.0.1", served.http_port)
        with socket.create_connection(address), socket.create_connection(address):
            assert ask(served.http_port) == 503


def test_a_body_that_does_not_arrive_gets_408(byte_folder, same_engine):
    with http_serving(byte_folder, request_seconds=0.3) as (served, _):
        half = http.client.HTTPConnection("127.0.0.1", served.http_port, timeout=30)
        half.putrequest("POST", "/v1/completions")
        half.putheader("Content-Length", "1000")
        half.putheader("Content-Type", "application/json")
        half.endheaders(b"{")
        answer = half.getresponse()
        assert answer.status == 408 and answer.headers["connection"] == "close"
        assert "not arrived within 0.3 s" in json.load(answer)["error"]["message"]


@pytest.mark.parametrize(("headers", "status", "message"), read_table(__file__, "headers"))
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
