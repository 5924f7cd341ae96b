"""Tasks and answers that are rejected, and scorers that misbehave; without reasoning-gym itself."""

import functools
import time

import pytest
from gym_items import write_package
from row_files import read_table
from scored import ask

from dapo_jax.config.experiment import Reward
from dapo_jax.extras import gym
from dapo_jax.rewards import verifying, worker
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.verifying import SCORER_ERROR, scores
from dapo_jax.runtime.workers.parent import WorkerProcess
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import SLOW, Outcome

HONEST = """
class Task:
    def score_answer(self, answer, item):
        return 99.0

class factory:
    DATASETS = {"honest": Task, "puzzle24": Task, "coin_flip": Task}

    def create_dataset(task, **settings):
        return Task()
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a module `reasoning_gym` with the metadata of a release."""
    monkeypatch.syspath_prepend(tmp_path)
    return functools.partial(write_package, tmp_path)


@pytest.mark.parametrize(
    ("task", "reason"),
    [(task, "its scorer evaluates the answer") for task in sorted(gym.EVALUATING)]
    + [(task, "its scorer rewards a constant answer") for task in sorted(gym.WON_BY_CONSTANTS)],
)
def test_a_listed_task_is_rejected_by_name(task, reason, install):
    install(HONEST)
    message = rf"config.data.source = 'gym:{task}': {reason}.*; reasoning-gym has honest$"
    with pytest.raises(ConfigError, match=message):
        gym.open_task("data.source", f"gym:{task}", 0, 10)
    with pytest.raises(ConfigError, match=reason):  # in the worker too
        gym.score(task, "{}", "1")
    assert gym.open_task("data.source", "gym:honest", 0, 10) is not None


def test_another_release_is_rejected(install):
    install(HONEST, "0.1.26")
    message = "'gym:honest': needs pip install 'reasoning-gym==0.1.25' .*0.1.26 were not reviewed"
    with pytest.raises(ConfigError, match=message):
        gym.open_task("data.source", "gym:honest", 0, 10)


def test_a_task_takes_settings(install):
    install(HONEST.replace("return Task()", "return settings | {'task': task}"))
    made = gym.open_task("data.source", "gym:honest?largest=3&easy=true", 0, 10)
    del made["seed"]
    assert made == {"task": "honest", "largest": 3, "easy": True, "size": 10}


UNFIT = "9**9 9//2 x+1 f(1) 1e9 1.5 7_0 [1] 1==1 ٣".split() + ["1," * 9]


@pytest.mark.parametrize(
    ("answer", "score"),
    [("(7-3) * 6/1", 99.0), ("(1 + 1)", 99.0), *((answer, 0.0) for answer in UNFIT)],
)
def test_only_arithmetic_reaches_the_scorer_of_countdown(answer, score, install):
    install(HONEST.replace('"honest": Task', '"honest": Task, "countdown": Task'))
    gym._scorer.cache_clear()
    assert gym.score("gym:countdown?max_numbers=3", "{}", answer) == score


# --- answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "gold"), read_table(__file__, "unfit"))
def test_an_answer_that_is_not_finite_reaches_no_scorer(answer, gold, install):
    assert not gym.is_finite(answer, gold)
    install(HONEST)
    item = gym.pack_item({"answer": gold})
    assert gym.score("honest", item, answer) == 0.0
    assert gym.score("honest", item, "7") == 99.0


@pytest.mark.parametrize(("answer", "gold"), read_table(__file__, "fit"))
def test_an_answer_that_may_be_correct_reaches_the_scorer(answer, gold):
    assert gym.is_finite(answer, gold)


def test_checking_an_answer_is_fast():
    began = time.process_time()
    texts = ("(" * 10_000, "a(" * 5_000, "1" * 10_000, "e" * 10_000, " \n,;" * 2_500, "\\a" * 5000)
    for text in texts:
        for gold in ("1", None, "word"):
            gym.is_finite(text, gold)
    assert time.process_time() - began < 1.0


# --- scorers that misbehave -----------------------------------------------------------------

PACKAGE = """
import sys


class Task:
    def score_answer(self, answer, entry):
        if answer == "hang":
            while True:
                pass
        if answer == "eat":
            return len(bytearray(1 << 40))
        if answer == "leave":
            sys.exit(1)
        print("a line for nobody", flush=True)
        return float(answer)


class factory:
    DATASETS = {"odd": Task}

    def create_dataset(task):
        return Task()
"""


def test_a_scorer_that_hangs_or_dies_costs_its_own_response(install, monkeypatch):
    monkeypatch.setattr(verifying, "SCORE_SECONDS", 0.1)  # of a core that others use too
    install(PACKAGE)
    pool = RewardPool(Reward(verifier="math", parts="gym=1", workers=1, timeout_seconds=1.0))
    texts = ["1", "hang", "1", "not 1", "eat", "1", "leave", "1", "nan", "0.5", "1"]
    verdicts = ask(pool, [(f"#### {text}", "1") for text in texts], source="gym:odd", metadata="{}")
    pool.close()
    assert [verdict.correct for verdict in verdicts] == [text == "1" for text in texts]
    assert {t: v.failure.outcome for t, v in zip(texts, verdicts, strict=True) if v.failure} == {
        "eat": Outcome.MEMORY,
        "leave": Outcome.CRASH,
    }
    # What computes without end, or can't be parsed, is wrong.
    assert (verdicts[1].decided, verdicts[3].decided) == (SLOW, SCORER_ERROR)
    assert pool.kills in (3, 4) and verdicts[-2].parts == {"gym": 0.5}


SLOW_TO_START = """
import time


class Task:
    def score_answer(self, answer, entry):
        return float(answer)


class factory:
    DATASETS = {"slow": Task}

    def create_dataset(task):
        time.sleep(1.0)
        return Task()
"""


def test_a_scorer_is_made_ready_before_its_clock_starts(install):
    """So rearc, whose sources take seconds to parse, and its worker would die before the end."""
    install(SLOW_TO_START)
    pool = RewardPool(Reward(verifier="math", parts="gym=1", timeout_seconds=0.5))
    verdicts = ask(pool, [("#### 1", "1")] * 3, source="gym:slow", metadata="{}")
    pool.close()
    assert all(verdict.correct for verdict in verdicts) and pool.kills == 0


def test_the_scorers_process_is_limited():
    worker = WorkerProcess("dapo_jax.rewards.worker", "scores")
    try:
        job = {"source": "gym:", "metadata": "{}", "answer": "1"}
        assert worker.ask(job, time.monotonic() + 60)["parts"] == {}
        limits = open(f"/proc/{worker.pid}/limits").read().splitlines()
        bounded = {line.split("  ")[0]: line.split()[-3] for line in limits[1:]}
        assert (bounded["Max file size"], bounded["Max address space"]) == ("0", str(2 << 30))
    finally:
        worker.kill()


def test_the_source_of_a_problem_says_who_scores_it():
    """Tasks of verifiers have metadata too, and no scorer of their own here."""
    assert scores("gym:countdown") and not scores("verifiers:reverse_text") and not scores("gsm8k")


def test_no_answer_is_wrong_because_its_scorer_cannot_be_loaded(monkeypatch):
    class Source:
        def prepare(name):
            raise ImportError(name)

    monkeypatch.setattr(worker, "limit_process", lambda: None)
    monkeypatch.setattr(worker, "discard_output", lambda: None)
    monkeypatch.setattr(worker, "NUMPY_THREADS", ())
    monkeypatch.setattr(verifying, "find_source", lambda name: Source)
    with pytest.raises(ImportError):
        worker.make_scores()({"source": "own", "metadata": None, "answer": None})
