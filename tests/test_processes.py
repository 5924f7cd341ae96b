"""Two processes (four, in the slow tests) do what one does, and none outlives another."""

import os
import signal
import sys
import time

import jax
import numpy as np
import pytest
from several import GONE_SECONDS, Several, start_training
from small_runs import make_config, read_rollouts, read_rows

from dapo_jax import processes
from dapo_jax.checkpoints import Checkpoints
from dapo_jax.experiment.config import Checkpoint
from dapo_jax.experiment.settings import ConfigError
from dapo_jax.parts import build
from dapo_jax.watch import DEAD

STEPS = 3
# Four devices in all, however many processes. A part of the reward asks worker processes.
SMALL = """
    total_steps=3,
    mesh=Mesh(2, 2, 1),
    data=Data(min_terms=2, max_terms=3, max_prompt_tokens=8, heldout_problems=6),
    rollout=Rollout(prompts_per_step=4, samples_per_prompt=4, updates_per_rollout=2),
    sampler=Sampler(slots=16, burst_tokens=8, max_response_tokens=24),
    packing=Packing(row_tokens=64, rows_per_microbatch=4),
    reward=Reward(parts="rule=1,think_format=0.1", workers=1),
    evaluation=Evaluation(every_steps=0, samples_per_problem=2, top_p=1.0),
    log=Log(tensorboard=False, show_group_every_steps=0),
"""
QUICK = "from dapo_jax import watch; watch.SILENCE_SECONDS = 4.0\n"  # than fifteen
AFTER_STEP_2 = """
from dapo_jax.reporting.progress import Progress
shown = Progress.step
def step(self, number, *rest):
    shown(self, number, *rest)
    if number == 2 and INDEX == VICTIM:
        os.kill(os.getpid(), signal.SIGNAL)
Progress.step = step
"""
IN_BURST = """
from dapo_jax import filtering
read, bursts = filtering._Collection.read_verdicts, []
def read_and_send(self, judge):
    bursts.append(1)
    if len(bursts) == 2 and INDEX == VICTIM:
        os.kill(os.getpid(), signal.SIGNAL)
    read(self, judge)
filtering._Collection.read_verdicts = read_and_send
"""


def send(where: str, name: str, victim: int) -> str:
    return where.replace("SIGNAL", name).replace("VICTIM", str(victim))


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Children find what an earlier one has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def final_state(base, run_dir):
    """Parameters and moments of the newest checkpoint, read by this process on eight devices."""
    parts = build(make_config(base, run_dir))
    with Checkpoints(run_dir, Checkpoint()) as checkpoints:
        state, record = checkpoints.state(parts.learner.abstract_state), checkpoints.record()
    parts.close()
    return jax.device_get(state), {k: record[k] for k in ("step", "position", "kept_fraction")}


def assert_same_run(base, run_dir, other) -> None:
    """Same groups, tokens, verdicts and rewards; parameters and moments within 1e-5."""
    assert read_rollouts(run_dir) == read_rollouts(other)
    (state, record), (expected, expected_record) = (final_state(base, d) for d in (run_dir, other))
    assert record == expected_record and record["step"] == STEPS
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), state, expected)


