"""A server under rude clients for seconds, for hours by `soak_server.py`; and a long run."""

import os
import sys

import pytest
from served import make_serve_config, serving
from small_runs import make_quick_config
from soak_server import MAX_GROWTH, MODEL, Clients, Held, soak

from dapo_jax.config.experiment import Checkpoint, Evaluation, Log, Rollout
from dapo_jax.run.run import train


@pytest.fixture
def port(byte_folder, same_engine):
    """That of a server whose threads change places at every chance."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        config = make_serve_config(byte_folder, served_name=MODEL)
        with serving(config) as server:
            yield server.http_port
        assert server.error is None
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
def test_a_server_outlives_rude_clients_and_answers_the_others(port, capsys):
    clients = Clients(port, seed=0)
    soak(os.getpid(), clients, range(80), threads=2, every=40)
    assert clients.said.count("rude") > 2 and len(set(clients.said)) == 5
    assert "80 requests" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_two_thousand_steps_hold_no_more_than_four_hundred(base, tmp_path):
    """With all that is written: checkpoints, responses, TensorBoard. `pytest -s` shows them."""
    held: dict[int, Held] = {}

    def look(step, _):
        if step % 200 == 0:
            held[step] = Held.by(os.getpid())
            print(step, held[step])

    config = make_quick_config(
        base,
        tmp_path / "run",
        total_steps=2000,
        rollout=Rollout(4, 4, 2, max_sample_rounds=2, when_starved="partial"),
        checkpoint=Checkpoint(every_steps=10),
        evaluation=Evaluation(every_steps=50, samples_per_problem=2),
        log=Log(show_group_every_steps=0, report=False),
    )
    config.data.heldout_problems = 16
    assert train(config, look)["steps"] == 2000
    early, late = held[400], held[2000]
    # They vary by so many.
    assert late.threads <= early.threads + 3 and late.files <= early.files + 8
    assert late.memory < early.memory + MAX_GROWTH
