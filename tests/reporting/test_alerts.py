"""Alerts at a step and in the report: the metric and its value."""

import collections
import re

import pytest
from conftest import make_completion, make_prompt
from reports import row
from row_files import read_table

from dapo_jax.config.algorithms import PRESETS
from dapo_jax.config.experiment import Config, Reward, Watch
from dapo_jax.extras.alerts import LIMITS, Alerts, check_run
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.run.metrics import outcome_metrics, response_metrics, verdict_counts
from dapo_jax.run.scores import settings_of
from dapo_jax.types.structs import Failure, Group, Outcome, Verdict


def make_group(verdicts: list[Verdict], tokens: int = 10) -> Group:
    completions = tuple(make_completion([5] * tokens) for _ in verdicts)
    return reward_group(Config(), make_prompt(0, [3]), completions, tuple(verdicts))


RIGHT, WRONG = Verdict(True, "1", decided="direct"), Verdict(False, "2", decided="direct")
ABSENT = Verdict(False, None, decided="no_marker")
LATE = Verdict(False, None, Failure(Outcome.TIMEOUT, "TimeoutError: no answer in time"))


def step_of(groups: list[Group], entropy: float = 0.3) -> dict[str, float]:
    """What a step logs of such groups."""
    share = 1 / len(groups)
    return (
        response_metrics(groups)
        | verdict_counts(groups)
        | outcome_metrics(collections.Counter(one for group in groups for one in group.outcomes))
        | {
            "entropy": entropy,
            "all_right_fraction": share * sum(bool(g.correct.all()) for g in groups),
            "all_wrong_fraction": share * sum(not g.correct.any() for g in groups),
        }
    )


HEALTHY = step_of([make_group([RIGHT, WRONG])])
INJECTED = {
    "min_entropy": (step_of([make_group([RIGHT, WRONG])], 0.001), "entropy is 0.001, below"),
    "max_length_growth": (
        step_of([make_group([RIGHT, WRONG], 35)]),
        "growth of response_tokens_mean is 3.5",
    ),
    "max_all_right": (step_of([make_group([RIGHT, RIGHT])]), "all_right_fraction is 1"),
    "max_all_wrong": (step_of([make_group([WRONG, WRONG])]), "all_wrong_fraction is 1"),
    "max_answer_not_found": (
        step_of([make_group([RIGHT, ABSENT])]),
        "answer_not_found_rate is 0.5",
    ),
}


@pytest.mark.parametrize("setting", [limit.step for limit in LIMITS if limit.step])
def test_an_alert_names_the_metric_and_its_value(setting):
    name = setting.removeprefix("watch.")
    values, text = INJECTED[name]
    alerts = Alerts(Config())
    assert alerts.check_step(HEALTHY) == []
    (output,) = alerts.check_step(values)
    assert text in output and f"config.watch.{name} = " in output
    assert Alerts(Config(watch=Watch(**{name: 0.0})), [HEALTHY]).check_step(values) == []


@pytest.mark.parametrize(("values", "text"), read_table(__file__, "events"))
def test_an_event_is_told_at_each_of_its_steps(values, text):
    alerts = Alerts(Config())
    assert [alerts.check_step(HEALTHY | values) for _ in range(2)] == [[text], [text]]


def test_rewards_that_failed_are_counted_by_kind_at_the_step_and_in_the_report():
    group = make_group([RIGHT, LATE, WRONG, LATE])
    values = step_of([group])
    (text,) = Alerts(Config()).check_step(HEALTHY | values)
    assert text == "responses had no reward: outcomes/timeout 2"
    assert values["failed_rewards"] == 0.5 and values["accuracy"] == 0.5
    dropped = values | {"broken_groups": 3.0, "resampled_groups": 1.0, "outcomes/crash": 1.0}
    first, second = Alerts(Config()).check_step(HEALTHY | dropped)
    assert first.endswith(": outcomes/timeout 2, outcomes/crash 1, resampled_groups 1")
    assert second == "groups were dropped as rewards failed: broken_groups 3"
    rows = [row(step, failed_rewards=float(step == 7)) for step in range(21)]
    assert check_run(rows, {}) == ["responses had no reward in 1 of 21 rows (step 7)"]


def test_what_stays_wrong_is_said_every_ten_steps_and_again_after_it_was_right():
    values, alerts = INJECTED["max_all_wrong"][0], Alerts(Config())
    assert [len(alerts.check_step(values)) for _ in range(12)] == [1, *[0] * 9, 1, 0]
    assert alerts.check_step(HEALTHY) == [] and len(alerts.check_step(values)) == 1


