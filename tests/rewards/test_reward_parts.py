"""Rewards of several parts: functions of a response and of a group, and what failures cost."""

import dataclasses
import json
import re

import numpy as np
import pytest
from conftest import make_completion, make_prompt
from row_files import read_table
from scored import judge_groups, say

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Reward, Sampler
from dapo_jax.rewards.functions import BUILTIN_FUNCTIONS, TRAINER_PARTS, think_format
from dapo_jax.rewards.group_rewards import Judge, reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rollout.dynamic_sampling import carries_signal
from dapo_jax.run.metrics import response_metrics
from dapo_jax.runtime import processes
from dapo_jax.runtime.workers.pickled_functions import register_function
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Group, Turn, Verdict, repetition

OWN = """
import os

print("imported")

def fussy(prompt, response, answer):
    print("a line for nobody")
    os.write(1, b"another one")
    os.system("echo and a third")
    return len(response)

not_a_function = 3
"""


def make_config(parts: str, algorithm=None, **reward) -> Config:
    algorithm = algorithm or algorithms.grpo()
    sampler = Sampler(max_response_tokens=40)
    return Config(algorithm=algorithm, sampler=sampler, reward=Reward(parts=parts, **reward))


# --- the setting ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "rule", "rule=", "=1", "rule=one", "rule=1,", "rule=1=2", "rule=1,rule=2", "rule=inf"],
)
def test_parts_that_are_no_weights_by_name_are_refused(text):
    with pytest.raises(ConfigError, match="config.reward.parts = .* each name once"):
        Reward(parts=text).weights()


def test_help_names_every_ready_part():
    (text,) = (
        one.metadata["explanation"] for one in dataclasses.fields(Reward) if one.name == "parts"
    )
    assert {*TRAINER_PARTS, *BUILTIN_FUNCTIONS} <= {*re.findall(r"\w+", text)}


@pytest.mark.parametrize(("name", "words"), read_table(__file__, "not_found"))
def test_a_part_that_can_not_be_found_stops_before_the_first_worker(name, words, write_module):
    write_module("own", OWN)
    write_module("broken_module", "1 / 0")
    with pytest.raises(ConfigError, match=f"config.reward.parts = '{name}'.*{words}"):
        RewardPool(Reward(parts=f"rule=1,{name}=1"))


# --- the user's functions in their processes -------------------------------------------------


