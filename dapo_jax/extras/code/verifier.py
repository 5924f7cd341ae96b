"""Verifier of programs: the last fenced block of a response, run with the tests of its row.

Programs run in a `sandbox`. What is expected stays outside: the output of a program is compared in
this process, and values of its functions in a sandbox without the program.
"""

import ast
import contextlib
import functools
import json
import os
import pathlib
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dapo_jax.config.experiment import Reward
from dapo_jax.extras.code import sandbox
from dapo_jax.extras.code.sandbox import Process, Program
from dapo_jax.rewards.functions import TESTS, ResponseCall, make_failure
from dapo_jax.rewards.verifying import Verifying, Workers
from dapo_jax.types.structs import SLOW, Failure, Outcome, Verdict, WantedColumns

LONGEST_ANSWER = 10_000  # characters of a program that a verdict keeps
MAX_OUTPUT_BYTES = 1 << 20  # more than what is expected
WALL_FACTOR = 2  # wall time of all tests, relative to the CPU time of a process
FENCE = "```"
DRIVER = pathlib.Path(__file__).with_name("driver.py").read_bytes()
FORMS = (
    'pairs {"input", "output"}, {"inputs": [...], "outputs": [...]}, the same with "fn_name" and '
    "lists of arguments, or Python texts with asserts"
)


class Tests(NamedTuple):
    """Tests of a program.

    Attributes:
        inputs: texts for standard input, or Python texts.
        outputs: what is expected, by input; none for Python texts.
        command: command line of a program in another language than Python.
    """

    inputs: Sequence[str]
    outputs: Sequence[str]
    command: Sequence[str] = ()


class Result(NamedTuple):
    """Result of a program: whether each test passed, and whether it took too long."""

    passed: list[bool]
    late: bool = False


def read_tests(columns: dict[str, Any]) -> Tests:
    """Return the tests of a row's columns. Raises ValueError, SyntaxError for other forms."""
    tests, command = columns["tests"], columns.get("command") or ()
    command = shlex.split(command) if isinstance(command, str) else [*map(str, command)]
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        tests = json.loads(tests)
    if isinstance(tests, list) and tests and all(isinstance(test, dict) for test in tests):
        tests = {f"{name}s": [test.get(name) for test in tests] for name in ("input", "output")}
    if isinstance(tests, dict):
        inputs, outputs = (list(tests.get(name) or ()) for name in ("inputs", "outputs"))
        function = str(tests.get("fn_name") or "")
        values = inputs if function else inputs + outputs
        fits = all(isinstance(value, list if function else str) for value in values)
        if fits and inputs and len(inputs) == len(outputs) and not (function and command):
            pairs = [json.dumps(pair) for pair in zip(inputs, outputs, strict=True)]
            calls = [f"assert __returns__({function!r}, {pair!r})" for pair in pairs]
            return Tests(calls, []) if function else Tests(inputs, outputs, command)
    texts: Any = [tests] if isinstance(tests, str) else tests
    fits = isinstance(texts, list) and all(isinstance(t, str) and t.strip() for t in texts)
    if texts and fits and not command:
        entry = columns.get("entry_point")
        if entry and "def check(" in texts[-1]:
            texts = [*texts[:-1], f"{texts[-1]}\ncheck({entry})"]
        ast.parse("\n".join(texts))
        return Tests(texts, [])
    raise ValueError(f"tests must be {FORMS}; with a command, pairs of texts: not {tests!r:.80}")


def with_tests(wanted: WantedColumns) -> WantedColumns:
    """Add the columns that `read_tests` reads."""
    required, optional = wanted.required | {"tests"}, wanted.optional | {"command", "entry_point"}
    return wanted._replace(required=required, optional=optional, check=read_tests)


def last_block(response: str) -> str | None:
    """Return the last fenced block after a response's thoughts, or None if it has no complete one.

    CommonMark 0.31, section 4.5, with backticks.
    """
    if "<think>" in response and "</think>" not in response:
        return None
    block, fence, lines = None, "", []
    for line in response.rpartition("</think>")[2].split("\n"):
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if fence and ticks == bare and len(ticks) >= len(fence):
            block, fence = "\n".join(lines), ""
        elif fence:
            lines.append(line)
        elif len(ticks) >= len(FENCE) and "`" not in bare[len(ticks) :]:
            fence, lines = ticks, []
    return block


