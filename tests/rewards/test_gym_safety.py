"""Every task of the installed reasoning-gym is refused, or scores right answers and runs nothing.

No constant wins one that is opened, and no answer takes long.

Slow: CI does not install the package. `python -m pytest -m slow tests/rewards/test_gym_safety.py`
"""

import collections
import os
import socket
import time

import pytest
from gym_items import CONSTANTS, QUESTION, WITHOUT_ANSWER, every_task, gold
from scored import ask, submit

from dapo_jax.config.experiment import Reward
from dapo_jax.data.extraction import LONGEST_ANSWER
from dapo_jax.extras import gym
from dapo_jax.extras.gym import EVALUATING, WON_BY_CONSTANTS, is_finite
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.workers.parent import WorkerProcess

pytestmark = pytest.mark.slow
factory = pytest.importorskip("reasoning_gym").factory
EVERY = every_task(factory)
TASKS = sorted(set(EVERY) - EVALUATING - WON_BY_CONSTANTS)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """Items of codeio come of programs of the package, some of which write files where they are."""
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def test_the_list_names_the_tasks_that_a_constant_wins():
    """A constant wins if it earns more items than the most frequent gold answer plus 3."""
    won = set()
    for task in sorted(set(EVERY) - EVALUATING):
        dataset = factory.create_dataset(task, seed=0, size=16)
        items = [dataset[i] for i in range(16)]
        counts = collections.Counter(gold(item).strip().casefold() for item in items)
        for constant in CONSTANTS:
            answers = [item["question"] if constant is QUESTION else constant for item in items]
            pairs = zip(answers, items, strict=True)
            if sum(score(dataset, *pair) for pair in pairs) > max(counts.values()) + 3:
                won.add(task)
    assert won == WON_BY_CONSTANTS


def score(dataset, answer: str, item: dict) -> bool:
    if not is_finite(answer, item["answer"]):
        return False
    try:
        return dataset.score_answer(answer, item) >= 0.9
    except Exception:  # some scorers raise if an answer can't be parsed
        return False


@pytest.mark.parametrize("seed", [1, 2])
def test_right_answers_score_1(seed):
    worker = WorkerProcess("dapo_jax.rewards.worker", "scores")
    lower = []
    for task in TASKS:
        dataset = gym.open_task("data.source", task, seed, 50)
        worker.prepare({"source": f"gym:{task}", "metadata": None, "answer": None})
        for item in (dataset[i] for i in range(50)):
            if task in WITHOUT_ANSWER or len(gold(item)) > LONGEST_ANSWER:
                continue
            # Also where it is not compared with gold.
            assert is_finite(f"{gold(item)} .", item["answer"]), (task, gold(item))
            job = {"source": f"gym:{task}", "metadata": gym.pack_item(item), "answer": gold(item)}
            reply = worker.ask(job, time.monotonic() + 60)
            if reply != {"parts": {"gym": 1.0}, "failure": None, "counts": {}}:
                lower.append((task, gold(item), reply))
    worker.kill()
    assert lower == []


def payloads(file: str, port: int) -> list[str]:
    return [
        f"__import__('os').system('touch {file}')",
        f"open('{file}', 'w')",
        f"[__import__('subprocess').run(['touch', '{file}'])]",
        f"__import__('socket').create_connection(('127.0.0.1', {port}))",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen']"
        f"[0](['touch', '{file}'])",
        f"S(\"__import__('os').system('touch {file}')\")",
        f"x + sqrt(exec(\"open('{file}', 'w')\"))",
        f"ｏｐｅｎ('{file}', 'w')",
        "9**9**9**9",
        "1e999999999",
        "(" * 100_000 + "1",
        "a" * 1_000_000,
        "exit()",
        "exp(" * 30 + "x" + ")" * 30,
        "R U R' U' " * 600,
        "inf",
        "print('{\"score\": 1}')",
    ]


def test_payloads_behind_the_marker_never_run(tmp_path):
    """Through the pool, as in training: no file, no connection, no right verdict, no long wait."""
    made = tmp_path / "made"
    pool = RewardPool(Reward(verifier="math", parts="gym=1", workers=2, timeout_seconds=5.0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        texts = payloads(str(made), server.getsockname()[1])
        pending = []
        for task in TASKS:
            item = gym.open_task("data.source", task, 0, 1)[0]
            own = {"source": f"gym:{task}", "metadata": gym.pack_item(item)}
            for text in texts:
                for response in (f"<answer>{text}</answer>", f"so #### {text}"):
                    pending.append((task, text, submit(pool, response, gold(item), **own)))
        began, slowest = time.monotonic(), 0.0
        verdicts = []
        for task, text, future in pending:
            before = time.monotonic()
            verdicts.append((task, text, future.result(timeout=60)[0]))
            slowest = max(slowest, time.monotonic() - before)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    right = {(task, text[:40]) for task, text, verdict in verdicts if verdict.correct}
    print(f"{len(verdicts)} verdicts in {time.monotonic() - began:.0f} s, slowest {slowest:.1f} s,")
    print(f"{pool.kills} workers killed", right)
    (after,) = ask(pool, [("<answer>7</answer>", "7")])
    pool.close()
    assert not made.exists() and not list(tmp_path.iterdir())
    assert not right  # a worker that computes for over 2 s is killed, which counts as wrong
    assert slowest < 15 and after.correct
