"""Two processes (four, in the slow tests) do what one does, and none outlives another."""

import json
import os
import signal

import jax
import pytest
from kept_groups import used, without_costs
from row_files import read_table
from served import free_port
from several import (
    AT_THE_END,
    COMMAND,
    GONE_SECONDS,
    IN_STEP_2,
    Several,
    assert_same_run,
    final_states,
    send,
    start_training,
    train_alone,
    train_with,
)
from small_runs import equal, read_rows

from dapo_jax.extras.samplers.weight_versions import KEPT
from dapo_jax.runtime import processes
from dapo_jax.runtime.processes import PEER_LOST
from dapo_jax.types.errors import ConfigError

# Exit codes after another process was lost: a failed collective, or JAX's abort.
LOST = {PEER_LOST, -signal.SIGABRT}
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.parametrize(("variables", "message"), read_table(__file__, "variables"))
def test_wrong_variables_are_named(variables, message, monkeypatch, capsys):
    names = (processes.COORDINATOR, processes.PROCESSES, processes.PROCESS_ID)
    for name, value in zip(names, variables, strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        processes.read_environment()
    assert processes.run(lambda: 0) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("said, kept", [(None, "{}/dapo_jax"), ("", "")])
def test_the_compilation_cache_is_set_unless_the_environment_has_one(
    said, kept, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if said is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", said)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        processes.prepare_jax()
        assert (jax.config.jax_compilation_cache_dir or "") == kept.format(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("files", "libtpu", "given", "expected"),
    [
        ([], True, None, "cpu"),
        ([], False, None, None),
        (["/dev/vfio/0"], True, None, None),
        (["/dev/nvidia0"], True, None, None),
        ([], True, "tpu,cpu", "tpu,cpu"),
    ],
)
def test_libtpu_without_a_device_is_not_asked(files, libtpu, given, expected, monkeypatch):
    monkeypatch.setattr(processes.glob, "glob", lambda p: [f for f in files if f[:9] == p[:9]])
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: libtpu or None)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", given)
        processes.prepare_jax()
        assert jax.config.jax_platforms == expected
    finally:
        jax.config.update("jax_platforms", before)


@pytest.fixture(scope="module")
def one(base, tmp_path_factory):
    """The run of one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    train_alone(base, run_dir)
    return run_dir


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_stop_and_die_together_and_go_on_as_one_does(dies, base, one, tmp_path):
    """SIGTERM to process 1 in a step, and SIGKILL to it once all is saved."""
    run_dir = tmp_path / "run"
    first, second = train_with(base, run_dir, 2, 143, patch=send(IN_STEP_2, "SIGTERM", 1))
    assert "stopped by SIGTERM after step" in first.out and "same command resumes" in first.out
    ours = ("data:", "policy:", "step ", "held-out", "stopped")  # Gloo says something of its own
    assert not any(word in second.out for word in ours)
    done = len(read_rows(run_dir)) - 1
    assert done == 1
    if dies:
        patch = send(AT_THE_END, "SIGKILL", 1)
        first, second = start_training(base, run_dir, 2, 2, patch=patch).wait()
        assert f"after step {done}" in first.out and second.code == -signal.SIGKILL
        assert first.code in LOST, first.err
        assert_same_run(base, run_dir, one)
    train_alone(base, run_dir)  # where one died, nothing is left but the end
    assert_same_run(base, run_dir, one)
    assert [row["step"] for row in read_rows(run_dir)] == [0, 1, 2, 3]
    files = ("config.json", "summary.json", "metrics.jsonl")
    assert all((run_dir / name).stat().st_size for name in files)


AGREE = """
import sys
from dapo_jax.runtime import processes
from dapo_jax.types.errors import ConfigError
def work():
    me = processes.index()
    assert processes.all_gather_json("x" * (me * 5000), "long") == ["", "x" * 5000]
    assert processes.broadcast_from_host0(lambda: me, "first") == 0
    assert processes.broadcast_from_host0(lambda: "y" * 5000, "long") == "y" * 5000
    asked = []
    def ask(i):
        asked.append(i)
        if len(asked) == 3:
            raise ConfigError(f"piece {i} on {me}")
        return [i, me]
    assert processes.map_over_hosts([4, 7, 2], ask, "pieces") == [[0, 0], [1, 1], [2, 0]]
    assert asked == [[0, 2], [1]][me]
    try:
        processes.map_over_hosts([0, 2, 1], ask, "pieces")
    except ConfigError as error:
        assert str(error) == "piece 0 on 0", error
    else:
        raise AssertionError
    try:
        processes.check_same(lambda: {"a": 1, "b": me + 2})
    except ConfigError as error:
        assert str(error) == "b = 3 on process 1, but 2 on process 0", error
    try:
        processes.all_gather_json(0, "here" if me else "there")
    except RuntimeError as error:
        print(error, flush=True)
    processes.run(exit, alone="dapo-jax export")
sys.exit(processes.run(work))
"""


def test_processes_exchange_values_notice_who_is_out_of_step_and_leave_commands_for_one(tmp_path):
    for i, ended in enumerate(Several(tmp_path, AGREE, 2).wait()):
        assert "out of step: they gather ['there', 'here']" in ended.out, ended.err
        refused = f"process {i}: error: dapo-jax export runs in one process, but 2 were started"
        assert ended.code == 2 and refused in ended.err


LOSE = """
import os, signal, sys
from dapo_jax.runtime import processes
def work():
    for i in range(1000):
        processes.all_gather_json(i, "round")
        if i == 20 and processes.index() == VICTIM:
            LEAVE
    return 0
sys.exit(processes.run(work))
"""
LOSSES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "failed": ("raise OSError('the disk is full')", 1),
}


@pytest.mark.parametrize(("loss", "victim"), [("killed", 0), ("killed", 1), ("failed", 1)])
def test_the_other_process_exits_if_one_is_lost(loss, victim, tmp_path):
    """By the lost connection, or by JAX's heartbeat; process 0 runs the coordination service."""
    leave, code = LOSSES[loss]
    program = LOSE.replace("VICTIM", str(victim)).replace("LEAVE", leave)
    ended = Several(tmp_path, program, 2).wait(GONE_SECONDS)
    assert ended[victim].code == code and ended[1 - victim].code in LOST, ended[1 - victim].err
    assert ("disk is full" in ended[victim].err) == (loss == "failed")


CARRY_OVER = "config.rollout.carry_over, config.algorithm.importance_cap = 'all', 2.0\n"
STALE = "config.rollout.staleness, config.algorithm.importance_cap = 1, 2.0\n"
SHARE = "config.mesh = config.mesh.__class__({}, sampler_share=0.5)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "of_two"),
    [
        (CARRY_OVER, ""),
        (STALE, SHARE.format("1, 2, 1")),
        (STALE, SHARE.format("1, 1, 2")),
        (STALE, SHARE.format("1, 1, 1, decode_tensor=2")),
    ],
)
def test_two_processes_use_older_policies_as_one_does(settings, of_two, base, tmp_path):
    """Carried groups, or rollouts made ahead on half of each process's devices, also resumed."""
    train_with(base, tmp_path / "one", 1, patch=settings)
    patch = settings + of_two
    train_with(base, tmp_path / "two", 2, 143, patch=patch + send(IN_STEP_2, "SIGTERM", 1))
    assert len(read_rows(tmp_path / "two")) == 2
    train_with(base, tmp_path / "two", 2, patch=patch)
    assert_same_run(base, tmp_path / "two", tmp_path / "one")
    assert any(row["policy_lag"] > 0 for row in read_rows(tmp_path / "two")[1:])