def judge_code(response: str, columns: str, seconds: float, every: bool) -> Verdict:
    """Return the verdict on the program in a response; with a failure if its sandbox failed.

    Args:
        columns: JSON of the row's columns.
        seconds, every: as of `run_code`.
    """
    code = last_block(response)
    if code is None:
        return Verdict(False, None, None, {TESTS: 0.0}, decided="no_marker")
    try:
        tests = read_tests(json.loads(columns))
        passed, late = run_code(code, tests, seconds, every)
    except OSError as error:
        return Verdict(False, None, make_failure(error, Outcome.CRASH))
    except (ValueError, SyntaxError) as error:
        return Verdict(False, None, Failure(Outcome.USER_ERROR, f"the row's tests: {error}"))
    share = sum(passed) / len(tests.inputs)
    correct = share == 1 and not late
    return Verdict(
        correct, code[:LONGEST_ANSWER], None, {TESTS: share}, decided=SLOW * late or "direct"
    )


def run_code(code: str, tests: Tests, seconds: float, every: bool) -> Result:
    """Return which tests a program passes.

    Args:
        seconds: CPU time of a process; all tests together have twice as much wall time.
        every: run also the tests after one that failed.

    Raises:
        SandboxError, ConfigError: a sandbox failed.
    """
    deadline = time.monotonic() + WALL_FACTOR * seconds
    start = functools.partial(Process, python=sandbox.find_python(), deadline=deadline)
    files, passed = {"program": code.encode("utf-8", "replace")}, list[bool]()
    if not tests.outputs:
        return _run_asserts(tests.inputs, files, seconds, start)
    program = Program(["/code/program"], files, seconds, tests.command)
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        with start(program, stdin=given.encode(), stdout=subprocess.PIPE) as process:
            output = process.read(len(expected) + MAX_OUTPUT_BYTES)
        passed.append(not process.is_late and _lines(output) == _lines(expected.encode()))
        if process.is_late or not (passed[-1] or every):
            return Result(passed, process.is_late)
    return Result(passed)


def _run_asserts(
    texts: Sequence[str], files: dict[str, bytes], seconds: float, start: Callable[..., Process]
) -> Result:
    """Run Python texts in one sandbox, and the program that they call in another one."""
    solution = Program(["/code/driver", "serve"], files | {"driver": DRIVER}, seconds)
    tests = {"driver": DRIVER, "tests": json.dumps(texts).encode()}
    tester = Program(["/code/driver", "test"], tests, seconds)
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(open(end, "rb")) for _ in range(2) for end in os.pipe()]
        served = stack.enter_context(start(solution, stdin=ends[0], stdout=ends[3]))
        streams = {"stdin": ends[2], "stdout": ends[1], "stderr": subprocess.PIPE}
        process = stack.enter_context(start(tester, **streams))
        for end in ends:
            end.close()
        output = process.read(MAX_OUTPUT_BYTES)
        served.check_started()
    return Result([line == b"1" for line in output.split(b"\n")[:-1]], process.is_late)


def _lines(output: bytes) -> list[bytes]:
    """Return the lines without blanks at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split(b"\n")]


class CodeVerifying(Verifying):
    """`code`: a response is correct if its program passes all tests of its row."""

    reads_answers = False

    def __init__(self, reward: Reward, extras: Any):
        super().__init__(reward, extras)
        self._every = TESTS in reward.weights()
        sandbox.find_python()  # fails here, not in a thread

    def verify(self, workers: Workers, calls: Sequence[ResponseCall]) -> list[Verdict]:
        seconds = self.reward.timeout_seconds
        return [judge_code(call.response, call.columns, seconds, self._every) for call in calls]

    def columns(self, wanted: WantedColumns) -> WantedColumns:
        return with_tests(wanted)

    def responses_to(self, gold: str) -> dict[str, str]:
        return {"gold in its form": f"{FENCE}\n{gold}\n{FENCE}", "gold alone": gold}
