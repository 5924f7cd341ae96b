"""Sandbox for programs that a model wrote: bubblewrap, with limits and a filter of system calls.

A program sees the system's files read-only, its own files below /code, and 16 MiB in /tmp: no
network, home, data, environment variables or /proc. Its namespaces end with it, so no process
outlives a run. Nothing that a program writes is trusted: callers compare its output outside.
"""

import contextlib
import errno
import fcntl
import functools
import os
import platform
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dapo_jax.types.errors import ConfigError

MEMORY_BYTES = 1 << 30  # private memory of a process
TMP_BYTES = 16 << 20
MAX_PROCESSES = 32  # and threads
MAX_FILES = 64
START_SECONDS = 20.0  # of the trial run
KILL_SECONDS = 5.0  # for a killed sandbox to end
NOBODY = "65534"

# Rejected system calls, and their numbers on x86-64 and AArch64, or on both; -1: there is none.
# From asm/unistd.h of Linux 6.12.
_REJECTED = """
    unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, add_key 248 217,
    request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    kcmp 312 272, memfd_create 319 279, shmget 29 194, msgget 68 186, mq_open 240 180,
    open_by_handle_at 304 265, name_to_handle_at 303 264, kexec_load 246 104, init_module 175 105,
    finit_module 313 273, swapon 167 224, reboot 169 142, quotactl 179 60, acct 163 89,
    socket 41 198, personality 135 92, syslog 103 116, io_uring_setup 425, io_uring_enter 426,
    io_uring_register 427, open_tree 428, move_mount 429, fsopen 430, fsconfig 431, fsmount 432,
    fspick 433, pidfd_open 434, pidfd_getfd 438, mount_setattr 442, memfd_secret 447
"""
_FORKS = ", fork 57 -1, vfork 58 -1"
_MACHINES = {"x86_64": (0, 0xC000003E, 56, 9), "aarch64": (1, 0xC00000B7, 220, 222)}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_THREAD = 0x10000  # CLONE_THREAD
_SHARED_ANONYMOUS = 0x21  # mapped memory that no limit counts
_GROWS_DOWN = 0x100  # as a stack, which no limit of data counts
_X32 = 0x40000000  # calls of a second x86-64 interface


class SandboxError(OSError):
    """The sandbox itself failed, not the program in it."""


