"""A process locks itself in: what runs in it afterwards can compute and read Python, no more.

Landlock, of the kernel, leaves it the files of Python alone; a list of system calls, by libseccomp,
leaves it neither network nor programs, processes, signals, nor any other way out. Neither can be
undone, not even by root. The standard library and two small packages that speak to the kernel are
all this imports.

    python -m dapo_jax.verifier.jail        says whether a jail can be had here
"""

import errno
import functools
import os
import pathlib
import resource
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

# Of Linux alone, and of an extra.
# pyright: reportMissingImports=false

if TYPE_CHECKING:
    from pyseccomp import Arg, SyscallFilter

CPU_SECONDS = 3600  # of one worker's life: what was left running in it ends, and it is replaced
PROBE_SECONDS = 60.0

# What numpy's libraries and their threads need to be told, and what Python and the user's
# installation are found by. No other variable is passed on: many a one is a password.
_PASSED_ON = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONHASHSEED",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
)
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_SYSTEM_FILES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/urandom",
)

_LIBRARIES = ("lib", "lib64")
_SITE = ("site-packages", "dist-packages")

# What an interpreter computes, waits, imports and answers with; all else is refused. Whatever takes
# a path can only look, and `_conditions` lists what is allowed with some arguments alone.
_ALLOWED = """
read readv pread64 preadv lseek close close_range write writev dup poll ppoll select pselect6
epoll_create1 epoll_ctl epoll_wait epoll_pwait pipe2 eventfd2
access faccessat faccessat2 stat lstat fstat newfstatat fstatat64 statx statfs fstatfs readlink
readlinkat getcwd getdents getdents64 fadvise64
brk mmap munmap mremap mprotect madvise membarrier mlock munlock
futex futex_waitv set_robust_list get_robust_list rseq sched_yield sched_getaffinity
sched_getscheduler sched_getparam getcpu set_tid_address arch_prctl
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack
restart_syscall pause
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getitimer
getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid getpgid getpgrp
getsid getpriority getrlimit getrusage uname sysinfo getrandom
exit exit_group
""".split()

_CLONE_THREAD = 0x10000
_CLONE_NEW = 0x7E020000 | 0x80  # namespaces
_FCNTL = (0, 1, 2, 3, 1030)  # duplicate, get and set close-on-exec, get flags


class NoJail(OSError):
    """No jail can be had on this machine; says why."""


def environment() -> dict[str, str]:
    """The variables that a jailed process is started with."""
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return passed | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONDONTWRITEBYTECODE": "1"}


def _readable(packages: Sequence[str]) -> list[str]:
    """The folders of the interpreter, its libraries, and those of some packages."""
    paths = {*_SYSTEM_FILES, *packages, *sysconfig.get_paths().values()}
    paths -= {sysconfig.get_path("data"), sysconfig.get_path("scripts")}
    paths |= {f"{prefix}/{lib}" for prefix in (sys.prefix, sys.base_prefix) for lib in _LIBRARIES}
    paths |= {path for path in sys.path if pathlib.PurePath(path).name in _SITE}
    return sorted(path for path in paths if os.path.exists(path))


def _lock_files(packages: Sequence[str]) -> None:
    from landlock import FSAccess, Ruleset

    rules = Ruleset()  # refuses all that this kernel knows of
    for path in _readable(packages):
        folder = FSAccess.READ_DIR if os.path.isdir(path) else FSAccess(0)
        rules.allow(path, rules=FSAccess.READ_FILE | folder)
    rules.apply()


def _conditions() -> list[tuple[str, list[tuple[int, str, int, int]]]]:
    """System calls allowed with some arguments: (name, [(place, comparison, mask, value)])."""
    writing = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    reading = [("openat", [(2, "MASKED_EQ", writing, 0)]), ("open", [(1, "MASKED_EQ", writing, 0)])]
    thread = [(0, "MASKED_EQ", _CLONE_THREAD | _CLONE_NEW, _CLONE_THREAD)]
    own = [(0, "EQ", os.getpid(), 0)]
    limits = [(0, "EQ", 0, 0), (2, "EQ", 0, 0)]  # reads its own, sets none
    return [
        *reading,
        ("clone", thread),
        ("tgkill", own),  # abort()
        ("prlimit64", limits),
        *(("fcntl", [(1, "EQ", command, 0)]) for command in _FCNTL),
    ]


def _lock_calls() -> None:
    import pyseccomp

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    for name in _ALLOWED:
        _add(rules, pyseccomp.ALLOW, name, [])
    for name, arguments in _conditions():
        compared = [
            pyseccomp.Arg(place, getattr(pyseccomp, comparison), first, second)
            for place, comparison, first, second in arguments
        ]
        _add(rules, pyseccomp.ALLOW, name, compared)
    # The C library then starts its threads by clone, whose flags can be looked at.
    _add(rules, pyseccomp.ERRNO(errno.ENOSYS), "clone3", [])
    rules.load()


def _add(rules: "SyscallFilter", action: int, name: str, arguments: "list[Arg]") -> None:
    import pyseccomp

    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    if number >= 0:  # below: this processor has none of that name
        rules.add_rule(action, number, *arguments)


def _limit() -> None:
    """Files that are open already do not grow either; a process left running ends some day."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    seconds = CPU_SECONDS if hard == resource.RLIM_INFINITY else min(CPU_SECONDS, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def _close_others(keep: Collection[int]) -> None:
    first = 3
    for number in sorted({number for number in keep if number > 2}):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16))


def _check() -> None:
    """A jail that does not hold is none."""
    attempts = {
        "read /": lambda: os.close(os.open("/", os.O_RDONLY)),
        "write /dev/null": lambda: os.close(os.open("/dev/null", os.O_WRONLY)),
        "open a socket": lambda: socket.socket().close(),
        "signal itself": lambda: os.kill(os.getpid(), 0),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            continue
        raise NoJail(f"the jail does not hold: it let the process {name}")


def enter_jail(packages: Sequence[str] = (), keep: Collection[int] = ()) -> None:
    """Locks this process in, for good. To be called before it has a second thread.

    What is left: computing, threads, reading the files of Python and its packages, reading and
    writing the open files 0, 1, 2 and `keep`, where they are pipes or devices.

    Args:
        packages: more folders that may be read.
        keep: open files besides 0, 1 and 2 that stay open; all others are closed.

    Raises:
        NoJail: this system has none. The process may then be half locked in.
    """
    if not sys.platform.startswith("linux"):
        raise NoJail(f"it is made of Linux's Landlock and seccomp; this is {sys.platform}")
    if len(os.listdir("/proc/self/task")) > 1:
        raise NoJail("the process has other threads already, which would stay outside")
    try:
        import landlock  # noqa: F401
        import pyseccomp  # noqa: F401

        _close_others(keep)
        _limit()
        _lock_files(packages)
        _lock_calls()
    except ImportError as error:
        raise NoJail(f"pip install 'dapo_jax[gym]' has what it needs ({error})") from None
    except Exception as error:  # both packages raise what their authors thought of
        raise NoJail(f"{type(error).__name__}: {error}") from error
    _check()


@functools.lru_cache(maxsize=1)
def jail_refusal() -> str | None:
    """Why no jail can be had here; None where a process that tried is in one."""
    if not sys.platform.startswith("linux"):
        return f"it is made of Linux's Landlock and seccomp; this is {sys.platform}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dapo_jax.verifier.jail"],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"the process that tried ended with {done.returncode}"


if __name__ == "__main__":
    try:
        enter_jail()
    except OSError as reason:
        sys.exit(f"no jail: {reason}")
    print("a jail can be had here")
