"""Alerts at a step and in the report: the metric, its value, and what to try."""

import re

import pytest
from conftest import make_completion, make_prompt
from small_runs import make_quick_config, open_run
from test_report import row

from dapo_jax.config.experiment import Config
from dapo_jax.config.outputs import Watch
from dapo_jax.reporting.alerts import ALERTS, Alerts, alerts_of_run
from dapo_jax.reporting.metrics import response_metrics, verdict_counts
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.structs import Group, Verdict


def make_group(verdicts: list[Verdict], tokens: int = 10) -> Group:
    completions = tuple(make_completion([5] * tokens) for _ in verdicts)
    return reward_group(Config(), make_prompt(0, [3]), completions, tuple(verdicts))


RIGHT, WRONG = Verdict(True, "1", decided="direct"), Verdict(False, "2", decided="direct")
ABSENT = Verdict(False, None, decided="no_marker")
LATE = Verdict(False, None, "TimeoutError: no answer in time", decided="failed")


def step_of(groups: list[Group], entropy: float = 0.3) -> dict[str, float]:
    """What a step logs of such groups."""
    share = 1 / len(groups)
    return (
        response_metrics(groups)
        | verdict_counts(groups)
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
    "max_verifier_failures": (
        step_of([make_group([RIGHT, LATE, WRONG])]),
        "verifier_failures per verdict is 0.333",
    ),
}


@pytest.mark.parametrize("alert", [one for one in ALERTS if one.setting], ids=lambda a: a.setting)
def test_an_alert_names_the_metric_its_value_and_what_to_try(alert):
    name = alert.setting.removeprefix("watch.")
    values, text = INJECTED[name]
    alerts = Alerts(Config())
    assert alerts.of_step(HEALTHY) == []
    (said,) = alerts.of_step(values)
    assert text in said and f"config.watch.{name} = " in said
    assert said.endswith(f"try {alert.advice}")
    assert Alerts(Config(watch=Watch(**{name: 0.0})), [HEALTHY]).of_step(values) == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"starved": 1.0, "trained_groups": 1.0}, "only 1 group carried signal"),
        (
            {"starved": 1.0, "trained_groups": 2.0, "broken_groups": 3.0},
            "only 2 groups carried signal, 3 were broken",
        ),
        (
            {"skipped_updates": 0.5, "skipped_for_gradient": 0.5, "skipped_for_moments": 0.5},
            "an update was skipped: the gradient and an optimizer moment was not finite",
        ),
        (
            {"value_skipped_updates": 1.0, "value_skipped_for_parameters": 1.0},
            "an update of the critic was skipped: a new parameter was not finite",
        ),
    ],
)
def test_an_event_is_told_at_each_of_its_steps(values, text):
    alerts = Alerts(Config())
    assert [alerts.of_step(HEALTHY | values) for _ in range(2)] == [[text], [text]]


def test_what_stays_wrong_is_said_every_ten_steps_and_again_after_it_was_right():
    values, alerts = INJECTED["max_all_wrong"][0], Alerts(Config())
    assert [len(alerts.of_step(values)) for _ in range(12)] == [1, *[0] * 9, 1, 0]
    assert alerts.of_step(HEALTHY) == [] and len(alerts.of_step(values)) == 1


def test_lengths_are_compared_with_the_steps_before_also_after_a_resume():
    long = INJECTED["max_length_growth"][0]
    assert Alerts(Config()).of_step(long) == []  # nothing came before
    assert len(Alerts(Config(), [HEALTHY] * 3).of_step(long)) == 1


@pytest.mark.parametrize(
    "rows, said",
    [
        ([row(s, starved=float(s == 3)) for s in range(21)], "too few groups .* 1 of 21.*step 3"),
        ([row(s) for s in range(200)], "entropy fell from .* to"),
        ([row(s) for s in range(8)], "ends at step 7 of 20"),
        ([row(s, truncated_fraction=0.5) for s in range(21)], "cut off.*truncated_fraction is 0.5"),
        ([row(0, heldout_accuracy=0.9), row(20)], "fell from 0.900 to 0.400"),
        ([row(s, entropy=None, reward=float("nan")) for s in range(21)], None),
    ],
)
def test_the_report_names_what_is_wrong_with_a_run(rows, said):
    found = alerts_of_run(rows, 20)
    assert bool(found) == bool(said), found
    assert said is None or any(re.search(said, one) for one in found), found


def test_a_run_says_it_on_the_console(base, alone, tmp_path, capsys):
    config = make_quick_config(base, tmp_path, updates=1, watch=Watch(min_entropy=100.0))
    with open_run(config) as run:
        run.step()
    said = capsys.readouterr().out.replace("\n", " ")
    assert "warning: step 1: entropy is" in said and "clip_high=0.28" in said
