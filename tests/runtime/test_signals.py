"""Leaving when asked to, also where something takes long; and what Ctrl-C leaves on the console."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import children
import pytest
from conftest import make_prompt
from scored import ask
from small_runs import ROOT

from dapo_jax.config.experiment import Environment, Reward
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rollout.environments.sessions import Environments

# A command that computes where no signal handler of Python's runs, as a compiler does.
DEAF = """
import hashlib, sys
from dapo_jax.runtime import processes
from dapo_jax.runtime.signals import Signals
def work():
    with Signals({seconds}):
        print("busy", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 2 * 10**9)
sys.exit(processes.run(work))
"""


def start(code: str, **options) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    assert child.stdout.readline() == "busy\n"
    return child


@pytest.mark.parametrize(
    ("seconds", "signals", "last"),
    [
        pytest.param(1.5, [signal.SIGHUP], "no safe point within 1.5 s", marks=pytest.mark.slow),
        (0, [signal.SIGINT, signal.SIGTERM, signal.SIGINT], "exiting without saving"),
    ],
    ids=["too slow", "again"],
)
def test_a_command_that_hears_nothing_is_acknowledged_and_left(seconds, signals, last):
    child = start(DEAF.format(seconds=seconds))
    child.send_signal(signals[0])
    sent = time.monotonic()
    assert f"{signals[0].name}: stopping at the next safe point" in child.stderr.readline()
    assert time.monotonic() - sent < 1
    for number in signals[1:]:  # of two at the same moment the second is a launcher's
        child.send_signal(number)
        time.sleep(1.2)
    assert child.wait(20) == 128 + signals[0]
    said = child.stderr.read()
    assert last in said and len(said.splitlines()) == 1


# A program that calls the library; the second one hears nothing, as in a compiler.
PROGRAM = """
import resource, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGQUIT would write one, which may take long
from dapo_jax.runtime.signals import Signals
with Signals() as signals:
    print("busy", flush=True)
    while not signals():
        time.sleep(0.01)
    time.sleep(0.5)  # the line is a thread's
    print("saved", flush=True)
print("went on", flush=True)
"""
DEAF_PROGRAM = DEAF.replace("sys.exit(processes.run(work))", "work()")


MORE = pytest.mark.slow  # other signals in the same code


@pytest.mark.parametrize(
    "name",
    ["SIGINT", *(pytest.param(n, marks=MORE) for n in ("SIGQUIT", "SIGTERM", "SIGHUP", "SIGUSR1"))],
)
def test_a_program_saves_and_then_ends_as_the_signal_asks(name):
    child = start(PROGRAM)
    child.send_signal(getattr(signal, name))
    out, error = child.communicate(timeout=20)
    assert out == "saved\n" and child.returncode == -getattr(signal, name)
    assert f"{name}: stopping at the next safe point" in error
    assert ("KeyboardInterrupt" in error) == (name == "SIGINT")


@pytest.mark.parametrize(
    ("code", "ended", "words"),
    [
        (DEAF_PROGRAM.format(seconds=0), 130, "exiting without saving"),
        pytest.param(
            PROGRAM.replace("while not signals()", "while True"),
            -signal.SIGINT,
            "KeyboardInterrupt",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["busy", "python"],
)
def test_a_second_ctrl_c_ends_a_program_at_once(code, ended, words):
    child = start(code)
    child.send_signal(signal.SIGINT)
    time.sleep(1.2)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=5)
    assert child.returncode == ended and words in error


def test_ctrl_c_while_a_command_loads_its_libraries_leaves_no_traceback(tmp_path):
    command = [sys.executable, "-m", "dapo_jax", "train", f"--config={ROOT}/configs/arithmetic.py"]
    child = subprocess.Popen(
        [*command, f"--config.run_dir={tmp_path}/run"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    maps = pathlib.Path(f"/proc/{child.pid}/maps")
    while child.poll() is None and "jaxlib" not in maps.read_text():
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    # 0: on a busy machine it has come to its own handlers, and saved.
    assert child.returncode in (-signal.SIGINT, 130, 0) and "Traceback" not in said


def reward_of(name: str) -> str:
    with contextlib.closing(RewardPool(Reward(parts=f"{name}=1", timeout_seconds=60.0))) as pool:
        (verdict,) = ask(pool, [("r", "7")])
        return children.ENDED if verdict.parts[name] == 1 and not pool.kills else str(verdict)


def reply_of(turn: str, **settings) -> str:
    settings = Environment(workers=1, max_observation_tokens=2000, step_seconds=60.0, **settings)
    with contextlib.closing(Environments(settings, arithmetic_tokenizer(), chat=False)) as opened:
        (reply,) = opened.steps([opened.submit(make_prompt(0, [3, 4]), 7, [turn], [])])
        return reply.text


USER_CODE = {
    "reward": lambda: reward_of("children:score"),
    "reward that sends its worker signals": lambda: reward_of("children:send"),
    "environment": lambda: reply_of("1", name="children:Ending"),
    "tool": lambda: reply_of('{"name": "tool", "arguments": {}}', tools="children:tool"),
}


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("kind", USER_CODE)
def test_user_code_can_end_its_children_and_its_worker_survives(kind, alone):
    assert USER_CODE[kind]() == children.ENDED
