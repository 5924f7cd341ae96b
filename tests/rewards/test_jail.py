"""The jail of the gym worker, without reasoning-gym: what it refuses, and who stays outside."""

import json
import os
import socket
import subprocess
import sys
import time
import types

import pytest

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.gym import answer_forms
from dapo_jax.rewards.gym import tasks as gym
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.workers.parent import WorkerProcess
from dapo_jax.verifier import jail

needs_jail = pytest.mark.skipif(
    jail.jail_refusal() is not None, reason=f"no jail: {jail.jail_refusal()}"
)

# Run inside the jail, with no rule in between: each attempt must raise OSError.
ATTEMPTS = r"""
import ctypes, errno, json, os, pathlib, resource, signal, socket, subprocess, sys, threading, time

from dapo_jax.verifier.jail import enter_jail

home, port, inherited = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
parent, libc = os.getppid(), ctypes.CDLL(None, use_errno=True)
os.chdir(home)
enter_jail()


def call(number, *arguments):  # another error means that the kernel looked at the arguments
    if libc.syscall(number, *arguments) < 0 and ctypes.get_errno() == errno.EPERM:
        raise OSError("refused")


def system():
    if os.system("touch made"):
        raise OSError("refused")


def overfill():
    os.write(2, b"x")


ATTEMPTS = {
    "system": system,
    "subprocess": lambda: subprocess.run(["/bin/true"]),
    "execv": lambda: os.execv("/bin/true", ["true"]),
    "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "fork": lambda: os.fork() or os._exit(0),
    "socket": lambda: socket.socket(),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "socket pair": lambda: socket.socketpair(),
    "connect": lambda: socket.create_connection(("127.0.0.1", port)),
    "write in /tmp": lambda: open(f"/tmp/made{os.getpid()}", "w"),
    "write here": lambda: open("made", "w"),
    "append": lambda: open("secret", "a"),
    "truncate": lambda: os.truncate("secret", 0),
    "write a device": lambda: open("/dev/null", "w"),
    "unlink": lambda: os.unlink("secret"),
    "rename": lambda: os.rename("secret", "made"),
    "link": lambda: os.link("secret", "made"),
    "symlink": lambda: os.symlink("secret", "made"),
    "mkdir": lambda: os.mkdir("made"),
    "chmod": lambda: os.chmod("secret", 0o777),
    "utime": lambda: os.utime("secret"),
    "memory file": lambda: os.memfd_create("made"),
    "read the user's file": lambda: open(home / "secret").read(),
    "list the user's folder": lambda: os.listdir(home),
    "read the real home": lambda: os.listdir(os.path.expanduser("~root")),
    "read passwd": lambda: open("/etc/passwd").read(),
    "read the parent's variables": lambda: open(f"/proc/{parent}/environ").read(),
    "read the parent's memory": lambda: open(f"/proc/{parent}/mem", "rb"),
    "inherited file": lambda: os.write(inherited, b"made"),
    "let the log grow": overfill,
    "kill the parent": lambda: os.kill(parent, signal.SIGCONT),
    "ask for the parent": lambda: os.kill(parent, 0),
    "kill everybody": lambda: os.kill(-1, 0),
    "pidfd": lambda: os.pidfd_open(parent),
    "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9)),
    "renice": lambda: os.setpriority(os.PRIO_PROCESS, parent, 5),
    "chroot": lambda: os.chroot("/"),
    "setuid": lambda: os.setuid(os.getuid()),
    "terminal": lambda: __import__("fcntl").ioctl(0, 0x5412, b"x"),
}
if os.uname().machine == "x86_64":
    ATTEMPTS |= {
        "ptrace": lambda: call(101, 0x4206, parent, 0, 0),
        "process_vm_readv": lambda: call(310, parent, 0, 0, 0, 0, 0),
        "process_vm_writev": lambda: call(311, parent, 0, 0, 0, 0, 0),
        "unshare": lambda: call(272, 0x10000000),
        "mount": lambda: call(165, 0, 0, 0, 0, 0),
        "bpf": lambda: call(321, 0, 0, 0),
        "io_uring": lambda: call(425, 1, 0),
        "keyctl": lambda: call(250, 0, 0, 0),
        "queue a signal": lambda: call(129, parent, 18, 0),
        "signal a thread": lambda: call(234, parent, parent, 18),
        "set the clock": lambda: call(227, 0, 0),
    }

outcomes = {}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        outcomes[name] = "done"  # and not what it brought
    except (OSError, ValueError):  # a limit's is a ValueError
        outcomes[name] = "refused"

ran = []
thread = threading.Thread(target=lambda: (time.sleep(0.01), ran.append(1)))
thread.start()
thread.join()
import sympy.abc, xml.dom.minidom  # still read from the interpreter's folders
outcomes["threads, imports"] = "refused" if ran else "does not work"
print(json.dumps(outcomes))
"""


@needs_jail
def test_the_jail_refuses_every_way_out(tmp_path):
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    (home / "secret").write_text("of the user")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        open(tmp_path / "inherited", "wb") as file,
        open(log, "wb") as errors,
    ):
        place = [str(home), str(server.getsockname()[1]), str(file.fileno())]
        done = subprocess.run(
            [sys.executable, "-c", ATTEMPTS, *place],
            env=jail.environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[file.fileno()],
            timeout=120,
        )
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    assert done.returncode == 0, done
    outcomes = json.loads(done.stdout)
    assert len(outcomes) >= 40
    assert {name: how for name, how in outcomes.items() if how != "refused"} == {}
    assert (home / "secret").read_text() == "of the user"
    assert [path.name for path in home.iterdir()] == ["secret"]
    assert not (tmp_path / "inherited").read_bytes() and not log.read_bytes()


