"""Tasks of reasoning-gym that are refused, and scorers that misbehave; without the package."""

import importlib
import sys
import time
import types

import pytest

from dapo_jax.config.experiment import Reward
from dapo_jax.rewards.gym import evaluating_scorers, tasks
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


@pytest.fixture
def open_newer(tmp_path, monkeypatch):
    """Opens a task of a package with these two modules."""

    def open_task(task: str, helper: str = "", name: str = "invented"):
        package = f"newer{time.monotonic_ns()}"
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("from .task import Task")
        (folder / "task.py").write_text(f"{task}\n\nclass Task:\n    pass\n")
        (folder / "helper.py").write_text(helper)
        monkeypatch.syspath_prepend(tmp_path)
        dataset = importlib.import_module(package).Task
        factory = types.SimpleNamespace(
            create_dataset=lambda task, **settings: dataset(), DATASETS={name: dataset}
        )
        monkeypatch.setattr(tasks, "_factory", lambda *_: factory)
        tasks._scorer.cache_clear()
        return tasks.open_task("data.source", name, 0, 10)

    yield open_task
    tasks._scorer.cache_clear()


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