def train(base, run_dir, count: int, **options: str) -> list:
    """The ends of `count` processes with four devices in all; none may fail."""
    ended = start_training(base, run_dir, count, 4 // count, changes=SMALL, **options).wait()
    assert [one.code for one in ended] == [0] * count, [one.err[-2000:] for one in ended]
    return ended


@pytest.fixture(scope="module")
def one(base, tmp_path_factory):
    """The run of one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    train(base, run_dir, 1)
    return run_dir


def test_two_processes_do_what_one_does_and_one_of_them_speaks(base, one, tmp_path):
    first, second = train(base, tmp_path / "run", 2)
    assert_same_run(base, tmp_path / "run", one)
    assert "held-out accuracy" in first.out
    assert all("Gloo" in line for line in second.out.splitlines())
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [0, 1, 2, 3]
    files = ("config.json", "summary.json", "curves.png", "metrics.jsonl")
    assert all((tmp_path / "run" / name).stat().st_size for name in files)
    assert not list((tmp_path / "run").glob(".dapo_jax.lock"))


def test_a_killed_process_takes_the_others_along_and_a_stopped_one_too(base, one, tmp_path):
    """SIGKILL to one, start again; SIGTERM to the other, start again alone: the same run."""
    run_dir = tmp_path / "run"
    patch = QUICK + send(AFTER_STEP_2, "SIGKILL", 1)
    ended = start_training(base, run_dir, 2, 2, changes=SMALL, patch=patch).wait()
    assert [one.code for one in ended] == [DEAD, -signal.SIGKILL], ended[0].err
    assert "error: process 1 (" in ended[0].err and "is dead or cut off" in ended[0].err
    ended = train(base, run_dir, 2, patch=send(IN_BURST, "SIGTERM", 1))
    assert "resuming" in ended[0].out and "stopped by SIGTERM after step" in ended[0].out
    done = len(read_rows(run_dir)) - 1
    assert done < STEPS
    (ended,) = train(base, run_dir, 1)
    assert f"after step {done}" in ended.out
    assert_same_run(base, run_dir, one)


def test_processes_with_other_settings_stop_at_the_start(base, tmp_path):
    patch = "config.optimizer.learning_rate = 2e-3 if INDEX else 1e-3"
    run = start_training(base, tmp_path / "run", 2, 2, changes=SMALL, patch=patch)
    said = "config.optimizer.learning_rate = 0.002 on process 1, but 0.001 on process 0"
    for i, ended in enumerate(run.wait()):
        assert ended.code == 2 and f"process {i}: error: {said}\n" in ended.err
        assert "Traceback" not in ended.err
    assert not (tmp_path / "run").exists()


AGREE = """
import sys
from dapo_jax import processes
from dapo_jax.experiment.settings import ConfigError
def work():
    me = processes.index()
    assert processes.agree("x" * (me * 5000), "long") == ["", "x" * 5000]
    assert processes.from_first(lambda: me, "first") == 0
    asked = []
    def ask(i):
        asked.append(i)
        if len(asked) == 3:
            raise ConfigError(f"piece {i} on {me}")
        return [i, me]
    assert processes.share_out([4, 7, 2], ask, "pieces") == [[0, 0], [1, 1], [2, 0]]
    assert asked == [[0, 2], [1]][me]
    try:
        processes.share_out([0, 2, 1], ask, "pieces")
    except ConfigError as error:
        assert str(error) == "piece 0 on 0", error
    else:
        raise AssertionError
    print("agreed", flush=True)
    processes.agree(0, "here" if me else "there")
sys.exit(processes.run(work))
"""


def test_what_one_process_finds_all_know_and_lost_ones_are_stopped(tmp_path):
    for i, ended in enumerate(Several(tmp_path, [sys.executable, "-c", AGREE], 2).wait()):
        assert "agreed" in ended.out and ended.code == 1
        assert (
            "at different places: ['there', 'here']" in ended.err and f"process {i}: " in ended.err
        )


def test_export_refuses_several_processes(tmp_path):
    command = [sys.executable, "-m", "dapo_jax.export", "--run=nothing", "--out=nothing"]
    for ended in Several(tmp_path, command, 2).wait():
        assert ended.code == 2
        assert "dapo_jax.export is the work of one process, but 2 were started" in ended.err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (("", "2", "0"), "DAPO_COORDINATOR = '': must be HOST:PORT"),
        (("here:0", "2", "0"), "DAPO_COORDINATOR = 'here:0'"),
        (("here:9", "", "0"), "DAPO_PROCESSES = '': must be a whole number above 0"),
        (("here:9", "two", "0"), "DAPO_PROCESSES = 'two'"),
        (("here:9", "2", "2"), "DAPO_PROCESS_ID = '2': must be from 0 to DAPO_PROCESSES - 1 = 1"),
        (("here:9", "2", ""), "DAPO_PROCESS_ID = ''"),
    ],
)
def test_wrong_variables_are_named(variables, message, monkeypatch, capsys):
    names = (processes.COORDINATOR, processes.PROCESSES, processes.PROCESS_ID)
    for name, value in zip(names, variables, strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        processes.read_environment()
    assert processes.run(lambda: 0) == 2 and message in capsys.readouterr().err


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", None)
    value = object()
    assert processes.agree(value, "x") == [value] and processes.from_first(lambda: 1, "x") == 1
    assert processes.share_out([5, 6], lambda i: i, "x") == [0, 1]
    processes.check_same(lambda: pytest.fail("asked"))


@pytest.mark.slow
def test_four_processes_do_what_one_does(base, one, tmp_path):
    train(base, tmp_path / "run", 4)
    assert_same_run(base, tmp_path / "run", one)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("where", [AFTER_STEP_2, IN_BURST], ids=["step", "burst"])
def test_four_processes_are_gone_within_the_bound(where, victim, base, one, tmp_path):
    """Process 0 runs the service that the others watch each other by."""
    run = start_training(
        base, tmp_path / "run", 4, 1, changes=SMALL, patch=send(where, "SIGKILL", victim)
    )
    run.children[victim].wait(240)
    killed = time.monotonic()
    ended = run.wait(GONE_SECONDS)
    print(f"gone after {time.monotonic() - killed:.1f} s")
    codes = [one.code for one in ended]
    assert codes[victim] == -signal.SIGKILL and codes.count(DEAD) == 3
    for i, survivor in enumerate(ended):
        assert i == victim or f"error: process {victim} (" in survivor.err
    train(base, tmp_path / "run", 2)  # a checkpoint of four
    assert_same_run(base, tmp_path / "run", one)
