"""The rule reward, its workers, and the punishment of overlong responses."""

import contextlib
import dataclasses
import time

import numpy as np
import pytest
from conftest import make_completion, make_prompt
from row_files import read_table
from scored import ask, submit

from dapo_jax.config.algorithms import dapo, grpo
from dapo_jax.config.experiment import Config, Reward, Sampler
from dapo_jax.rewards.group_rewards import overlong_punishment, reward_group
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.spelling import final_number
from dapo_jax.runtime.workers import parent as process_module
from dapo_jax.types.structs import Verdict


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
    """An empty response is wrong, whatever the verifier says."""
    completions = tuple(make_completion([3] * n) for n in (10, 95, 95, 0))
    verdicts = (Verdict(True, "1"), Verdict(True, "1"), Verdict(False, None), Verdict(True, "1"))
    group = reward_group(config_of(dapo(), 100), make_prompt(0, [2] * 90), completions, verdicts)
    np.testing.assert_allclose(group.rewards, [1.0, 0.25, -1.75, -1])
    np.testing.assert_allclose(group.reward_parts["overlong"], [0, -0.75, -0.75, 0])
    assert group.correct.tolist() == [True, True, False, False]
    plain = reward_group(config_of(grpo(), 100), make_prompt(0, [2]), completions, verdicts)
    np.testing.assert_allclose(plain.rewards, [1, 1, -1, -1])


def test_responses_lose_the_pass_rate_times_their_part_of_the_longest_ones_tokens():
    """As prime-rl's linear penalty, also where the answer is wrong."""
    algorithm = dataclasses.replace(grpo(), length_penalty=0.5)
    completions = tuple(make_completion([3] * n) for n in (10, 30, 20, 90))
    verdicts = (*[Verdict(True, "1")] * 3, Verdict(False, None))
    group = reward_group(config_of(algorithm, 100), make_prompt(0, [2]), completions, verdicts)
    penalties = [-0.5 * 3 / 4 * n / 90 for n in (10, 30, 20, 90)]
    np.testing.assert_allclose(group.reward_parts["length"], penalties)
    np.testing.assert_allclose(group.rewards, np.array([1, 1, 1, -1]) + penalties)
    wrong = completions[3:], verdicts[3:]
    assert reward_group(config_of(algorithm, 100), make_prompt(0, [2]), *wrong).rewards == [-1.0]


def test_workers_answer_in_the_order_asked_on_odd_text_too():
    pairs = [(f"#### {i}", str(i if i % 3 else i + 1)) for i in range(60)]
    odd = "\x00\ud800 #### 7", "\u202e#### 7", "\n\r#### 7\n", "x" * 300_000 + "#### 7"
    with contextlib.closing(RewardPool(Reward(workers=2))) as pool:
        verdicts = ask(pool, [*pairs, *((text, "7") for text in odd)])
    assert [verdict.correct for verdict in verdicts] == [
        *(i % 3 > 0 for i in range(60)),
        *[True] * 4,
    ]
    assert pool.kills == 0


def test_long_answers_fit_into_a_reply_of_many_verdicts():
    pool = RewardPool(Reward(workers=1, verifier="math"))
    text = f"\\boxed{{{'𝟙' * 9_000}}}"  # 12 bytes each in JSON
    verdicts = ask(pool, [(text, "1")] * 40)
    pool.close()
    assert pool.kills == 0 and {verdict.extracted for verdict in verdicts} == {text[7:-1]}


def test_closing_leaves_no_worker_behind_not_even_one_that_is_starting(monkeypatch):
    start, started = process_module.subprocess.Popen, []

    def record(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(process_module.subprocess, "Popen", record)
    closing = RewardPool(Reward(workers=1, verifier="math"))
    future = submit(closing, r"\sqrt{8}", r"2\sqrt2")
    while not started:
        time.sleep(0.001)
    closing.close()
    assert future.cancelled()
    assert [process.wait(timeout=60) for process in started] != [0]
