"""Injected failures: each is typed, and costs its own response only."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from concurrent import futures
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import make_completion, make_prompt
from scored import ask, judge_groups, say

from dapo_jax.config.experiment import Config, Reward
from dapo_jax.extras.math import algebra_process
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.rewards.pool import BatchScorer, RewardPool
from dapo_jax.runtime.workers import parent as process_module
from dapo_jax.types.structs import SLOW, Outcome

FRAGILE = """
import os, signal, time, urllib.request

def fragile(prompt, response, answer):
    word = response.split()[0]
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "hang":
        time.sleep(3600)
    if word == "memory":
        bytearray(1 << 60)
    if word == "disk":
        with open("/dev/full", "w") as file:
            file.write("no space is left there")
    if word == "judge":
        urllib.request.urlopen("http://127.0.0.1:1/")
    if word == "raise":
        raise KeyError(word)
    return len(response) / 10
"""
OUTCOMES = {
    "kill": Outcome.CRASH,
    "stop": Outcome.TIMEOUT,
    "hang": Outcome.TIMEOUT,
    "memory": Outcome.MEMORY,
    "disk": Outcome.USER_ERROR,
    "judge": Outcome.JUDGE_UNAVAILABLE,
    "raise": Outcome.USER_ERROR,
    "verifier_kill": Outcome.CRASH,
    "verifier_stop": Outcome.TIMEOUT,
    "verifier_babble": Outcome.CRASH,
    "lost": Outcome.ENVIRONMENT_ERROR,
}


def break_verifiers(patch) -> None:
    """Kill or stop the verifier's process as soon as it gets such a response, or let it babble."""
    ask, exchange = process_module.WorkerProcess.ask, process_module.WorkerProcess._exchange

    def break_and_ask(self, job, deadline, computing=0.0):
        words = {question[0].split()[0] for question in job.get("questions", ())}
        if "verifier_kill" in words:
            os.kill(self.pid, signal.SIGKILL)
        if "verifier_stop" in words:
            os.kill(self.pid, signal.SIGSTOP)
        return ask(self, job, deadline, computing)

    def exchange_and_babble(self, message, deadline):
        reply = exchange(self, message, deadline)
        return b"no json\n" if b"verifier_babble" in message else reply

    patch.setattr(process_module.WorkerProcess, "ask", break_and_ask)
    patch.setattr(process_module.WorkerProcess, "_exchange", exchange_and_babble)


def respond(text: str):
    lost = {"failures": ("the game is broken",), "lost_environment": True}
    return say(text, 1 + len(text) % 9, **lost if text.startswith("lost") else {})


def test_failures_are_typed_and_cost_their_own_responses(write_module, monkeypatch):
    write_module("fragile_parts", FRAGILE)
    break_verifiers(monkeypatch)
    monkeypatch.setattr("dapo_jax.rewards.pool.LATE_FACTOR", 1)
    monkeypatch.setattr(algebra_process, "BUSY_FACTOR", 2)
    parts = "rule=1,fragile_parts:fragile=0.5"
    config = Config(reward=Reward(parts=parts, workers=4, timeout_seconds=1.0))
    bad = np.random.default_rng(0).permutation(40)[: len(OUTCOMES)].tolist()
    words = dict(zip(bad, OUTCOMES, strict=True))
    texts = [f"{words.get(i, 'sound')} {'s' * (i % 7)} #### {7 + i % 2}" for i in range(40)]
    texts = [texts[i : i + 4] for i in range(0, 40, 4)]
    groups, _ = judge_groups(config, *(map(respond, own) for own in texts))
    failed = [own for group in groups for own in group.failed]
    assert len(failed) == len(bad)
    for done, failure in failed:
        assert failure.outcome == OUTCOMES[done.text.split()[0]]
    for own, group in zip(texts, groups, strict=True):
        sound = [text for text in own if text.startswith("sound")]
        assert [done.text for done in group.completions] == sound
        expected = [(1 if text[-1] == "7" else -1) + 0.05 * len(text) for text in sound]
        np.testing.assert_allclose(group.rewards, expected, rtol=1e-12)
        assert group.is_broken == (len(sound) < 2)


# --- slow machines and slow texts ----------------------------------------------------------------


