"""Tasks and answers that are refused, and scorers that misbehave; without reasoning-gym itself."""

import importlib
import sys
import time
import types

import pytest

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.gym import constants, evaluating_scorers, tasks
from dapo_jax.rewards.gym.answers import unfit
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.workers.parent import WorkerProcess

SCORERS = {
    "eval": "def score(answer):\n    return eval(answer)",
    "exec": "score = exec",
    "compile": "def score(answer):\n    return compile(answer, '', 'eval')",
    "literal_eval": "import types\n\nscore = lambda tools: tools.literal_eval",
    "sympy": "import sympy as s\n\ndef score(answer):\n    return s.simplify(answer)",
    "subprocess": "def score(answer):\n    from subprocess import run",
    "import_module": "import importlib\n\nscore = importlib.import_module",
}


# Class body of a task: the answer of item i, and what its scorer returns.
BODY = """
    def __getitem__(self, i):
        return {{"question": f"What is {{i}} and 100?", "answer": {answer}}}

    def score_answer(self, answer, item):
        return {score}
"""
NUMBER, EQUAL = "str(100 + i)", "float(answer == item['answer'])"
QUESTIONS = BODY.format(answer=NUMBER, score=EQUAL)


@pytest.fixture
def open_newer(tmp_path, monkeypatch):
    """Opens a task of a package with these two modules."""

    def open_task(task: str, helper: str = "", name: str = "invented", body: str = QUESTIONS):
        package = f"newer{time.monotonic_ns()}"
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("from .task import Task")
        (folder / "task.py").write_text(f"{task}\n\nclass Task:{body}")
        (folder / "helper.py").write_text(helper)
        monkeypatch.syspath_prepend(tmp_path)
        dataset = importlib.import_module(package).Task
        factory = types.SimpleNamespace(
            create_dataset=lambda task, **settings: dataset(), DATASETS={name: dataset}
        )
        monkeypatch.setattr(tasks, "_factory", lambda *_: factory)
        forget()
        return tasks.open_task("data.source", name, 0, 10)

    def forget() -> None:
        tasks._scorer.cache_clear()
        tasks._probe.cache_clear()

    yield open_task
    forget()


@pytest.mark.parametrize("name", sorted(evaluating_scorers.EVALUATING))
def test_a_task_that_evaluates_the_answer_is_refused_by_name(name, open_newer):
    """Whatever its source looks like; the error says why, and what is allowed."""
    refused = rf"config.data.source = 'gym:{name}': its scorer evaluates the answer.*has "
    with pytest.raises(ConfigError, match=refused):
        open_newer("", name=name)
    with pytest.raises(ConfigError, match="evaluates the answer"):
        tasks.gym_score(name, "{}", "1")


@pytest.mark.parametrize("name", sorted(evaluating_scorers.READING))
def test_a_known_task_that_reads_the_answer_is_opened(name, open_newer):
    assert open_newer(SCORERS["eval"], name=name) is not None


@pytest.mark.parametrize("name", SCORERS)
def test_a_task_of_a_newer_release_that_could_evaluate_is_refused_by_name(name, open_newer):
    """Also where what evaluates stands in another module of the package, loaded or not."""
    refused = (
        rf"config.data.source = 'gym:invented': its scorer may evaluate text \(.*{name}.*\), and"
    )
    with pytest.raises(ConfigError, match=refused):
        open_newer(SCORERS[name])
    for task in (
        "from .helper import score",
        "from . import helper",
        "def f(): from . import helper",
    ):
        with pytest.raises(ConfigError, match=refused):
            open_newer(task, SCORERS[name])
    with pytest.raises(ConfigError, match="may evaluate text"):  # the worker does not ask it either
        tasks.gym_score("invented", "{}", "1")


def test_a_task_that_compares_is_opened(open_newer):
    task = "import json, re\nfrom .helper import f\n\nPATTERN = re.compile('a')"
    assert open_newer(task, "def f(a): return json.loads(a)") is not None


def test_a_task_without_source_is_refused(open_newer, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "__file__", "gone.so")
    dataset = type("Task", (), {"__module__": __name__})()
    evaluating_scorers._read_module.cache_clear()
    assert "can't be read" in evaluating_scorers.refusal("invented", dataset)


# --- constants ------------------------------------------------------------------------------

