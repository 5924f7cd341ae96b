"""Samplers in other processes change nothing: groups, tokens, parameters, bit for bit."""

import collections
import contextlib
import random
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from kept_groups import same_run
from remote_runs import SECONDS, make_remote, processes_of
from remote_samplers import IDENTITY, url_of

from dapo_jax.commands import sampler
from dapo_jax.config.experiment import Sampler, SamplerConfig
from dapo_jax.rollout import group_format
from dapo_jax.rollout.leases import AnswerLimits, Leases
from dapo_jax.run.lease_server import EXCHANGE, LeaseServer
from dapo_jax.run.run import train
from dapo_jax.runtime.settings import ConfigError

# --- messages ------------------------------------------------------------------------------------


@pytest.fixture
def server():
    warnings: list[str] = []
    leases = Leases(AnswerLimits(20, 6), seconds=60.0)
    made = LeaseServer(leases, IDENTITY, Sampler(port=0), "a key", warnings.append)
    made.warnings = warnings
    yield made
    made.close()


@contextlib.contextmanager
def client_of(server, tmp_path, identity=IDENTITY, key="a key"):
    file = tmp_path / "key"
    file.write_text(key)
    config = SamplerConfig(trainer=url_of(server), key_file=str(file))
    client = sampler.TrainerClient(config, identity, lease_seconds=3600.0)
    yield client
    client._stopped.set()
    client._thread.join()


def test_a_sampler_is_refused_by_name_and_without_the_key(server, tmp_path):
    with client_of(server, tmp_path) as client:
        assert client.exchange(0) and client.tasks == {}
    other = {"dapo_jax's code": "that of last week"}
    named = "dapo_jax's code = 'that of last week', but the trainer has 'that of these tests'"
    with client_of(server, tmp_path, other) as client, pytest.raises(ConfigError, match=named):
        client.exchange(0)
    assert named in server.warnings[0]
    with client_of(server, tmp_path, key="b key") as client:
        with pytest.raises(ConfigError, match="the key is missing or wrong"):
            client.exchange(0)


LIMIT = 10_000
MESSAGES = {
    "nothing": b"",
    "no JSON": b"{}",
    "a list": group_format.dump([1]),
    "no list of keys": group_format.dump(
        {"sampler": "a", "held": [[1]], "room": 1, "answers": [], "identity": IDENTITY}
    ),
    "a bomb": group_format.dump(" " * 2 * LIMIT),
    "half a message": group_format.dump({"sampler": "a"})[:-4],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_none_is_refused(name, server, monkeypatch):
    monkeypatch.setattr("dapo_jax.run.lease_server.MAX_BYTES", LIMIT)
    headers = {"Authorization": "Bearer a key"}
    request = urllib.request.Request(url_of(server) + EXCHANGE, MESSAGES[name], headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(request, timeout=30)
    assert refused.value.code == 400 and len(server.warnings) == 1


# --- runs in this process -----------------------------------------------------------------------


def test_two_samplers_of_which_one_dies_change_nothing(
    tiny_folder, score_folder, tmp_path, alone, monkeypatch
):
    folders = tiny_folder, score_folder
    changes = {"total_steps": 3, "staleness": 1}
    train(make_remote(folders, tmp_path / "whole", remote="none", **changes))
    config = make_remote(folders, tmp_path / "run", **changes)
    config.sampler.lease_seconds = 1.0
    trainer = f"http://127.0.0.1:{config.sampler.port}"
    monkeypatch.setattr(sampler.TrainerClient, "close", die)
    stopped = threading.Event()
    bursts = iter(range(30))
    ends = [lambda: next(bursts, None) is None, stopped.is_set]  # one after a few bursts
    threads = []
    for should_stop in ends:
        arguments = SamplerConfig(run=config.run_dir, trainer=trainer), should_stop
        threads.append(threading.Thread(target=sampler.sample, args=arguments))
        threads[-1].start()
    train(config)
    stopped.set()
    for thread in threads:
        thread.join()
    assert next(bursts, None) is None
    assert same_run(tmp_path / "run", tmp_path / "whole") == []


def die(client):
    """End a sampler as a kill does: it says nothing more."""
    client._stopped.set()
    client._thread.join()


# --- runs of several processes ------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tiny_folder, score_folder):
    return tiny_folder, score_folder


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """Trains a setting alone, once; returns the folder of the run."""
    trained = {}

    def train_alone(setting="plain", staleness=2):
        key = setting, staleness
        if key not in trained:
            trained[key] = tmp_path_factory.mktemp("alone") / "run"
            config = make_remote(folders, trained[key], setting, staleness, remote="none")
            with processes_of(config) as processes:
                assert processes.train().wait(SECONDS) == 0
        return trained[key]

    return train_alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "staleness", "remote", "count"),
    [
        ("plain", 1, "only", 1),
        ("plain", 2, "also", 2),
        ("plain", 4, "only", 3),
        ("turns", 1, "only", 2),
        ("adapters", 2, "only", 2),
        ("bfloat16", 1, "only", 1),
        ("pages", 1, "only", 2),
    ],
)
def test_any_number_of_samplers_makes_the_same_run(
    setting, staleness, remote, count, folders, whole, tmp_path
):
    config = make_remote(folders, tmp_path / "run", setting, staleness, remote)
    with processes_of(config) as processes:
        trainer = processes.train()
        for _ in range(count):
            processes.add_sampler()
        assert trainer.wait(SECONDS) == 0, processes.output()
        for child in processes.samplers:
            assert child.wait(60) == 0  # they end with the run
    assert same_run(tmp_path / "run", whole(setting, staleness)) == []


@pytest.mark.slow
def test_kills_stops_and_damage_change_nothing(folders, tmp_path):
    """Samplers are killed and replaced, one is frozen beyond its lease, the trainer is killed.

    Files of weights are cut, changed and deleted under the samplers.
    """
    config = make_remote(folders, tmp_path / "run", total_steps=12)
    rng = random.Random(0)
    done = collections.Counter()
    with processes_of(config) as processes:
        trainer = processes.train()
        for _ in range(3):
            processes.add_sampler()
        while trainer.poll() is None:
            time.sleep(rng.uniform(2, 20))
            running = [child for child in processes.samplers if child.poll() is None]
            action = rng.choice(("kill", "stop", "trainer", "damage"))
            if trainer.poll() is not None or not running or done.total() == 60:
                continue
            if action == "kill":
                rng.choice(running).kill()
                processes.add_sampler()
            elif action == "stop":
                stop_for(rng.choice(running), 2 * config.sampler.lease_seconds)
            elif action == "trainer":
                trainer.kill()
                trainer.wait()
                trainer = processes.train()
            else:
                damage(tmp_path / "run" / "weights", rng)
            done[action] += 1
        assert trainer.wait() == 0, processes.output()
    print(done)
    alone = make_remote(folders, tmp_path / "alone", remote="none", total_steps=12)
    with processes_of(alone) as processes:
        assert processes.train().wait(SECONDS) == 0
    assert same_run(tmp_path / "run", tmp_path / "alone") == []


def stop_for(child, seconds: float) -> None:
    child.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    child.send_signal(signal.SIGCONT)


def damage(weights, rng) -> None:
    """Cut, change or delete the files of a version."""
    for file in list(weights.rglob("*.bin"))[-1:]:
        with contextlib.suppress(OSError):  # the trainer has just removed it
            content = file.read_bytes()
            if rng.random() < 0.3:
                shutil.rmtree(file.parent)
            else:
                changed = content[:-3] if rng.random() < 0.5 else b"?" + content[1:]
                file.write_bytes(changed)