def test_parts_are_mixed_by_their_weights_and_kept_apart(write_module):
    write_module("own", OWN)
    config = make_config("rule=2,format=0.5,own:fussy=0.1,think_format=3", workers=2)
    texts = ["#### 7", "####  8", "no answer", "<think>a</think><answer>b</answer>"]
    (group,), kills = judge_groups(config, texts)
    lengths = np.array([len(text) for text in texts])
    assert list(group.reward_parts) == ["rule", "format", "own:fussy", "think_format"]
    np.testing.assert_allclose(group.reward_parts["rule"], [2, -2, -2, -2])
    np.testing.assert_allclose(group.reward_parts["format"], [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(group.reward_parts["own:fussy"], 0.1 * lengths)
    np.testing.assert_allclose(group.reward_parts["think_format"], [0, 0, 0, 3])
    np.testing.assert_allclose(group.rewards, sum(group.reward_parts.values()))
    np.testing.assert_allclose(group.raw_rewards, [2, -2, -2, -2] + 0.1 * lengths)
    assert group.correct.tolist() == [True, False, False, False]
    assert not group.failed and kills == 0


# --- ready parts ----------------------------------------------------------------------------


@pytest.mark.parametrize(("response", "expected"), read_table(__file__, "think_format"))
def test_think_format_asks_for_each_tag_once_in_order(response, expected):
    assert think_format("a question", response, "7") == expected


def test_think_format_counts_a_tag_that_the_prompt_opened():
    response = "a</think><answer>b</answer>"
    assert think_format("a question <think>\n", response, "") == 1
    assert think_format("a question <think>\n", "<think>" + response, "") == 0


def test_format_is_an_answer_found_and_repetition_counts_windows_of_tokens():
    config = make_config("format=2,repetition=0.5")
    completions = (make_completion(list(range(20))), make_completion([5] * 20))
    verdicts = (Verdict(False, "8"), Verdict(False, None))
    group = reward_group(config, make_prompt(0, [2]), completions, verdicts)
    np.testing.assert_allclose(group.reward_parts["format"], [2, 0])
    np.testing.assert_allclose(group.reward_parts["repetition"], [0, -0.5 * (1 - 1 / 13)])
    np.testing.assert_array_equal(group.raw_rewards, [0, 0])


def test_repetition_as_a_metric_and_as_a_reward_counts_sampled_tokens_only():
    """An environment that repeats a text is no repetition of the policy."""
    turns = (Turn(True, 10, ""), Turn(False, 20, ""), Turn(True, 10, ""))
    tokens = [*range(10), *[5] * 20, *range(10, 20)]
    completion = dataclasses.replace(make_completion(tokens), turns=turns)
    config = make_config("rule=1,repetition=1")
    group = reward_group(config, make_prompt(0, [2]), (completion,), (Verdict(False, "8"),))
    assert response_metrics([group])["repetition"] == -group.reward_parts["repetition"][0] == 0
    assert repetition(completion.tokens) > 0


@pytest.mark.parametrize("ids", [3, 150_000])
def test_repetition_counts_each_window_once(ids):
    tokens = np.random.default_rng(0).integers(0, ids, 500)
    tokens[300:320] = tokens[100:120]
    windows = [tuple(tokens[i : i + 8]) for i in range(493)]
    assert repetition(tokens) == 1 - len(set(windows)) / 493 > 0


# --- what carries signal --------------------------------------------------------------------


def score_group(config: Config, scores: list[float], lengths=None) -> Group:
    """A group whose responses are all wrong, with those scores of the reward model."""
    done = tuple(say("", tokens) for tokens in lengths or [4] * len(scores))
    verdicts = (Verdict(False, None),) * len(scores)
    return reward_group(config, make_prompt(0, [2]), done, verdicts, np.array(scores))


def test_a_threshold_on_the_raw_reward_decides_what_is_right():
    config = make_config("model=1", correct="threshold", threshold=0.5)
    group = score_group(config, [0.49, 0.5, 2.0, 9.0], lengths=[4, 4, 4, 0])
    assert group.correct.tolist() == [False, True, True, False]  # an empty response never is
    assert carries_signal(group, config.reward)
    assert not carries_signal(score_group(config, [0.5, 0.7]), config.reward)
    assert not carries_signal(score_group(config, [0.1, 0.4]), config.reward)


PARTS = {"own:a": 0.7, "own:b": 0.2, "own:c": 0.1}


def scored(rewards, config=None, **settings) -> Group:
    """Return a group with the parts of each response."""
    weights = ",".join(f"{name}={weight}" for name, weight in PARTS.items())
    config = make_config(weights, **{"correct": "threshold", "threshold": 1.0} | settings)
    verdicts = tuple(Verdict(False, "1", parts=dict(zip(PARTS, r, strict=True))) for r in rewards)
    return reward_group(
        config, make_prompt(0, [1]), (make_completion([5]),) * len(rewards), verdicts
    )


def test_a_sum_that_rounds_to_below_the_threshold_reaches_it():
    group = scored([(1, 1, 1), (1, 1, 0.999), (1, 1, np.float32(0.1) * 10)])
    assert group.raw_rewards[0] < 1 and group.correct.tolist() == [True, False, True]
    group = scored([(100, -345, 0), (100, -345, 1)], threshold=1.1)  # 70 - 69 + 0.1
    assert group.correct.tolist() == [False, True]


@pytest.mark.parametrize(
    ("rewards", "least", "differs"),
    [
        ([(1, 1, 1), (0.9, 1.35, 1)], 0.0, False),
        ([(1, 1, 1), (1, 1, 0.999)], 0.0, True),
        ([(1e6, -35e5, 1), (0, 0, 1 + 1e-9)], 0.0, False),
        ([(1, 0, 0), (1, 0.5, 0)], 0.1, False),
    ],
)
def test_a_spread_is_above_rounding(rewards, least, differs):
    group = scored(rewards, correct="spread", min_spread=least)
    assert carries_signal(group, Reward(correct="spread", min_spread=least)) is differs


@pytest.mark.parametrize("correct", ["verifier", "threshold", "spread"])
def test_parts_that_only_shape_never_carry_signal(correct):
    algorithm = dataclasses.replace(algorithms.grpo(), overlong_punishment=True)
    parts = "format=9,think_format=9,repetition=9"
    config = make_config(parts, algorithm, correct=correct, threshold=0.5)
    done = (make_completion([5] * 40), make_completion([5, 6]))
    verdicts = tuple(
        Verdict(False, extracted, parts={"think_format": thought})
        for extracted, thought in (("8", 0.0), (None, 1.0))
    )
    group = reward_group(config, make_prompt(0, [2]), done, verdicts)
    assert all(np.ptp(part) > 0 for part in group.reward_parts.values())
    assert len(group.reward_parts) == 4 and not carries_signal(group, config.reward)


# --- functions that see all responses to a prompt -------------------------------------------

GROUP_OWN = """
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
"""


TEXTS = ["#### 7", "so #### 7", "#### 8", "#### 7", ""]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_function_rewards_each_response_of_its_group(write_module, workers):
    write_module("own", GROUP_OWN)
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
    assert kills == 0 and not any(group.failed or group.token_rewards for group in groups)


GROUP_FAILURES = read_table(__file__, "group_failures")


def test_a_function_that_fails_breaks_its_group_and_no_other(write_module, monkeypatch):
    monkeypatch.setattr("dapo_jax.rewards.pool.LATE_FACTOR", 1)
    write_module("own", GROUP_OWN)
    config = make_config("rule=1,own:fussy=1,own:alone=1", workers=2, timeout_seconds=1.0)
    fine = ["#### 7", "#### 8"]
    bad = [["#### 7", f"#### 8 {word}"] for word, _ in GROUP_FAILURES]
    (first, *broken, last), kills = judge_groups(config, fine, *bad, fine)
    for group in first, last:
        assert not group.failed
        np.testing.assert_array_equal(group.reward_parts["own:fussy"], [1, 2])
    for i, (group, (_, cause)) in enumerate(zip(broken, GROUP_FAILURES, strict=True), 1):
        assert not group.completions and len(group.failed) == 2 and group.is_broken
        assert re.search(f"{cause}.*; prompt p{i}", group.first_failure), group.first_failure
    assert kills == 4  # what left and what hung, each tried twice


def test_each_group_is_decoded_and_judged_on_one_process(monkeypatch):
    seen, sent = [], []

    def lengths_of(prompt, responses, answer, lengths, correct):
        seen.append(responses)
        return lengths

    def decode(rows: list) -> list[str]:
        seen.append(rows)
        return [f"text {row}" for row in rows]

    def exchange(value, topic):
        sent.append(json.loads(json.dumps(value)))
        return [*sent, [False, []]]

    config = make_config(f"{register_function(lengths_of, True)}=1")
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "all_gather_json", exchange)
    results = []
    for process in range(2):
        monkeypatch.setattr(processes, "index", lambda process=process: process)
        judge = Judge(config, RewardPool(config.reward), decode_all=decode)
        own = make_completion([5]), make_completion([6, 7])
        results.append(judge.groups([judge.submit(make_prompt(0, [2]), own)]))
        judge.close()
    assert seen == [[[5], [6, 7]], ["text [5]", "text [6, 7]"]]  # once, on the first process
    for (group,) in results:
        assert [completion.text for completion in group.completions] == seen[1]
        np.testing.assert_array_equal(group.rewards, [1, 2])
