"""The verifier's contract: what equals what, what is an answer, and what hostile text can't do.

`verifier_cases.jsonl`: clause, kind ('core' is beyond dispute, 'convention' is decided here), a
response, its gold answer, and whether they are equivalent. `verifier_readings.jsonl`: the same by
families, of notations that can be read in several ways. `causes.txt`: by causes of errors, with
problems. `verifier_hostile.jsonl`: texts that attack, none of them equivalent to its answer;
'parts' are repeated to any size.
"""

import collections
import contextlib
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
import types

import pytest
from pairs import attacks, own_pairs, rows
from row_files import read_table
from scored import submit

from dapo_jax.config.experiment import Reward
from dapo_jax.config.settings import open_extras
from dapo_jax.extras.math import algebra_process
from dapo_jax.extras.math.algebra_process import is_equivalent
from dapo_jax.extras.math.answer_conventions import as_percentage, is_unfinished
from dapo_jax.extras.math.answer_shape import read
from dapo_jax.extras.math.equivalence import Decision
from dapo_jax.extras.math.verifier import Settings, make_verifier
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.spelling import dapo
from dapo_jax.run.scores import answer_classes

HERE = pathlib.Path(__file__).parent
LONGEST_SECONDS = 1.0
PAIRS, HOSTILE = own_pairs(), rows("verifier_hostile.jsonl")
GROUPS = sorted({(pair.of, pair.group) for pair in PAIRS})


@pytest.mark.parametrize(("of", "group"), GROUPS)
def test_each_pair_is_decided_as_listed(of, group):
    pairs = [pair for pair in PAIRS if (pair.of, pair.group) == (of, group)]
    verifiers = {c: make_verifier(Settings("math", unfinished=c)) for c in ("right", "wrong")}
    wrong = [p for p in pairs if verifiers[p.unfinished](*p[:3]).correct is not p.is_right]
    assert pairs and wrong == []


@pytest.mark.parametrize(("golds", "every"), [(4, 7), pytest.param(300, 1, marks=pytest.mark.slow)])
def test_no_expression_made_to_look_equal_is_accepted(golds, every):
    verifier, tried = make_verifier(Settings("math")), [*attacks(golds, every)]
    assert len(tried) > 100 and not [pair for pair in tried if verifier(*pair[:3]).correct]


def hostile_texts(characters: int, marker: str):
    """(name, text, answer), repeated parts stretched to about that size."""
    for case in HOSTILE:
        if "prediction" in case:
            yield case["name"], case["prediction"].replace("MARKER", marker), case["answer"]
            continue
        first, piece, *middle = case["parts"]
        times = math.ceil(characters / len(piece + "".join(middle[1:2])))
        text = first + piece * times + middle[0]
        if len(middle) > 1:
            text += middle[1] * times + middle[2]
        yield case["name"], text, case["answer"]


def load_sympy() -> None:
    """Let the worker load sympy, which belongs to no verdict's time."""
    assert is_equivalent(r"\boxed{\int_0^1 x^2 dx}", r"\frac13")


