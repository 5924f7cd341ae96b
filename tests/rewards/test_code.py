"""Programs that run with the tests of their rows: none is right by other means than its results."""

import json
import os
import pathlib
import re
import struct
import tempfile
import time

import pytest
from row_files import read_table
from scored import ask

from dapo_jax.config.experiment import Reward
from dapo_jax.data.row_formats import MalformedRow, read_row
from dapo_jax.extras.code import sandbox
from dapo_jax.extras.code.verifier import judge_code, last_block, read_tests, run_code, with_tests
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Outcome, WantedColumns

SECONDS = 1.0
SLACK = 10.0  # of a busy machine
PAIRS = [{"input": f"{n}\n", "output": f"{n * n}\n"} for n in (3, 5, 12)]
CALLS = {"fn_name": "square", "inputs": [[3], [5], [12]], "outputs": [9, 25, 144]}
ASSERTS = [
    "assert square(3) == 9",
    "import math\nassert math.isclose(square(5), 25) and abs(square(5) - 25) < 1e-6",
    "assert all(map(square, [6, 7])) and square(6) == 36",
    "assert sorted([square(2), square(1)]) == [1, 4] and isinstance(square(2), int)",
    "def check(candidate):\n    assert [candidate(n) for n in (4, 5)] == [16, 25]\ncheck(square)",
]
TESTS = {"print": PAIRS, "call": CALLS, "assert": ASSERTS}
# An attack calls `win` if it reached what it must not reach: then its program is right.
WIN = {
    "print": "def win(): print(int(input()) ** 2)\n",
    "call": "def win():\n    global square\n    square = lambda n: n * n\n",
}
WIN["assert"] = WIN["call"]


@pytest.fixture(scope="module")
def bubblewrap():
    try:
        sandbox.find_python()
    except ConfigError as error:
        pytest.skip(str(error))


needs_sandbox = pytest.mark.usefixtures("bubblewrap")
IN_CI = {"object equal to everything", "frames above", "forged replies at once", "fork bomb"}
IN_CI |= {"patched json.dumps", "os._exit", "tests on disk"}
SLOW = pytest.mark.slow
LISTED = pathlib.Path(__file__).with_name("test_code_attacks.txt").read_text()
ATTACKS = [
    pytest.param(name, kind, code, marks=() if name in IN_CI and kind != "print" else SLOW)
    for name, kinds, code in re.findall(r"(?m)^## (.+) \| (.+)\n((?:(?!## ).*\n)+)", LISTED)
    for kind in kinds.split()
]


def block(code: str) -> str:
    return f"Here:\n```python\n{code}\n```"


def judge(code: str, tests, seconds: float = SECONDS, **columns):
    return judge_code(block(code), json.dumps({"tests": tests, **columns}), seconds, every=True)


@needs_sandbox
@pytest.mark.parametrize(("name", "kind", "code"), ATTACKS)
def test_no_attack_wins_or_outlives_its_time(name, kind, code, monkeypatch):
    pids = []
    exit_process = sandbox.Process.__exit__

    def note(process, *error):
        pids.append(process.first_pid())  # which ends after all other processes of the sandbox
        exit_process(process, *error)

    monkeypatch.setattr(sandbox.Process, "__exit__", note)
    start = time.monotonic()
    verdict = judge(WIN[kind] + code, TESTS[kind])
    seconds = time.monotonic() - start
    assert not verdict.correct and verdict.parts["tests"] == 0
    assert verdict.failure is None, verdict.failure
    assert seconds < 2 * SECONDS + SLACK
    assert pids and not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


@needs_sandbox
@pytest.mark.parametrize("kind", TESTS)
def test_an_attack_that_reached_its_aim_would_win(kind):
    assert judge(WIN[kind] + "win()", TESTS[kind], 10).correct


@pytest.mark.parametrize(("response", "code"), read_table(__file__, "blocks"))
def test_the_last_complete_block_counts(response, code):
    assert last_block(response) == code


PAIR = {"inputs": ["1"], "outputs": ["1"]}


@pytest.mark.parametrize(
    "tests",
    [None, [], {}, 7, [7], "assert (", "[1", [{"input": "1"}]]
    + [PAIR | {"outputs": []}, PAIR | {"fn_name": "f"}],
)
def test_tests_of_another_form_are_a_malformed_row(tests):
    row = {"question": "?", "cases": tests}
    wanted = with_tests(WantedColumns())
    with pytest.raises(MalformedRow, match="tests must be|invalid|JSON|never closed|column"):
        read_row(row, "mine", 1, {"tests": "cases"} if tests else {}, False, wanted)


