"""Samplers in other processes change nothing: groups, tokens, parameters, bit for bit."""

import collections
import contextlib
import errno
import random
import signal
import threading
import time
import urllib.error
import urllib.request

import jax.numpy as jnp
import pytest
from conftest import make_prompt
from kept_groups import same_run
from remote_runs import SECONDS, make_remote, processes_of
from remote_samplers import IDENTITY, Proxy, remote_sampler, url_of
from scripted_sampler import ScriptedSampler

from dapo_jax.extras.samplers import command
from dapo_jax.extras.samplers.lease_server import EXCHANGE, LeaseServer
from dapo_jax.extras.samplers.leases import Leases, Session, Task
from dapo_jax.extras.samplers.settings import SamplerConfig, SamplersSettings
from dapo_jax.extras.samplers.weight_versions import WeightVersions
from dapo_jax.rollout import group_format
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.rollout.source import RolloutSource
from dapo_jax.run.loop import train
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import RolloutKey, SamplingRule

# --- messages ------------------------------------------------------------------------------------


@pytest.fixture
def server():
    warnings: list[str] = []
    leases = Leases((20, 6), seconds=60.0)
    made = LeaseServer(leases, IDENTITY, SamplersSettings(port=0), "a key", warnings.append)
    made.warnings = warnings
    yield made
    made.close()


@contextlib.contextmanager
def worker_of(server, tmp_path, identity=IDENTITY, key="a key"):
    file = tmp_path / "key"
    file.write_text(key)
    config = SamplerConfig(trainer=url_of(server), key_file=str(file))
    worker = command.Worker(config, identity, 3600.0, ScriptedSampler(lambda index: 1), None)
    yield worker
    die(worker)


def test_a_sampler_is_refused_by_name_and_without_the_key(server, tmp_path):
    with worker_of(server, tmp_path) as worker:
        assert worker.exchange() and worker.tasks == {}
    other = {"dapo_jax's code": "that of last week"}
    named = "dapo_jax's code = 'that of last week', but the trainer has 'that of these tests'"
    with worker_of(server, tmp_path, other) as worker, pytest.raises(ConfigError, match=named):
        worker.exchange()
    assert named in server.warnings[0]
    with worker_of(server, tmp_path, key="b key") as worker:
        with pytest.raises(ConfigError, match="the key is missing or wrong"):
            worker.exchange()


