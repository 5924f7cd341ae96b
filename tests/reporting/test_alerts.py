"""What is warned about by name while a run goes on: the metric, its value, and what to try."""

import pytest
from conftest import make_completion, make_prompt
from small_runs import make_quick_config, open_run

from dapo_jax.config.alerts import Watch
from dapo_jax.config.experiment import Config
from dapo_jax.reporting.alerts import ADVICE, Watched, measure
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


@pytest.mark.parametrize("name", ADVICE)
def test_what_goes_wrong_is_named_with_its_value_and_what_to_try(name):
    values, said = INJECTED[name]
    watched = Watched(Watch())
    assert watched.warnings(HEALTHY) == []
    (warning,) = watched.warnings(values)
    assert said in warning and f"config.watch.{name} = " in warning
    assert warning.endswith(f"try {ADVICE[name][1]}")
    assert Watched(Watch(**{name: 0.0}), [HEALTHY]).warnings(values) == []


def test_what_stays_wrong_is_said_every_ten_steps_and_again_after_it_was_right():
    values, watched = INJECTED["max_all_wrong"][0], Watched(Watch())
    assert [len(watched.warnings(values)) for _ in range(12)] == [1, *[0] * 9, 1, 0]
    assert watched.warnings(HEALTHY) == [] and len(watched.warnings(values)) == 1


def test_lengths_are_compared_with_the_steps_before_also_after_a_resume():
    long = INJECTED["max_length_growth"][0]
    assert measure(long, 10.0)["max_length_growth"] == 3.5
    assert Watched(Watch()).warnings(long) == []  # nothing came before
    assert len(Watched(Watch(), [HEALTHY] * 3).warnings(long)) == 1


def test_a_run_says_it_on_the_console(base, alone, tmp_path, capsys):
    config = make_quick_config(base, tmp_path, updates=1, watch=Watch(min_entropy=100.0))
    with open_run(config) as run:
        run.step()
    said = capsys.readouterr().out.replace("\n", " ")
    assert "warning: step 1: entropy is" in said and "clip_high=0.28" in said