def test_a_worker_that_was_stopped_for_a_while_decides_in_its_second_try(monkeypatch):
    start, stopped = process_module.WorkerProcess.ask, []

    def stop_and_ask(self, job, deadline, computing=0.0):
        if len(stopped) < 2:  # the second is woken in time
            stopped.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)
            if len(stopped) == 2:
                threading.Timer(1.0, os.kill, (self.pid, signal.SIGCONT)).start()
        return start(self, job, deadline, computing)

    monkeypatch.setattr(process_module.WorkerProcess, "ask", stop_and_ask)
    with contextlib.closing(RewardPool(Reward(timeout_seconds=0.5))) as pool:
        (verdict,) = ask(pool, [("#### 7", "7")])
    assert verdict.correct and verdict.failure is None
    assert pool.kills == 1 and len(set(stopped)) == 2


SLOW_VERIFIER = """
import time
from dapo_jax.runtime.workers.child import serve

def answer(job):
    words = [question[0] for question in job["questions"]]
    while "compute" in words:
        pass
    if "sleep" in words:
        time.sleep(60)
    return {"replies": [[True, "1", "box"]] * len(words)}

serve(lambda: answer)
"""


def test_a_text_that_computes_too_long_is_wrong_and_one_that_waits_has_no_verdict(monkeypatch):
    start = process_module.subprocess.Popen

    def popen(command, **options):
        return start([sys.executable, "-c", SLOW_VERIFIER], **options)

    monkeypatch.setattr(process_module.subprocess, "Popen", popen)
    pool = RewardPool(Reward(workers=1, timeout_seconds=0.5, verifier="math"))
    texts = ["fine", "compute", "fine", "sleep", "fine"]
    verdicts = []
    # The first limit holds also if other programs leave the text a hundredth of a core.
    for factor, part in (100, texts[:3]), (4, texts[3:]):
        monkeypatch.setattr(algebra_process, "BUSY_FACTOR", factor)
        verdicts += ask(pool, [(text, "1") for text in part])
    pool.close()
    fine, compute, _, sleep, _ = verdicts
    assert [verdict.correct for verdict in verdicts] == [text == "fine" for text in texts]
    assert (compute.failure, compute.decided, fine.failure) == (None, SLOW, None)
    assert sleep.failure.outcome == Outcome.TIMEOUT
    prompt, tokens = make_prompt(0, [2]), make_completion([5, 6])
    group = reward_group(Config(), prompt, (tokens,) * 5, tuple(verdicts))
    names = [Outcome.RIGHT, Outcome.WRONG, Outcome.RIGHT, Outcome.RIGHT, Outcome.TIMEOUT]
    assert group.outcomes == names


def test_a_verdict_that_nothing_reads_fails_without_harm(write_module, monkeypatch):
    write_module("fragile_parts", FRAGILE)
    reward = Reward(parts="fragile_parts:fragile=1", correct="spread", timeout_seconds=1.0)
    break_verifiers(monkeypatch)
    with contextlib.closing(RewardPool(reward)) as pool:
        (verdict,) = ask(pool, [("verifier_kill #### 7", "7")])
    assert verdict.failure is None and verdict.parts["fragile_parts:fragile"] == 2.0


@pytest.mark.parametrize("turns", range(6))
def test_calls_that_come_as_a_task_ends_are_answered(turns):
    """In any turn of the event loop after the reply to earlier ones."""

    async def score() -> list:
        replies = [futures.Future[list](), futures.Future[list]()]
        pool: Any = mock.Mock(submit=mock.Mock(side_effect=replies))
        scorer = BatchScorer(pool, 1, 1, list)
        first = asyncio.create_task(scorer.score(["a"]))
        await asyncio.sleep(0.01)
        replies[1].set_result(["of b"])
        replies[0].set_result(["of a"])
        for _ in range(turns):
            await asyncio.sleep(0)
        second = asyncio.create_task(scorer.score(["b"]))
        return [await first, await asyncio.wait_for(second, 1.0)]

    assert asyncio.run(score()) == [["of a"], ["of b"]]


def test_a_pool_that_fails_ends_the_calls_it_had_and_answers_those_behind():
    async def score() -> list:
        replies = [futures.Future[list](), futures.Future[list]()]
        replies[0].set_exception(RuntimeError("broken"))
        replies[1].set_result(["of b"])
        pool: Any = mock.Mock(submit=mock.Mock(side_effect=replies))
        scorer = BatchScorer(pool, 1, 1, list)
        both = asyncio.gather(scorer.score(["a"]), scorer.score(["b"]), return_exceptions=True)
        return await asyncio.wait_for(both, 1.0)

    error, values = asyncio.run(score())
    assert isinstance(error, RuntimeError) and values == ["of b"]