def test_a_sampler_that_gives_an_impossible_answer_ends_and_loses_its_leases(server, tmp_path):
    leases, session = server._leases, Session(RolloutKey(0), SamplingRule(), "digest")
    leases.open(session)
    leases.add(task := Task(session, make_prompt(0, [3]), (0, 1)))
    with worker_of(server, tmp_path) as worker:
        worker._room = 8
        assert worker.exchange() and [*worker.tasks] == [task.key]
        worker._answers[task.key] = ()
        with pytest.raises(ConfigError, match=r"an answer is none: samples \(\), not \(0, 1\)"):
            worker.exchange()
    assert leases.lease("another", 2) == [task]


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
    monkeypatch.setattr("dapo_jax.extras.samplers.lease_server.MAX_BYTES", LIMIT)
    headers = {"Authorization": "Bearer a key"}
    request = urllib.request.Request(url_of(server) + EXCHANGE, MESSAGES[name], headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as refused:
        opener.open(request, timeout=30)
    assert refused.value.code == 400 and len(server.warnings) == 1


# --- faults, with samplers that need no model -----------------------------------------------------


def remote_scripted(count, **options):
    """A sampler whose groups `count` scripted samplers draw; the first one is the trainer's."""
    scripted = [ScriptedSampler(lambda index: 1 + index % 3, slots=8) for _ in range(count + 1)]
    load = lambda params: {"kernel": jnp.full(1000, params)}  # noqa: E731
    return scripted, remote_sampler(scripted, (20, 6), load, slots=8, **options)


def draw(remote, step, count):
    """Draw the groups of a step, check each, and return the metrics of its leases."""
    remote.begin(float(step), RolloutKey(SAMPLE_FOR_TRAINING, step, step), SamplingRule())
    for index in range(count):
        remote.submit(make_prompt(index, [3]), 2)
    finished, last = [], time.monotonic() + SECONDS
    while not remote.idle:
        finished += remote.step()
        assert time.monotonic() < last
    pairs = [
        (request.prompt.index, [d.tokens.tolist() for d in done]) for request, done in finished
    ]
    assert sorted(pairs) == [(i, [[5] * (1 + i % 3) + [1]] * 2) for i in range(count)]
    return remote.counts.others or collections.Counter()


@pytest.mark.slow
def test_fifty_samplers_draw_each_group_once(monkeypatch):
    """Engines of three hang once they hold leases: others draw their groups."""
    scripted, opened = remote_scripted(50, seconds=3.0, stall_seconds=1.0)
    ended = threading.Event()
    for hanging in scripted[1:4]:
        monkeypatch.setattr(hanging, "step", lambda: ended.wait() and [])
    with opened as remote, contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        counts = draw(remote, 0, 300)
    drawn = collections.Counter(i for other in scripted[4:] for i in other.submitted)
    assert set(drawn) == set(range(300)) and counts["remote_groups"] == 300
    assert 0 < counts["remote_expired_leases"] >= drawn.total() - 300
    assert all(other.submitted for other in scripted[1:])


@pytest.mark.slow
@pytest.mark.parametrize("passes", [0.7, 0.95])
def test_cut_connections_lose_no_group(passes):
    rng = random.Random(0)
    proxies = []

    def route(server):
        proxies.append(Proxy(server.port, lambda: rng.random() < passes))
        return f"http://127.0.0.1:{proxies[0].port}"

    scripted, opened = remote_scripted(3, route=route)
    with opened as remote, contextlib.closing(proxies[0]):
        for step in range(3):
            draw(remote, step, 40)
    assert proxies[0].cuts > 3
    assert sum(len(other.submitted) for other in scripted) == 3 * 40  # none is drawn again


def test_clocks_off_by_a_day_end_no_lease(monkeypatch):
    """Only the trainer's monotonic clock counts."""
    real, rng = time.time, random.Random(0)
    monkeypatch.setattr(time, "time", lambda: real() + rng.choice((-1, 1)) * 86_400)
    _, opened = remote_scripted(3)
    with opened as remote:
        counts = draw(remote, 0, 40)
    assert counts["remote_groups"] == 40 and counts["remote_expired_leases"] == 0


def test_a_full_disk_makes_the_trainer_sample_the_step(monkeypatch, capsys):
    write, steps = WeightVersions.write, iter([False, True, False])

    def fail(versions, arrays):
        if next(steps):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(versions, arrays)

    monkeypatch.setattr(WeightVersions, "write", fail)
    scripted, opened = remote_scripted(2)
    with opened as remote:
        drawn = [
            (draw(remote, step, 20)["remote_groups"], len(scripted[0].submitted))
            for step in range(3)
        ]
    assert drawn == [(20, 0), (0, 20), (20, 20)]
    assert capsys.readouterr().out == (
        "the weights of step 1 can't be written: No space left on device\n"
    )


def test_a_version_that_is_damaged_under_samplers_is_written_again(monkeypatch):
    _, opened = remote_scripted(2)
    read, is_damaged = WeightVersions.read, threading.Event()

    def damage_first(versions, version):
        if not is_damaged.is_set():
            is_damaged.set()
            (versions._folder / version).write_bytes(b"?")
        return read(versions, version)

    monkeypatch.setattr(WeightVersions, "read", damage_first)
    with opened as remote:
        assert draw(remote, 0, 20)["remote_groups"] == 20


# --- runs in this process -----------------------------------------------------------------------


prefetch = RolloutSource.prefetch


class Killed(BaseException):
    pass


def kill_in_second_step(source, state, step):
    if step == 1:  # no checkpoint has what was made ahead
        raise Killed
    return prefetch(source, state, step)


def test_a_killed_trainer_and_two_samplers_of_which_one_dies_change_nothing(
    tiny_folder, score_folder, tmp_path, alone, monkeypatch
):
    folders = tiny_folder, score_folder
    changes = {"total_steps": 3, "staleness": 1}
    train(make_remote(folders, tmp_path / "whole", engine="own", **changes))
    config = make_remote(folders, tmp_path / "run", **changes)
    config.extras.samplers.lease_seconds = 1.0
    trainer = f"http://127.0.0.1:{config.extras.samplers.port}"
    monkeypatch.setattr(command.Worker, "close", die)
    stopped = threading.Event()
    bursts = iter(range(30))
    ends = [lambda: next(bursts, None) is None, stopped.is_set]  # one after a few bursts
    threads = []
    for should_stop in ends:
        arguments = SamplerConfig(run=config.run_dir, trainer=trainer), should_stop
        threads.append(threading.Thread(target=command.sample, args=arguments))
        threads[-1].start()
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(RolloutSource, "prefetch", kill_in_second_step)
        train(config)
    train(config)
    stopped.set()
    for thread in threads:
        thread.join()
    assert next(bursts, None) is None
    assert same_run(tmp_path / "run", tmp_path / "whole") == []


def die(worker):
    """End a sampler as a kill does: it says nothing more."""
    worker._stopped.set()
    worker._thread.join()


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
            config = make_remote(folders, trained[key], setting, staleness, engine="own")
            with processes_of(config) as processes:
                assert processes.train().wait(SECONDS) == 0
        return trained[key]

    return train_alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "staleness", "count"),
    [("plain", 4, 3), ("turns", 1, 2), ("adapters", 2, 2), ("bfloat16", 1, 1), ("pages", 1, 2)],
)
def test_any_number_of_samplers_makes_the_same_run(
    setting, staleness, count, folders, whole, tmp_path
):
    config = make_remote(folders, tmp_path / "run", setting, staleness)
    with processes_of(config) as processes:
        trainer = processes.train()
        for _ in range(count):
            processes.add_sampler()
        assert trainer.wait(SECONDS) == 0, processes.output()
        for child in processes.samplers:
            assert child.wait(60) == 0  # they end with the run
    assert same_run(tmp_path / "run", whole(setting, staleness)) == []