SCORES = {  # scorers, and the constant that wins them
    "the first digits": ("float(item['answer'].startswith(answer[:1]))", "'' wins 16 of its 16"),
    "any text": ("1.0", "'' wins 16"),
    "any number": ("float(answer) * 0 + 1", "'0' wins 16"),
    "what was asked": ("float(answer.endswith('and 100?'))", "the question's own text wins 16"),
    "nearly all of it": ("0.95 * (answer == 'True')", "'True' wins 16"),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_task_that_a_constant_wins_is_refused_by_name(name, open_newer):
    """A newer release's too; the error says which constant, how often, and what is allowed."""
    score, words = SCORES[name]
    with pytest.raises(ConfigError, match=f"'gym:invented': its scorer rewards.* {words}.*has "):
        open_newer("", body=BODY.format(answer=NUMBER, score=score))


@pytest.mark.parametrize("name", sorted(constants.WON_BY_CONSTANTS))
def test_a_known_task_that_a_constant_wins_is_no_task_that_is_allowed(name, open_newer):
    with pytest.raises(ConfigError, match=r"'0' wins 16 of its 16 items; reasoning-gym has $"):
        open_newer("", name=name, body=BODY.format(answer=NUMBER, score="float(answer == '0')"))


HONEST = {
    "yes or no": ("['True', 'False'][i % 2]", EQUAL),
    "nearly always yes": ("['True', 'False'][i == 5]", EQUAL),
    "1 and 1.0": ("['1', '1.0', '2'][i % 3]", "float(answer) == float(item['answer'])"),
    "no answer is given": ("None", "float(answer == 'a right one')"),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_task_whose_right_answer_is_often_the_same_is_opened(name, open_newer):
    answer, score = HONEST[name]
    assert open_newer("", body=BODY.format(answer=answer, score=score)) is not None


def test_a_task_is_probed_once(open_newer, monkeypatch):
    probed = []
    monkeypatch.setattr(tasks, "won_constant", lambda items, score: probed.append(len(items)))
    open_newer("")
    tasks.open_task("data.heldout_source", "invented", 1, 20)
    assert probed == [constants.ITEMS]


# --- answers --------------------------------------------------------------------------------

UNFIT = [  # answer, gold, why
    ("NaN", "-10.0 - 4.0i", "not a finite number"),
    ("nan+nanj", "-10.0 - 4.0i", "not a finite number"),
    ("(naNj)", "3i", "not a finite number"),
    ("[NaN, NaN]", "['-24.1', '3']", "not a finite number"),
    ("-Infinity", "0.5", "not a finite number"),
    ("sNaN", "12", "not a finite number"),
    ("NaN123", "12", "not a finite number"),
    ("1e999", "3/4", "not a finite number"),
    ("1e-999999999", "0.25", "not a finite number"),
    ("\\infty", "$\\dfrac{54}{275}$", "not a finite number"),
    ("inf", "", "not a finite number"),
    ("exp(" * 30 + "9" + ")" * 30, "42", "brackets nest deeper than 20"),
    ("[" * 4000, "[[1]]", "brackets nest deeper than 20"),
    ("exp(1)+" * 30, "42", "more than 20 functions"),
    ("R U " * 1200, None, "more than 300 pieces"),
    ("w,A1,B3;" * 400, "['w,A1,B3']", "more than 300 pieces"),
    ("R99999999", None, "numbers add up to more than 1000"),
    ("A+" + "9" * 9000, None, "numbers add up to more than 1000"),
    ("R500 L600", None, "numbers add up to more than 1000"),
]
FIT = [
    ("-10 - 4i", "-10.0 - 4.0i"),
    ("5 bananas", "5"),
    ("nancy", "nancy"),
    ("infeasible", "infeasible"),
    ("NAN,NAB", "FAN,FAB"),
    ("1e5", "100000"),
    ("0x1e99999", "0x1e99999"),
    ("[[1, 2], [3, 4]]", "[[1, 2], [3, 5]]"),
    ("(((A ∧ B) → C) ∨ ¬(A ∧ C))", None),
    ("F+1 K+1 M-1 C+3 H+2", None),
    ("R U' R2 B3", None),
    ("Move disk 1 from Peg 1 to Peg 3\n" * 127, "Move disk 1 from Peg 1 to Peg 2\n" * 127),
    ("[" * 40 + "]" * 40, "[" * 40 + "0" + "]" * 40),
    ("", "1"),
]


@pytest.mark.parametrize(("answer", "gold", "why"), UNFIT)
def test_what_no_right_answer_holds_reaches_no_scorer(answer, gold, why, open_newer, monkeypatch):
    assert why in (unfit(answer, gold) or "")
    monkeypatch.setattr(tasks, "won_constant", lambda *_: None)
    dataset = open_newer("", body=BODY.format(answer=NUMBER, score="float(answer != '100') * 99"))
    item = tasks.pack_item(dataset[0] | {"answer": gold})
    assert tasks.gym_score("invented", item, answer) == 0.0
    assert tasks.gym_score("invented", item, "7") == 99.0


@pytest.mark.parametrize(("answer", "gold"), FIT)
def test_what_a_right_answer_may_hold_reaches_the_scorer(answer, gold):
    assert unfit(answer, gold) is None


def test_the_check_of_an_answer_takes_no_time():
    began = time.monotonic()
    for answer in (
        "(" * 10_000,
        "a(" * 5_000,
        "1" * 10_000,
        "e" * 10_000,
        " \n,;" * 2_500,
        "\\a" * 5000,
    ):
        for gold in ("1", None, "word"):
            unfit(answer, gold)
    assert time.monotonic() - began < 1.0


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
    monkeypatch.syspath_prepend(tmp_path)
    pool = RewardPool(Reward(verifier="math", parts="gym=1", workers=1, timeout_seconds=1.0))
    texts = ["1", "hang", "1", "eat", "1", "die", "leave", "1", "nan", "0.5", "1"]
    pending = [pool.submit("", f"#### {text}", "1", "gym:odd", "{}") for text in texts]
    verdicts = [future.result(timeout=60) for future in pending]
    pool.close()
    assert [verdict.correct for verdict in verdicts] == [text == "1" for text in texts]
    failures = {text: verdict.failure for text, verdict in zip(texts, verdicts, strict=True)}
    assert failures["hang"].startswith("TimeoutError") and failures["eat"].startswith("MemoryError")
    assert "died" in failures["die"] and "died" in failures["leave"] and failures["nan"] is None
    assert pool.kills == 6 and verdicts[-2].parts == {"gym": 0.5}


SLOW_TO_START = """
import time


class Task:
    def score_answer(self, answer, entry):
        while answer == "compute":
            pass
        return float(answer)


class factory:
    DATASETS = {"slow": Task}

    def create_dataset(task):
        time.sleep(2.5)
        return Task()
"""


@pytest.fixture
def slow_pool(tmp_path, monkeypatch):
    """Pool for a package whose task takes longer to make ready than a response may take."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text(SLOW_TO_START)
    monkeypatch.syspath_prepend(tmp_path)
    pools = []

    def make(seconds: float) -> RewardPool:
        reward = Reward(verifier="math", parts="gym=1", workers=1, timeout_seconds=seconds)
        pools.append(RewardPool(reward))
        return pools[-1]

    yield make
    pools[-1].close()


def test_a_scorer_is_made_ready_before_its_clock_starts(slow_pool):
    """So rearc, whose sources take seconds to parse, and its worker would die before the end."""
    pool = slow_pool(1.0)
    pending = [pool.submit("", "#### 1", "1", "gym:slow", "{}") for _ in range(3)]
    verdicts = [future.result(timeout=60) for future in pending]
    assert [verdict.failure for verdict in verdicts] == [None] * 3
    assert all(verdict.correct for verdict in verdicts) and pool.kills == 0


def test_an_answer_that_computes_without_end_costs_seconds_once(slow_pool):
    """Not the whole limit of a response, and not again: it would compute again."""
    pool = slow_pool(30.0)
    assert pool.submit("", "#### 1", "1", "gym:slow", "{}").result(timeout=60).correct
    began = time.monotonic()
    verdict = pool.submit("", "#### compute", "1", "gym:slow", "{}").result(timeout=60)
    assert time.monotonic() - began < 15 and "computed for too long" in verdict.failure
    assert not verdict.correct and pool.kills == 1


def test_the_scorers_process_is_limited():
    worker = WorkerProcess("dapo_jax.rewards.worker", "gym")
    try:
        job = {"source": "gym:", "metadata": "{}", "answer": "1"}
        assert worker.ask(job, time.monotonic() + 60)["score"] == 0.0
        limits = open(f"/proc/{worker._process.pid}/limits").read().splitlines()
        bounded = {line.split("  ")[0]: line.split()[-3] for line in limits[1:]}
        assert (bounded["Max file size"], bounded["Max address space"]) == ("0", str(2 << 30))
    finally:
        worker.kill()
