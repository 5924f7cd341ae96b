"""avg@k, pass@k, maj@k and their intervals, against enumeration and known cases."""

import itertools

import numpy as np
import pytest
from responses import respond, respond_all
from row_files import read_table

from dapo_jax.run import scores
from dapo_jax.run.evaluation_report import describe_problems, report_tables
from dapo_jax.run.scores import (
    RIGHT,
    answer_classes,
    estimates,
    majority_score,
    make_report,
    wilson,
)


def test_pass_at_k_equals_the_share_of_subsets_with_a_right_answer():
    for samples in range(1, 8):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            subsets = list(itertools.combinations(range(samples), k))
            hits = sum(any(i < right for i in subset) for subset in subsets)
            assert scores.pass_at_k(samples, right, k) == hits / len(subsets)


def test_scores_are_means_over_problems_for_powers_of_two():
    result = make_report(respond_all([[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]))
    assert result.accuracy.value == pytest.approx(1 / 3) and result.samples_per_problem == 6
    assert list(result.pass_at_k) == [1, 2, 4]
    assert result.pass_at_k[1] == result.accuracy
    assert result.pass_at_k[2].value == pytest.approx((5 / 15 + 12 / 15) / 2)


def test_majority_goes_by_meaning_and_ignores_missing_answers():
    texts = ["0.5", None, "1/2", "7", "2/4", None]
    value = {"0.5": 0.5, "1/2": 0.5, "2/4": 0.5, "7": 7.0, "1": 1.0}
    samples = [respond(0, i, text == "7", extracted=text) for i, text in enumerate(texts)]
    classes = answer_classes(samples, lambda left, right: value[left] == value[right])
    assert classes == [1, None, 1, RIGHT, 1, None]
    assert majority_score(classes) == 0
    assert majority_score(answer_classes(samples)) == 1 / 4  # as texts, four answers tie


@pytest.mark.parametrize(("classes", "score"), read_table(__file__, "majority"))
def test_a_tied_majority_counts_as_often_as_a_fair_draw_is_right(classes, score):
    assert majority_score(classes) == score


def test_the_interval_of_two_problems_is_that_of_their_resamples():
    """Resampled means are 0, 1/2, 1/2 and 1 with equal chances, so 95 % reach from 0 to 1."""
    (result,) = estimates(np.array([[0.0], [1.0]]), np.ones(2), seed=0)
    assert (result.value, result.low, result.high) == (0.5, 0, 1)
    (alone,) = estimates(np.array([[0.3]]), np.ones(1), seed=0)
    assert (alone.value, alone.low, alone.high) == (0.3, None, None)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Problems of differing difficulty, a mean of 0.4; three standard errors around 95 %."""
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        difficulty = rng.beta(0.8, 1.2, 60)
        means = rng.binomial(8, difficulty)[:, None] / 8
        (result,) = estimates(means, np.full(60, 8), seed=trial)
        covered += result.low <= 0.4 <= result.high
    assert 0.904 < covered / 200 < 0.996


@pytest.mark.parametrize(("share", "units", "low", "high"), read_table(__file__, "wilson"))
def test_wilsons_interval_is_the_published_one(share, units, low, high):
    np.testing.assert_allclose(wilson(share, units), [low, high], atol=6e-4)


@pytest.mark.parametrize("right", [0, 1])
def test_where_all_or_none_are_right_the_interval_has_a_width_and_counts_problems(right):
    sixteen = make_report(respond_all([[right]] * 16))
    assert sixteen.accuracy.value == right
    low, high = sorted(abs(right - end) for end in (sixteen.accuracy.low, sixteen.accuracy.high))
    assert low == 0 and high == pytest.approx(0.194, abs=6e-4)
    often = make_report(respond_all([[right] * 32] * 16))  # as certain as of one sample each
    ends = {often.accuracy, often.majority, *often.pass_at_k.values()}
    assert ends == {sixteen.accuracy}
    assert make_report(respond_all([[right]] * 64)).accuracy.low >= sixteen.accuracy.low
    ragged = make_report(respond_all([[right] * 90, *[[right]] * 15]))  # nearly one problem
    assert ragged.accuracy.high - ragged.accuracy.low > 0.6


def test_a_repeated_file_is_more_samples_of_few_problems():
    """Three problems, 32 lines each, one response per line: avg@32, not mean@1."""
    lines = [
        respond(i, 0, i % 3 == 0 or i % 4 == 0, question=f"question {i % 3}") for i in range(96)
    ]
    result = make_report(lines)
    assert (result.problems, result.responses, result.samples_per_problem) == (3, 96, 32)
    assert (result.repeated_problems, result.most_listings) == (3, 32)
    assert result.accuracy.value == 0.5 and max(result.pass_at_k) == 32
    assert "repeats 3 problems up to 32 times" in describe_problems(result)
    same_text_other_answer = [respond(i, 0, True, question="q", answer=str(i)) for i in range(2)]
    assert make_report(same_text_other_answer).problems == 2
    other_columns = [respond(i, 0, True, question="q", digest=str(i)) for i in range(2)]
    assert make_report(other_columns).problems == 2


def test_what_the_responses_look_like():
    result = make_report(
        [
            respond(0, 0, True, tokens=10, logprob=-1.0),
            respond(0, 1, True, tokens=20, logprob=-2.0, repetition=0.5),
            respond(0, 2, False, tokens=60, logprob=-6.0, truncated=True, extracted=None),
            respond(0, 3, False, tokens=0, logprob=0.0, repetition=0.5),
            respond(0, 4, True, tokens=99, logprob=-9.0, failure="late", outcome="timeout"),
        ]
    )
    assert (result.response_tokens_right, result.response_tokens_wrong) == (15, 30)
    assert result.response_tokens == 22.5 and result.entropy == pytest.approx(0.1)
    assert result.truncated_fraction == result.answer_not_found_rate == 0.25
    assert result.repetition == 0.25 and result.failed_rewards == {"timeout": 1}
    nothing_right = make_report(respond_all([[0, 0]], tokens=0, logprob=0.0))
    assert nothing_right.response_tokens_right is None and nothing_right.entropy is None


def test_the_mean_reward_weighs_problems_by_responses_and_leads_if_asked():
    rewards = [[5.0, 3.0], [1.0], [-2.0]]
    lines = [
        respond(i, j, False, reward=x) for i, row in enumerate(rewards) for j, x in enumerate(row)
    ]
    result = make_report(lines)
    assert result.reward.value == pytest.approx(7 / 4)
    assert -2 <= result.reward.low < 1 and 2 < result.reward.high <= 4
    lines.append(respond(3, 0, False, reward=None))  # a broken reward is left out
    assert make_report(lines).reward == result.reward
    equal = make_report([respond(i, 0, False, reward=7.0) for i in range(9)]).reward
    assert (equal.value, equal.low, equal.high) == (7, None, None)
    for leads, place in (True, 0), (False, -1):
        names = list(next(report_tables(result, leads)).columns[0].cells)
        assert names[place] == "reward" and "avg@1" in names