# What happens to a run of these steps, in random order; the last "freeze" is as long as a minute.
FEW = 4, {"kill": 2, "kill the trainer": 1, "damage": 1}
MANY = 12, {"kill": 50, "kill the trainer": 20, "freeze": 8, "damage": 12}


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "counts"), [FEW, MANY])
def test_kills_stops_cuts_and_damage_change_nothing(steps, counts, folders, tmp_path):
    """Samplers are killed and replaced, or frozen beyond their lease; the trainer is killed.

    A proxy cuts connections; files of weights are cut, changed and deleted under the samplers.
    The proxy also spreads the actions over the steps: it lets no more steps pass.
    """
    config = make_remote(folders, tmp_path / "run", total_steps=steps)
    rng = random.Random(0)
    actions = [name for name, count in counts.items() for _ in range(count)]
    rng.shuffle(actions)
    done = collections.Counter()
    stopped_at = 0
    with processes_of(config) as processes:

        def may_pass() -> bool:
            share = done.total() / sum(counts.values())
            early = finished_steps(tmp_path / "run") > (steps - 4) * share  # the last need samplers
            return not (actions and early) and rng.random() < 0.98

        proxy = Proxy(config.extras.samplers.port, may_pass)
        port = proxy.port
        trainer = processes.train()
        for _ in range(3):
            processes.add_sampler(port)
        while trainer.poll() is None:
            time.sleep(rng.uniform(1, 8))
            running = [child for child in processes.samplers if child.poll() is None]
            if trainer.poll() is not None or not running or not actions:
                continue
            progress = written(tmp_path / "run")
            if actions[-1] == "kill the trainer" and progress == stopped_at:
                actions.insert(0, actions.pop())  # later, so that the run ends
            match action := actions.pop():
                case "kill":
                    rng.choice(running).kill()
                    processes.add_sampler(port)
                case "freeze":
                    last = done[action] == counts[action] - 1
                    seconds = 60 if last else 2 * config.extras.samplers.lease_seconds
                    stop_for(rng.choice(running), seconds)
                case "damage":
                    damage(tmp_path / "run" / "weights", rng)
                case _:
                    stopped_at = progress
                    trainer.kill()
                    trainer.wait()
                    trainer = processes.train()
            done[action] += 1
        proxy.close()
        assert trainer.wait() == 0, processes.output()
    print(done, proxy.cuts, "cut")
    assert done == counts
    alone = make_remote(folders, tmp_path / "alone", engine="own", total_steps=steps)
    with processes_of(alone) as processes:
        assert processes.train().wait(SECONDS) == 0
    assert same_run(tmp_path / "run", tmp_path / "alone") == []


def finished_steps(run_dir) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def written(run_dir) -> int:
    """Return a number that changes with every step and every file of scored groups."""
    groups = sorted(path.name for path in run_dir.glob("groups/*/*"))
    return hash((*groups, *sorted(path.name for path in run_dir.glob("checkpoints/*"))))


def stop_for(child, seconds: float) -> None:
    child.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    child.send_signal(signal.SIGCONT)


def damage(weights, rng) -> None:
    """Cut, change or delete a file of a version."""
    for file in list(weights.glob("*"))[-1:]:
        with contextlib.suppress(OSError):  # the trainer has just removed it
            content = file.read_bytes()
            changed = content[:-3] if rng.random() < 0.5 else b"?" + content[1:]
            file.unlink() if rng.random() < 0.3 else file.write_bytes(changed)
