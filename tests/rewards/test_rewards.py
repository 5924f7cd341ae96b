"""The rule reward, its workers, and the punishment of overlong responses."""

import dataclasses
import sys
import time

import numpy as np
import pytest
from conftest import make_completion, make_prompt
from row_files import read_table

from dapo_jax.config.experiment import Config, Reward, Sampler
from dapo_jax.config.presets import dapo, grpo
from dapo_jax.extras.math import algebra_process
from dapo_jax.extras.math.verifier import final_number
from dapo_jax.rewards.group_rewards import overlong_punishment, reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.runtime.workers import parent as process_module
from dapo_jax.types.structs import Outcome, Verdict


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        *read_table(__file__, "numbers"),
        ("#### " + "9" * 10_000, "7", (False, None)),
        ("#### " + "9" * 300, "9" * 300, (True, "9" * 300)),
    ],
)
def test_only_the_number_behind_the_last_marker_counts(text, answer, expected):
    assert final_number(text, answer, "")[:2] == expected


def test_punishment_is_zero_then_linear_then_minus_one():
    """The paper's own numbers: a budget of 20,480 with a buffer of 4,096."""
    lengths = np.array([0, 1, 16_384, 16_385, 18_432, 20_480, 30_000])
    expected = [0, 0, 0, -1 / 4096, -0.5, -1, -1]
    np.testing.assert_allclose(overlong_punishment(lengths, 20_480, 4_096), expected)


def config_of(algorithm, budget: int) -> Config:
    return Config(algorithm=algorithm, sampler=Sampler(max_response_tokens=budget))


def test_punishment_adds_to_right_and_wrong_alike_and_counts_tokens():
    completions = tuple(make_completion([3] * n) for n in (10, 95, 95))
    verdicts = (Verdict(True, "1"), Verdict(True, "1"), Verdict(False, None))
    group = reward_group(config_of(dapo(), 100), make_prompt(0, [2] * 90), completions, verdicts)
    np.testing.assert_allclose(group.rewards, [1.0, 0.25, -1.75])
    np.testing.assert_allclose(group.reward_parts["overlong"], [0, -0.75, -0.75])
    plain = reward_group(config_of(grpo(), 100), make_prompt(0, [2]), completions, verdicts)
    np.testing.assert_allclose(plain.rewards, [1, 1, -1])


def test_long_correct_responses_lose_the_pass_rate_times_their_relative_length():
    algorithm = dataclasses.replace(grpo(), length_penalty=0.5)
    completions = tuple(make_completion([3] * n) for n in (10, 30, 20, 90))
    verdicts = (*[Verdict(True, "1")] * 3, Verdict(False, None))
    group = reward_group(config_of(algorithm, 100), make_prompt(0, [2]), completions, verdicts)
    np.testing.assert_allclose(group.reward_parts["length"], [0, -0.375, -0.1875, 0])
    np.testing.assert_allclose(group.rewards, [1, 0.625, 0.8125, -1])
    one = completions[:1], verdicts[:1]
    assert reward_group(config_of(algorithm, 100), make_prompt(0, [2]), *one).rewards == [1.0]


def test_an_empty_response_can_not_be_right():
    verdicts = (Verdict(True, "1"), Verdict(True, "1"))
    completions = (make_completion([]), make_completion([5]))
    group = reward_group(config_of(grpo(), 10), make_prompt(0, [2]), completions, verdicts)
    assert group.correct.tolist() == [False, True]


@pytest.fixture
def pool():
    pool = RewardPool(Reward(workers=2))
    yield pool
    pool.close()


def test_workers_answer_in_the_order_asked(pool):
    asked = [pool.submit("", f"#### {i}", str(i if i % 3 else i + 1)) for i in range(60)]
    assert [future.result().correct for future in asked] == [bool(i % 3) for i in range(60)]
    assert pool.kills == 0


def test_odd_text_reaches_the_verifier_unharmed(pool):
    for text in ("\x00\ud800 #### 7", "\u202e#### 7", "\n\r#### 7\n", "x" * 300_000 + "#### 7"):
        assert pool.submit("", text, "7").result().correct, text[:20]


def test_long_answers_fit_into_a_reply_of_many_verdicts():
    pool = RewardPool(Reward(workers=1, verifier="math"))
    text = f"\\boxed{{{'𝟙' * 9_000}}}"  # 12 bytes each in JSON
    verdicts = [future.result() for future in [pool.submit("", text, "1") for _ in range(40)]]
    pool.close()
    assert pool.kills == 0 and {verdict.extracted for verdict in verdicts} == {text[7:-1]}


HANGING = """
import json, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin.buffer:
    right = [True, "1", "direct"]
    if b"_{7}" in line:
        time.sleep(60)
    if b"_{8}" in line:
        sys.exit(1)
    if b"_{9}" in line:
        print("no json", flush=True)
    request = json.loads(line)
    reply = {"replies": [right] * len(request["job"]["questions"])}
    print(json.dumps({"id": request["id"], "reply": reply}), flush=True)
"""


def test_closing_leaves_no_worker_behind_not_even_one_that_is_starting(monkeypatch):
    start, started = process_module.subprocess.Popen, []

    def record(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(process_module.subprocess, "Popen", record)
    closing = RewardPool(Reward(workers=1, verifier="math"))
    future = closing.submit("", r"\sqrt{8}", r"2\sqrt2")
    while not started:
        time.sleep(0.001)
    closing.close()
    assert future.cancelled()
    assert [process.wait(timeout=60) for process in started] != [0]


def test_a_worker_that_hangs_dies_or_babbles_costs_one_response(monkeypatch):
    """The real pool over a worker program that misbehaves on request."""
    monkeypatch.setattr(algebra_process, "BUSY_FACTOR", 2)
    start = process_module.subprocess.Popen
    monkeypatch.setattr(
        process_module.subprocess,
        "Popen",
        lambda command, **options: start([sys.executable, "-c", HANGING], **options),
    )
    rogue = RewardPool(Reward(workers=2, timeout_seconds=0.5, verifier="math"))
    indices = [1, 7, 2, 8, 3, 9, 4, 5]  # 7 hangs, 8 dies, 9 babbles
    texts = [rf"\boxed{{x_{{{i}}}+1}}" for i in indices]
    verdicts = [future.result() for future in [rogue.submit("", text, "1+y") for text in texts]]
    rogue.close()
    fine = [i < 7 for i in indices]
    assert [v.correct for v in verdicts] == fine
    assert [v.failure is None for v in verdicts] == fine
    # They are asked together, and then each alone, with a second try.
    outcomes = [verdicts[indices.index(i)].failure.outcome for i in (7, 8, 9)]
    assert outcomes == [Outcome.TIMEOUT, Outcome.CRASH, Outcome.CRASH]
    assert "TimeoutError" in verdicts[1].failure.text and 6 <= rogue.kills <= 16