SAMPLED = (
    STALE
    + """
config.checkpoint.keep_groups = True  # which compiles the same programs as samplers do
if PORT:
    config.sampler.engine, config.extras.samplers.port = "samplers", PORT
"""
)
MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=1")


@pytest.mark.slow
def test_two_processes_with_a_sampler_do_what_they_do_without(base, tmp_path):
    """Bit for bit, and what one process with a sampler does; a stopped run resumes."""
    alone, one, two = (tmp_path / name for name in ("alone", "one", "two"))
    train_with(base, alone, 2, patch=SAMPLED.replace("PORT", "0"))
    for run_dir, count in (one, 1), (two, 2):
        port = free_port()
        settings = SAMPLED.replace("PORT", str(port))
        words = "sampler", f"--run={run_dir}", f"--trainer=http://127.0.0.1:{port}", *MESH
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
        sampler = Several(tmp_path / f"sampler{count}", COMMAND, 1, *words, XLA_FLAGS=flags)
        if count == 2:
            stopped = settings + send(IN_STEP_2, "SIGTERM", 1)
            train_with(base, two, 2, 143, patch=stopped)
        train_with(base, run_dir, count, patch=settings)
        (ended,) = sampler.wait()
        assert ended.code == 0, ended.err
        rows = read_rows(run_dir)[1:]
        assert sum(row["remote_groups"] for row in rows) > 0
    assert len([*(two / "weights").iterdir()]) == 2 * KEPT  # a file of each process
    (state, _), *others = final_states(base, two, alone, one)
    assert all(equal(state, other) for other, _ in others)
    for other in alone, one:
        assert without_costs(two) == without_costs(other) and used(two) == used(other)


@pytest.mark.slow
def test_four_processes_are_gone_within_the_bound_and_two_go_on(base, one, tmp_path):
    victim = 2
    patch = send(IN_STEP_2, "SIGKILL", victim)
    run = start_training(base, tmp_path / "run", 4, 1, patch=patch)
    run.children[victim].wait(400)
    ended = run.wait(GONE_SECONDS)
    codes = [one.code for one in ended]
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes) <= LOST, [e.err for e in ended]
    train_with(base, tmp_path / "run", 2)  # from a checkpoint of four
    assert_same_run(base, tmp_path / "run", one)


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(base, tmp_path):
    line = ["evaluate", "--config=configs/arithmetic.py", f"--model={base}", "--k=2"]
    line += ["--config.data.heldout_problems=12"]
    line += ["--config.data.max_terms=3", "--config.data.min_terms=2"]
    scores = {}
    for count in (1, 2):
        into = f"--config.run_dir={tmp_path}/run{count}"
        devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}"}
        ended = Several(tmp_path / f"output{count}", COMMAND, count, *line, into, **devices).wait()
        assert [process.code for process in ended] == [0] * count, ended[0].err
        scores[count] = json.loads(ended[0].out.splitlines()[-1])
    assert scores[1] == scores[2]
