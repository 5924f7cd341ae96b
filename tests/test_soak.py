"""A server under rude clients for seconds; `soak_server.py` does it for hours."""

import os
import sys

import pytest
from served import free_port, make_serve_config, serving
from soak_clients import MODEL, Clients
from soak_server import Progress, load, soak


@pytest.fixture
def ports(byte_folder, same_engine):
    """Those of a server whose threads change places at every chance."""
    interval, http_port = sys.getswitchinterval(), free_port()
    sys.setswitchinterval(1e-6)
    try:
        config = make_serve_config(byte_folder, http_port=http_port, served_name=MODEL)
        with serving(config) as server:
            yield server.client.port, http_port
        assert server.error is None
    finally:
        sys.setswitchinterval(interval)


def test_a_server_outlives_rude_clients_and_answers_the_others(ports, capsys):
    clients = Clients(ports, seed=0)
    soak(os.getpid(), clients, range(160), threads=2, every=40)
    assert clients.said.count("rude") > 5 and len(set(clients.said)) == 7
    assert "160 requests" in capsys.readouterr().out


def test_latencies_are_printed(ports, capsys):
    load(ports, [1, 3], seconds=0.2)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "clients",
        "1",
        "3",
    ]


def test_a_soak_goes_on_where_the_same_command_stopped(tmp_path):
    Progress(tmp_path / "build" / "soak.json", [100, 0]).note(40)
    assert Progress(tmp_path / "build" / "soak.json", [100, 0]).done == 40
    assert Progress(tmp_path / "build" / "soak.json", [100, 1]).done == 0
