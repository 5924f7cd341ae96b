"""Reward functions that see all responses to a prompt: one call gives each of them its reward."""

import dataclasses
import re

import numpy as np
import pytest
from conftest import make_completion, make_prompt

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Reward
from dapo_jax.rewards.judge import Judge
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.workers.pickled_functions import register_function
from dapo_jax.structs import Group

OWN = """
import asyncio, os, sys, time
import numpy as np

def shortest(prompt, responses, answer, lengths, correct):
    assert [len(response) for response in responses] == lengths
    right = [n for n, ok in zip(lengths, correct) if ok]
    return [float(ok and n == min(right)) for n, ok in zip(lengths, correct)]

def ranks(responses, lengths, **others):
    responses.sort()  # a list of its own
    assert sorted(others) == ["answer", "correct", "prompt"]
    return np.argsort(np.argsort(lengths, kind="stable"), kind="stable")

async def later(responses, answer, **others):
    await asyncio.sleep(0.01)
    return tuple(response.count(answer) for response in responses)

def alone(prompt, response, answer):
    return len(response)

def fussy(prompt, responses, answer, lengths, correct):
    text = " ".join(responses)
    if "leave" in text:
        sys.exit(3)
    if "hang" in text:
        time.sleep(60)
    found = {"nan": [1.0, float("nan")], "few": [1.0], "one": 3.0, "words": ["good", "bad"]}
    return next((values for word, values in found.items() if word in text), [1.0, 2.0])

def lacks_answers(prompt, responses):
    return [0.0 for _ in responses]
"""


def make_config(parts: str, **reward) -> Config:
    return Config(algorithm=algorithms.grpo(), reward=Reward(parts=parts, **reward))


def say(text: str):
    return dataclasses.replace(make_completion([5] * len(text)), text=text)


def judge_groups(config: Config, *groups: list[str]) -> tuple[list[Group], int]:
    """Groups through the real pool and its processes, and the count of those that were killed."""
    pool = RewardPool(config.reward)
    judge = Judge(config, pool)
    try:
        pending = [
            judge.submit(make_prompt(i, [2], answer="7"), tuple(map(say, texts)))
            for i, texts in enumerate(groups)
        ]
        return judge.groups(pending), pool.kills
    finally:
        judge.close()


TEXTS = ["#### 7", "so #### 7", "#### 8", "#### 7", ""]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_function_rewards_each_response_of_its_group(write_module, workers):
    write_module("own", OWN)
    parts = "rule=1,own:ranks=2,own:shortest=0.5,own:later=1,own:alone=0.1"
    config = make_config(parts, workers=workers)
    groups, kills = judge_groups(config, TEXTS, TEXTS[1:3], TEXTS[:1])
    whole, pair, single = groups
    assert list(whole.reward_parts) == [part.partition("=")[0] for part in parts.split(",")]
    np.testing.assert_array_equal(whole.reward_parts["own:shortest"], [0.5, 0, 0, 0.5, 0])
    np.testing.assert_array_equal(whole.reward_parts["own:ranks"], [2, 8, 4, 6, 0])
    np.testing.assert_array_equal(whole.reward_parts["own:later"], [1, 1, 0, 1, 0])
    np.testing.assert_allclose(whole.reward_parts["own:alone"], [0.6, 0.9, 0.6, 0.6, 0])
    np.testing.assert_allclose(whole.rewards, sum(whole.reward_parts.values()))
    np.testing.assert_array_equal(pair.reward_parts["own:shortest"], [0.5, 0])
    np.testing.assert_array_equal(pair.reward_parts["own:ranks"], [2, 0])
    np.testing.assert_array_equal(single.reward_parts["own:ranks"], [0])
    assert kills == 0 and not any(group.broken or group.token_rewards for group in groups)


FAILURES = [
    ("nan", "own:fussy: .*returned nan: must be finite"),
    ("few", "own:fussy: .*returned 1 numbers: must be 2 numbers, one per response"),
    ("one", "own:fussy: .*returned 3.0: must be 2 numbers, one per response"),
    ("words", "own:fussy: .*returned 'good': must be a number"),
    ("leave", "own:fussy: .*the worker died"),
    ("hang", "own:fussy: TimeoutError"),
]


def test_a_function_that_fails_breaks_its_group_and_no_other(write_module):
    write_module("own", OWN)
    config = make_config("rule=1,own:fussy=1,own:alone=1", workers=2, timeout_seconds=1.0)
    fine = ["#### 7", "#### 8"]
    bad = [["#### 7", f"#### 8 {word}"] for word, _ in FAILURES]
    (first, *broken, last), kills = judge_groups(config, fine, *bad, fine)
    for group in first, last:
        assert group.broken is None
        np.testing.assert_array_equal(group.reward_parts["own:fussy"], [1, 2])
    for i, (group, (_, cause)) in enumerate(zip(broken, FAILURES, strict=True), 1):
        assert not np.isfinite(group.rewards).any()  # never 0
        assert np.isfinite(group.reward_parts["own:alone"]).all()
        assert re.search(f"{cause}.*; prompt p{i}", group.broken), group.broken
        assert group.correct.tolist() == [True, False]
    assert kills == 4  # what left and what hung, each tried twice


def test_other_parameters_are_refused_with_those_that_are_given(write_module):
    write_module("own", OWN)
    with pytest.raises(ConfigError, match=r"'own:lacks_answers'.*responses=, answer=, lengths=, c"):
        RewardPool(Reward(parts="own:lacks_answers=1"))


def test_each_group_is_judged_on_one_process(monkeypatch):
    calls = []

    def seen(prompt, responses, answer, lengths, correct):
        calls.append(responses)
        return lengths

    config = make_config(f"{register_function(seen, True)}=1")
    monkeypatch.setattr(processes, "count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(processes, "index", lambda process=process: process)
        judge = Judge(config, RewardPool(config.reward))
        pending = [judge.submit(make_prompt(i, [2]), (say(f"{i}"), say("b"))) for i in range(4)]
        verdicts = [[v.result(timeout=60) for v in group.verdicts] for group in pending]
        assert [len(group) for group in verdicts] == [2 * (i % 2 == process) for i in range(4)]
        judge.close()
    assert sorted(calls) == [[f"{i}", "b"] for i in range(4)]