def test_lengths_are_compared_with_the_steps_before_also_after_a_resume():
    long = INJECTED["max_length_growth"][0]
    assert Alerts(Config()).check_step(long) == []  # nothing came before
    assert len(Alerts(Config(), [HEALTHY] * 3).check_step(long)) == 1


OF_ANSWERS = ("max_all_wrong", "max_all_right", "max_answer_not_found")


def run_of(preset: str = "dapo", parts: str = "rule=1", correct: str = "verifier", **changes):
    """Config of a preset with a reward; changes are fields of the algorithm."""
    algorithm = PRESETS[preset]()
    for name, value in changes.items():
        setattr(algorithm, name, value)
    return Config(algorithm=algorithm, reward=Reward(parts=parts, correct=correct))


def alerts_about(config: Config, name: str) -> str:
    return " ".join(Alerts(config, [HEALTHY]).check_step(INJECTED[name][0]))


@pytest.mark.parametrize(
    ("config", "output"),
    [
        (run_of(), "wrong right found"),
        (run_of("grpo"), "wrong right found"),
        (run_of("grpo", "gym=1"), "wrong right found"),
        (run_of("grpo", "mine:score=1"), ""),  # measured, and read by nothing
        (run_of("grpo", "mine:score=1", "spread"), ""),
        (run_of("dapo", "mine:score=1", "spread"), ""),
        (run_of("dapo", "mine:score=1", "threshold"), "wrong right"),
        (run_of("dapo", "mine:score=1"), "wrong right found"),  # which groups are kept
        (run_of("rft", "mine:score=1"), "wrong right found"),
        (run_of("grpo", "mine:score=1", positive_nll_coefficient=0.1), "wrong right found"),
        (run_of("grpo", "mine:score=1,format=0.1", "spread"), "found"),
    ],
)
def test_a_line_about_answers_is_said_where_something_reads_them(config, output):
    names = [name.split("_")[-1] for name in OF_ANSWERS if alerts_about(config, name)]
    assert names == output.split()


def test_the_report_reads_a_fall_of_accuracy_only_where_a_run_learns_it():
    rows = [row(0, heldout_accuracy=0.9), row(20)]
    assert check_run(rows, settings_of(run_of("grpo")))
    own = settings_of(run_of("grpo", "mine:score=1", "spread"))
    rows[-1] |= {"heldout_reward": 0.9}
    assert not check_run(rows, own)
    (text,) = check_run([row(0, heldout_reward=0.95), *rows[1:]], own)
    assert text == "held-out reward fell from 0.950 to 0.900"


@pytest.mark.parametrize(
    "rows, output",
    [
        ([row(s, starved=float(s == 3)) for s in range(21)], "too few groups .* 1 of 21.*step 3"),
        ([row(s) for s in range(200)], "entropy fell from .* to"),
        ([row(s) for s in range(8)], "ends at step 7 of 20"),
        ([row(s, truncated_fraction=0.5) for s in range(21)], "cut off.*truncated_fraction is 0.5"),
        ([row(0, heldout_accuracy=0.9), row(20)], "fell from 0.900 to 0.400"),
        ([row(s, entropy=None, reward=float("nan")) for s in range(21)], None),
    ],
)
def test_the_report_names_what_is_wrong_with_a_run(rows, output):
    result = check_run(rows, settings_of(Config()))
    assert bool(result) == bool(
        check_run(rows, {"total_steps": 20})
    )  # a run older than its settings
    assert bool(result) == bool(output), result
    assert output is None or any(re.search(output, one) for one in result), result


@pytest.mark.parametrize(
    ("values", "config", "output"),
    [
        (
            {"rejected_fraction_low": 0.06, "rejected_fraction_high": 0.05},
            run_of("sequence_mis"),
            "many tokens are rejected: rejected_fraction_low + rejected_fraction_high is 0.11 at "
            "the end",
        ),
        ({"rejected_fraction_low": 0.06, "rejected_fraction_high": 0.03}, run_of("icepop"), ""),
        ({"ratio_p99": 2.5}, run_of("vespo"), ""),
    ],
)
def test_the_report_says_what_the_corrections_of_a_run_cost(values, config, output):
    rows = [row(step, **values) for step in range(21)]
    assert check_run(rows, settings_of(config)) == ([output] if output else [])