def cpu_seconds() -> float:
    """Return what this process, its worker and those before it have used of the cores."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() + ended.ru_utime + ended.ru_stime
    worker = algebra_process._worker._process
    if worker is None:  # the last text was late
        return seconds
    used = pathlib.Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return seconds + sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


SIZES = [pytest.param(n, marks=pytest.mark.slow) for n in (300, 10_000_000)]


@pytest.mark.parametrize("characters", [*SIZES, 1_800, 60_000])
def test_hostile_text_is_wrong_quickly_and_runs_nothing(characters, tmp_path):
    marker = tmp_path / "marker"
    load_sympy()
    for name, text, answer in hostile_texts(characters, str(marker)):
        if algebra_process._worker._process is None:  # the last text was late
            load_sympy()
        started = cpu_seconds()
        assert is_equivalent(text, answer) is False, name
        assert cpu_seconds() - started < LONGEST_SECONDS, name
        assert not marker.exists(), name


def test_bombs_of_any_number_of_parts_are_wrong_quickly():
    load_sympy()
    for start, piece, times, rest, end, answer in read_table(__file__, "bombs"):
        pieces = "".join(piece.replace("#", str(i)) for i in range(times))
        text, started = start + pieces + rest + end * times, cpu_seconds()
        assert is_equivalent(rf"\boxed{{{text}}}", answer) is False, text[:60]
        assert cpu_seconds() - started < LONGEST_SECONDS, text[:60]


def worker_of(parent: int) -> int:
    """The algebra worker that a process started."""
    pids = []
    for children in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            pids += map(int, children.read_text().split())
    name = algebra_process.WORKER.encode()
    (pid,) = (p for p in pids if name in pathlib.Path(f"/proc/{p}/cmdline").read_bytes())
    return pid


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_worker_is_replaced_and_its_verdict_computed_again(sent, monkeypatch):
    assert is_equivalent(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
    worker = worker_of(os.getpid())
    os.kill(worker, sent)
    monkeypatch.setattr(algebra_process, "SECONDS", 0.2)
    assert is_equivalent(r"\sqrt{98}", r"7\sqrt{2}")  # the machine was late, not the text
    assert worker_of(os.getpid()) != worker


FORKING = r"""
import os
from dapo_jax.extras.math.algebra_process import is_equivalent
assert is_equivalent(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
child = os.fork()
fine = is_equivalent(r"\boxed{\sqrt{50}}", r"5\sqrt{2}")
if child:
    fine = fine and os.waitpid(child, 0)[1] == 0
    raise SystemExit(not fine)
os._exit(not fine)
"""


def test_a_forked_child_has_a_worker_of_its_own():
    subprocess.run([sys.executable, "-c", FORKING], check=True, cwd=HERE.parents[1], timeout=60)


def test_a_worker_has_little_memory_writes_no_file_and_ends_with_its_trainer(tmp_path):
    code = (
        "from dapo_jax.extras.math.algebra_process import is_equivalent\n"
        "is_equivalent(r'\\sqrt{8}', '1'); print(flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=HERE.parents[1], **pipes) as trainer:
        trainer.stdout.readline()
        worker = pathlib.Path(f"/proc/{worker_of(trainer.pid)}")
        trainer.kill()
    deadline = time.monotonic() + 10
    while worker.exists() and time.monotonic() < deadline:
        if "Z" in (worker / "stat").read_text().split(")")[1][:3]:
            break
        time.sleep(0.1)
    else:
        assert not worker.exists()
    assert is_equivalent(r"\sqrt{8}", "1") is False
    limits = pathlib.Path(f"/proc/{worker_of(os.getpid())}/limits").read_text()
    rows = {line[:26].strip(): line[26:].split()[0] for line in limits.splitlines()}
    assert rows["Max address space"] == str(2 << 30) and rows["Max file size"] == "0"


@pytest.mark.parametrize(
    ("response", "answer", "require", "correct"), read_table(__file__, "markers")
)
def test_markers_can_be_required(response, answer, require, correct):
    assert is_equivalent(response, answer, require) is correct


@pytest.mark.parametrize(("response", "answer", "correct"), read_table(__file__, "released"))
def test_the_released_scorer_reads_a_label_near_the_end_and_compares_strings(
    response, answer, correct
):
    assert dapo(response, answer, "").correct is correct
    assert is_equivalent(response, answer, "dapo") is correct


def verdicts_of(questions: list[tuple], workers: int = 1, **settings: str) -> tuple[list, int]:
    """Return the verdicts of a pool on (problem, answer, gold), and its killed workers."""
    extras = open_extras({f"math.{name}": value for name, value in settings.items()})
    pool = RewardPool(Reward(verifier="math", workers=workers), extras=extras)
    try:
        futures = [submit(pool, answer, gold, text=text) for text, answer, gold in questions]
        return [future.result()[0] for future in futures], pool.kills
    finally:
        pool.close()


EXPENSIVE = (
    r"\sqrt{1000!+1}",
    r"\sqrt{1000!+1+\sqrt{999!+2+\sqrt{998!+3}}}",
    r"(" + "+".join(rf"\sqrt{{{i}}}" for i in range(2, 20)) + r"+x)^{12}>x",
    r"\cup".join(rf"(\sqrt{{{i}}},\sqrt{{{i + 1}}}+\frac{{1}}{{{i}}})" for i in range(2, 32)),
)


def test_sixty_four_expensive_responses_cost_no_other_its_verdict():
    golds = [r"\sqrt{1000!}", r"(x+\sqrt2)^{12}", r"x>\sqrt{2}", r"(\sqrt2,\sqrt3+\pi)", "x+1"]
    hard = [("", rf"\boxed{{{text} }}", gold) for text in EXPENSIVE for gold in golds] * 4
    easy = [("", rf"\boxed{{\sqrt{{{2 * i * i}}}}}", rf"{i}\sqrt2") for i in range(2, 66)]
    verdicts, kills = verdicts_of(hard + easy, 2, unfinished="right")
    correct = [verdict.correct for verdict in verdicts]
    assert len(hard) > 64 and correct == [False] * len(hard) + [True] * len(easy) and kills == 0


def test_a_vote_among_undecided_answers_takes_linear_time(monkeypatch):
    asked = []
    monkeypatch.setattr(algebra_process, "_undecided", collections.Counter())
    monkeypatch.setattr(algebra_process, "_ask", lambda *pair: asked.append(pair) or TimeoutError())
    answers = [types.SimpleNamespace(extracted=str(i), correct=False) for i in range(40)]
    assert len({*answer_classes(answers, algebra_process.same_answer)}) == 40
    assert len(asked) <= 3 * 40 / 2


def test_a_verdict_says_how_it_was_decided():
    half, no_marker = (r"\boxed{\sqrt{2}/2}", r"\frac{1}{\sqrt2}"), ("first\nsecond", "5" * 9)
    pairs = [(r"\boxed{1/2}", "0.5"), half, half, no_marker, (r"\boxed{1", "1")]
    verdicts, _ = verdicts_of([("", *pair) for pair in pairs])
    decided = ["direct", "algebra", "algebra", "no_marker", "truncated_box"]
    assert [verdict.decided for verdict in verdicts] == decided
    assert [verdict.correct for verdict in verdicts] == [True, True, True, False, False]


def test_an_unfinished_answer_is_right_by_value_alone():
    undone = [pair for pair in PAIRS if pair.group == "a computation left undone"]
    assert len(undone) == 18 and all(is_equivalent(*pair[:2]) for pair in undone)


@pytest.mark.parametrize("gold", ["5", "x+1", r"\sqrt2", "(x-2)^2+y^2=9"])
def test_long_and_nested_answers_are_judged_in_no_time(gold):
    rows = read_table(__file__, "nested")
    texts = [start * times + middle + end * times for times, start, middle, end in rows]
    texts += [",".join(rf"\sqrt{{{10**9 + i}}}" for i in range(100))]
    started = time.process_time()
    for text in texts:
        mine = read(f"{text}=1" if "=" in gold else text)
        compared = Decision(True, texts=(text, gold), compared=((mine, read(gold)),))
        is_unfinished(compared, f"Simplify ${text[:380]}$.")
    assert time.process_time() - started < 3


@pytest.mark.parametrize(("choice", "right"), [("wrong", False), ("right", True)])
def test_a_run_chooses_whether_unfinished_answers_are_right(choice, right):
    pair = [("Say: Compute 2^5.", rf"\boxed{{{text}}}", "32") for text in ("2^5", "32")]
    (verdict, other), _ = verdicts_of(pair, unfinished=choice)
    assert verdict.correct is right and other.correct
    assert (verdict.decided == "unfinished") is not right


@pytest.mark.parametrize(("choice", "right"), [("exact", False), ("as_asked", True)])
def test_a_run_chooses_whether_percent_may_be_left_out_of_the_value(choice, right):
    asked, text = "What percent of 50 is 10?", r"\boxed{20\%}"
    golds = (("20", asked), ("20", "10 of 50?"), ("0.2", asked), ("21", asked))
    verdicts, _ = verdicts_of([(ask, text, gold) for gold, ask in golds], percent=choice)
    assert [verdict.correct for verdict in verdicts] == [right, False, True, False]
    assert as_percentage("20", asked) is None