def test_a_row_keeps_its_tests_under_any_name():
    row = {"text": "?", "test_list": ["assert f(1) == 2"], "code": "unused"}
    fields = {"problem": "text", "tests": "test_list"}
    problem = read_row(row, "mbpp", 1, fields, False, with_tests(WantedColumns()))
    assert json.loads(problem.columns) == {"tests": row["test_list"]} and problem.answer == ""


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "columns", "passed"), read_table(__file__, "passed tests")
)
def test_the_fraction_of_passed_tests(code, tests, columns, passed):
    tests = {"PAIRS": PAIRS, "CALLS": CALLS}.get(tests, tests) if isinstance(tests, str) else tests
    verdict = judge(code, tests, 10, **columns)
    count = len(read_tests({"tests": tests}).inputs)
    assert verdict.parts["tests"] == passed / count and verdict.correct == (passed == count)


@needs_sandbox
def test_without_the_part_tests_the_first_failure_ends_the_runs():
    tests = read_tests({"tests": {"inputs": ["1", "2"], "outputs": ["0", "2"]}})
    assert run_code("print(input())", tests, 10, every=False).passed == [False]
    assert run_code("print(input())", tests, 10, every=True).passed == [False, True]


@needs_sandbox
def test_a_pool_gives_rewards_of_programs():
    pool = RewardPool(Reward(verifier="code", parts="rule=1,tests=1", timeout_seconds=20.0))
    columns = json.dumps({"tests": {"inputs": ["3", "4"], "outputs": ["9", "16"]}})
    texts = (block("print(int(input()) ** 2)"), block("print(9)"), "no code")
    verdicts = ask(pool, [(text, "") for text in texts], columns=columns)
    assert [verdict.correct for verdict in verdicts] == [True, False, False]
    assert [verdict.parts["tests"] for verdict in verdicts] == [1, 0.5, 0]
    assert verdicts[2].extracted is None and not any(verdict.failure for verdict in verdicts)
    pool.close()


@pytest.fixture
def replace_bubblewrap(monkeypatch):
    """Return a function that replaces bubblewrap by a script, which nobody may run too."""
    with tempfile.TemporaryDirectory() as folder:

        def replace(script: str) -> None:
            path = pathlib.Path(folder, "bwrap")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
            pathlib.Path(folder).chmod(0o755)
            monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

        yield replace


@needs_sandbox
def test_a_broken_sandbox_gives_no_reward(replace_bubblewrap):
    python = sandbox.find_python()
    replace_bubblewrap("exit 1")
    for tests in TESTS.values():
        verdict = judge("def square(n): return n * n", tests)
        assert verdict.failure and verdict.failure.outcome is Outcome.CRASH
    assert sandbox.trial(python) == "bubblewrap did not start the program"


def test_without_a_sandbox_nothing_runs(replace_bubblewrap, tmp_path, monkeypatch):
    sandbox.find_python.cache_clear()
    replace_bubblewrap("echo no user namespaces >&2; exit 1")
    with pytest.raises(ConfigError, match="no sandbox on this machine: no user namespaces"):
        RewardPool(Reward(verifier="code"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        RewardPool(Reward(verifier="code"))
    sandbox.find_python.cache_clear()


def filtered(program: bytes, architecture: int, call: int, *arguments: int) -> int:
    """Return what a seccomp filter decides on a system call."""
    words = {0: call, 4: architecture} | {16 + 8 * i: word for i, word in enumerate(arguments)}
    value, place = 0, 0
    while True:
        code, if_true, if_false, number = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == 0x06:
            return number
        elif code == 0x20:
            value = words.get(number, 0)
        elif code == 0x54:
            value &= number
        else:
            test = {0x15: value == number, 0x35: value >= number, 0x45: value & number}[code]
            place += if_true if test else if_false


ALLOW, REJECT, KILL, MISSING = 0x7FFF0000, 0x50001, 0x80000000, 0x50026
X86 = {"read": 0, "fork": 57, "clone": 56, "mmap": 9, "socket": 41}
ARM = {"read": 63, "clone": 220, "mmap": 222, "socket": 198}
X32, CLONE3 = 0x40000000, 435


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [("x86_64", 0xC000003E, X86), ("aarch64", 0xC00000B7, ARM)],
)
@pytest.mark.parametrize("forks", [False, True])
def test_the_filter_decides_by_call_flags_and_architecture(machine, architecture, calls, forks):
    program = sandbox.seccomp_filter(machine, forks)
    of_forks = ALLOW if forks else REJECT
    decisions = {
        ("read",): ALLOW,
        ("socket",): REJECT,
        ("clone", 0x3D0F00): ALLOW,
        ("clone", 0x10010011): REJECT,
        ("clone", 17): of_forks,
        ("mmap", 0, 0, 3, 0x22): ALLOW,
        ("mmap", 0, 0, 3, 0x21): REJECT,
        ("mmap", 0, 0, 3, 0x122): REJECT,
    } | ({("fork",): of_forks} if "fork" in calls else {})
    for (name, *arguments), decision in decisions.items():
        assert filtered(program, architecture, calls[name], *arguments) == decision, name
    assert filtered(program, 0x40000003, calls["read"]) == KILL
    assert filtered(program, architecture, X32 + calls["read"]) == KILL
    assert filtered(program, architecture, CLONE3) == MISSING