def seccomp_filter(machine: str, forks: bool) -> bytes:
    """Return the program of a seccomp filter, as cBPF, for a `platform.machine()`.

    With `forks` it allows new processes, else only threads.
    """
    column, architecture, clone, mmap = _MACHINES[machine]
    reject = _instruction(0x06, 0x50000 | errno.EPERM)
    kill, allow = _instruction(0x06, 0x80000000), _instruction(0x06, 0x7FFF0000)

    def load(offset: int) -> bytes:  # of struct seccomp_data; an argument has 8 bytes from 16
        return _instruction(0x20, offset)

    def unless(code: int, value: int, then: bytes) -> bytes:
        return _instruction(code, value, 0, 1) + then

    equal, at_least, has_bits = 0x15, 0x35, 0x45
    names = (_REJECTED + _FORKS * (not forks)).split(",")
    calls = [int((2 * name.split()[1:])[column]) for name in names]
    program = [load(4), _instruction(equal, architecture, 1, 0), kill, load(0)]
    program += [unless(at_least, _X32, kill)]
    program += [unless(equal, number, reject) for number in calls if number >= 0]
    # The C library then uses clone, whose flags a filter can read.
    program += [unless(equal, _CLONE3, _instruction(0x06, 0x50000 | errno.ENOSYS))]
    shared = load(40) + unless(has_bits, _GROWS_DOWN, reject)
    shared += _instruction(0x54, _SHARED_ANONYMOUS)
    shared += unless(equal, _SHARED_ANONYMOUS, reject) + allow
    program += [_instruction(equal, mmap, 0, len(shared) // 8), shared]
    program += [_instruction(equal, clone, 1, 0), allow, load(16)]
    program += [unless(has_bits, _NEW_NAMESPACES, reject)]
    program += [allow] if forks else [unless(has_bits, _THREAD, allow), reject]
    return b"".join(program)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def sealed_file(content: bytes) -> int:
    """Return a descriptor of an anonymous file that nobody can change, at its start."""
    descriptor = os.memfd_create("dapo_jax", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Program(NamedTuple):
    """A program of a sandbox.

    Attributes:
        arguments: of the sandbox's Python, which has no site packages.
        files: contents by name, read-only in /code.
        seconds: limit of CPU time of each process.
        command: in place of Python; it may start processes.
    """

    arguments: Sequence[str]
    files: Mapping[str, bytes]
    seconds: float
    command: Sequence[str] = ()


class Process:
    """Running program. Use it as a context manager, so that the program ends with the block.

    Args:
        deadline: of time.monotonic(), when reading ends.
        stdin, stdout, stderr: as of `subprocess.Popen`, or the bytes to read; by default the null
            device.

    Attributes:
        is_late: whether reading ended before the program, by its time.
    """

    def __init__(self, program: Program, python: str, deadline: float, **streams: Any):
        self.is_late = False
        self._deadline = deadline
        with contextlib.ExitStack() as stack:

            def held(descriptor: int) -> int:
                stack.callback(os.close, descriptor)
                return descriptor

            (self._status, write), self._reported = os.pipe(), b""
            os.set_blocking(self._status, False)
            held(write)
            rule = held(sealed_file(seccomp_filter(platform.machine(), bool(program.command))))
            files = {name: held(sealed_file(text)) for name, text in program.files.items()}
            words = _bubblewrap(python, files, rule, write) + _limited(program, python)
            names = "stdin", "stdout", "stderr"
            options: dict[str, Any] = dict.fromkeys(names, subprocess.DEVNULL) | streams
            if isinstance(given := options["stdin"], bytes):
                options["stdin"] = held(sealed_file(given))
            options["pass_fds"] = (write, rule, *files.values())
            self._process = subprocess.Popen(words, **options)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process.poll() is None:
            # The first process of the sandbox, with which all others end. bubblewrap then waits for
            # it; if bubblewrap died first, nobody might.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.first_pid() or self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        self._process.kill()
        self._process.wait()
        os.close(self._status)
        for stream in filter(None, (self._process.stdout, self._process.stderr)):
            stream.close()

    def first_pid(self) -> int:
        """Return the first process of the sandbox; 0 if it has not started."""
        match = re.search(rb'"child-pid": (\d+)', self._read_status())
        return int(match[1]) if match else 0

    def _read_status(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            self._reported += os.read(self._status, 1 << 16)
        return self._reported

    def read(self, limit: int) -> bytes:
        """Return what the program prints to its pipe until it ends, or its time or `limit` bytes.

        Raises `SandboxError` if the program did not start.
        """
        stream = self._process.stdout or self._process.stderr
        assert stream is not None
        poll, output = select.poll(), bytearray()
        poll.register(stream, select.POLLIN)
        while len(output) <= limit:
            seconds = self._deadline - time.monotonic()
            if seconds <= 0 or not poll.poll(1000 * seconds):
                self.is_late = True
                break
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                break
            output += chunk
        if not (output or self.is_late):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it only closed its output
                self._process.wait(max(0.0, self._deadline - time.monotonic()))
            self.check_started()
        return bytes(output)

    def check_started(self) -> None:
        """Raise `SandboxError` if bubblewrap ended without starting the program."""
        # It reports an exit code only of a program that it started.
        has_ended = self._process.poll() is not None
        if has_ended and b"exit-code" not in self._read_status():
            raise SandboxError("bubblewrap did not start the program")


def _bubblewrap(python: str, files: dict[str, int], rule: int, status: int) -> list[str]:
    """Return the words before the program's own command line."""
    words = ["choom", "-n", "1000", "--"]  # out of memory, it is killed before the trainer
    if os.geteuid() == 0:  # limits on processes do not apply to root
        words += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    words += ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    words += ["--as-pid-1"]  # else bubblewrap leaves a process that nobody waits for
    words += ["--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        is_link = os.path.islink(name)
        words += ["--symlink", os.readlink(name), name] if is_link else _bound(name)
    words += _bound("/etc/ld.so.cache") + _bound("/etc/alternatives")
    if not python.startswith("/usr/"):
        words += _bound(os.path.dirname(os.path.dirname(python)))
    for device in ("/dev/null", "/dev/urandom"):  # /dev/zero gives memory that no limit counts
        words += ["--dev-bind", device, device]
    words += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for name, descriptor in files.items():
        words += ["--ro-bind-data", str(descriptor), f"/code/{name}"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    for name, value in environment.items():
        words += ["--setenv", name, value]
    return [*words, "--remount-ro", "/", "--seccomp", str(rule), "--json-status-fd", str(status)]


def _bound(path: str) -> list[str]:
    return ["--ro-bind-try", path, path]


def _limited(program: Program, python: str) -> list[str]:
    """Return the command line of a program with its limits, inside the sandbox."""
    seconds = max(1, round(program.seconds))
    limits = {"cpu": seconds, "data": MEMORY_BYTES, "fsize": TMP_BYTES, "core": 0, "memlock": 0}
    limits |= {"nproc": MAX_PROCESSES, "nofile": MAX_FILES}
    words = ["--", "prlimit", *(f"--{name}={n}:{n}" for name, n in limits.items())]
    return [*words, *(program.command or (python, "-I", "-S", *program.arguments))]


@functools.cache
def find_python() -> str:
    """Return the Python that runs in sandboxes: this one if they can read it, else the system's.

    Raises:
        ConfigError: bubblewrap is missing or can't make a sandbox, with its reason.
    """
    setting = "config.reward.verifier = 'code'"
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        allowed = f"Linux on {' or '.join(_MACHINES)}"
        raise ConfigError(f"{setting}: its sandbox needs {allowed}")
    if not shutil.which("bwrap"):
        raise ConfigError(f"{setting}: needs a sandbox: apt-get install bubblewrap")
    own, reason = os.path.realpath(sys.executable), ""
    for python in dict.fromkeys((own, "/usr/bin/python3")):
        reason = trial(python)
        if not reason:
            return python
    raise ConfigError(f"{setting}: bubblewrap makes no sandbox on this machine: {reason}")


def trial(python: str) -> str:
    """Run an empty program in a sandbox; return why it failed, or an empty text."""
    program = Program(["-c", "print(7)"], {"program": b""}, START_SECONDS)
    deadline = time.monotonic() + START_SECONDS
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        with Process(program, python, deadline, **streams) as process:
            output = process.read(1 << 16)
    except OSError as error:
        return str(error)
    return "" if output == b"7\n" else (output or b"no reply").decode(errors="replace").strip()