@needs_jail
def test_a_process_with_threads_can_not_be_locked_in():
    code = (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "from dapo_jax.verifier.jail import enter_jail\nenter_jail()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "NoJail: the process has other threads" in done.stderr


def test_no_variable_of_the_user_reaches_a_jailed_process(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("LD_PRELOAD", "secret")
    assert "secret" not in jail.environment().values()
    assert jail.environment()["PATH"] == os.environ["PATH"]


@needs_jail
def test_every_thread_of_the_gym_worker_is_jailed_and_limited():
    worker = WorkerProcess("dapo_jax.rewards.worker", "gym", environment=jail.environment())
    try:
        job = {"source": "gym:", "metadata": "{}", "answer": "1"}
        assert worker.ask(job, time.monotonic() + 60)["score"] == 0.0
        folder = f"/proc/{worker._process.pid}"
        tasks = os.listdir(f"{folder}/task")
        states = [open(f"{folder}/task/{task}/status").read() for task in tasks]
        assert len(states) == 2  # the second one watches the trainer
        assert all("Seccomp:\t2\n" in state and "NoNewPrivs:\t1\n" in state for state in states)
        limits = open(f"{folder}/limits").read().splitlines()
        bounded = {line.split("  ")[0]: line.split()[-3] for line in limits[1:]}
        assert (bounded["Max file size"], bounded["Max address space"]) == ("0", str(2 << 30))
        assert bounded["Max cpu time"] == str(jail.CPU_SECONDS)
    finally:
        worker.kill()


# --- where there is no jail -----------------------------------------------------------------


@pytest.fixture
def open_fake(monkeypatch):
    """Opens a task of a package that has one, of that name and class."""

    def open_task(name: str, dataset: type):
        factory = types.SimpleNamespace(
            create_dataset=lambda task, **settings: dataset(), DATASETS={name: dataset}
        )
        monkeypatch.setattr(gym, "_factory", lambda *_: factory)
        return gym.open_task("data.source", name, 0, 10)

    return open_task


class Plain:
    """A task whose scorer compares."""

    __module__ = "colorsys"  # where nothing evaluates


def test_without_a_jail_tasks_that_evaluate_are_refused_by_name(open_fake, monkeypatch):
    monkeypatch.setattr(gym, "jail_refusal", lambda: "no libseccomp")
    for name in answer_forms.EVALUATING:
        rule = f"config.data.source = 'gym:{name}': its scorer evaluates text.*: no libseccomp"
        with pytest.raises(ConfigError, match=rule):
            open_fake(name, Plain)
    for name in ("counting", *answer_forms.READING):
        assert isinstance(open_fake(name, Plain), Plain)


def test_with_a_jail_they_are_opened(open_fake, monkeypatch):
    monkeypatch.setattr(gym, "jail_refusal", lambda: None)
    assert isinstance(open_fake("countdown", Plain), Plain)


def test_the_probe_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "pyseccomp.py").write_text("raise RuntimeError('Unable to find libseccomp')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    jail.jail_refusal.cache_clear()
    assert "Unable to find libseccomp" in jail.jail_refusal()
    jail.jail_refusal.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Landlock" in jail.jail_refusal()
    with pytest.raises(jail.NoJail, match="darwin"):
        jail.enter_jail()
    jail.jail_refusal.cache_clear()


def test_a_worker_that_found_no_jail_asks_no_scorer_that_evaluates(tmp_path):
    (tmp_path / "pyseccomp.py").write_text("raise RuntimeError('Unable to find libseccomp')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    worker = WorkerProcess(
        "dapo_jax.rewards.worker", "gym", environment=jail.environment() | {"PYTHONPATH": path}
    )
    try:
        for task in ("countdown", "leg_counting"):
            job = {"source": f"gym:{task}", "metadata": "{}", "answer": "1"}
            reply = worker.ask(job, time.monotonic() + 60)
            refused = "takes a jail" in reply["failure"]
            assert reply["score"] == 0.0 and refused == (task == "countdown")
    finally:
        worker.kill()


# --- scorers that misbehave -----------------------------------------------------------------

PACKAGE = """
import signal, sys


class Task:
    def score_answer(self, answer, entry):
        if answer == "hang":
            while True:
                pass
        if answer == "eat":
            return len(bytearray(1 << 40))
        if answer == "die":
            signal.raise_signal(signal.SIGKILL)
        if answer == "leave":
            sys.exit(1)
        print("a line for nobody", flush=True)
        return float(answer)


class factory:
    DATASETS = {"odd": Task}

    def create_dataset(task):
        return Task()
"""


def test_a_scorer_that_hangs_or_dies_costs_its_own_response(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    pool = RewardPool(Reward(verifier="math", parts="gym=1", workers=1, timeout_seconds=1.0))
    texts = ["1", "hang", "1", "eat", "1", "die", "leave", "1", "nan", "0.5", "1"]
    pending = [pool.submit("", f"#### {text}", "1", "gym:odd", "{}") for text in texts]
    verdicts = [future.result(timeout=60) for future in pending]
    pool.close()
    assert [verdict.correct for verdict in verdicts] == [text == "1" for text in texts]
    said = {text: verdict.failure for text, verdict in zip(texts, verdicts, strict=True)}
    assert said["hang"].startswith("TimeoutError") and said["eat"].startswith("MemoryError")
    assert "died" in said["die"] and "died" in said["leave"] and said["nan"] is None
    assert pool.kills == 6 and verdicts[-2].parts == {"gym": 0.5}
