"""Alerts: a table of limits and one of events.

`Alerts` checks each step, by the limits of `config.watch`; `check_run` checks the recorded rows of
a whole run for its report. What cannot apply to a run is left out.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.run import scores
from dapo_jax.run.scores import Settings, does_apply, reads_answers
from dapo_jax.runtime.nonfinite import REASONS
from dapo_jax.types.structs import FAILURES

BASELINE_STEPS = 10  # previous steps that a response length is compared with
REPEATED_STEPS = 10  # an alert that persists is repeated after this many steps
LAST = 10  # rows that represent the end of a run
COLLAPSED = 0.1  # fraction of the initial entropy
SHOWN_STEPS = 8

Rows = Sequence[Mapping[str, Any]]


def _is_graded(settings: Settings) -> bool:
    return settings["rollout.samples_per_prompt"] > 1 and scores.uses_correctness(settings)


def _is_by_token(settings: Settings) -> bool:
    return settings["algorithm.ratio"] == "token"  # the clip of a response cuts all its tokens


def _is_on_policy(settings: Settings) -> bool:
    return settings["rollout.staleness"] == 0 and settings["rollout.carry_over"] == "none"


class Limit(NamedTuple):
    """A metric, or the sum of two as "a + b", that is trouble beyond a limit."""

    metric: str
    step: str = ""  # setting with the limit for each step; 0 there disables it
    end: float = 0.0  # limit for the mean of a run's last rows; 0: none
    text: str = ""  # what that means
    applies: scores.Condition | None = None
    below: bool = False  # whether values below the limit are trouble, or those above it


GROWTH = "growth of response_tokens_mean"
REJECTED = "rejected_fraction_low + rejected_fraction_high"
UNREAD = "many responses have no answer that the verifier can find"
EASY = "most groups are all right: little is left to learn"
FEW = "a few tokens have most of the importance weight"
LIMITS = (
    Limit("entropy", "watch.min_entropy", below=True),
    Limit(GROWTH, "watch.max_length_growth"),
    Limit("truncated_fraction", "", 0.3, "many responses are cut off by the budget"),
    Limit("answer_not_found_rate", "watch.max_answer_not_found", 0.3, UNREAD, reads_answers),
    Limit(
        "all_wrong_fraction", "watch.max_all_wrong", 0.8, "most groups are all wrong", _is_graded
    ),
    Limit("all_right_fraction", "watch.max_all_right", 0.8, EASY, _is_graded),
    Limit("kl_sampler_trainer", "", 0.05, "sampler and trainer disagree", _is_on_policy),
    Limit("clip_fraction_high", "", 0.1, "the upper clip cuts many tokens", _is_by_token),
    Limit(REJECTED, "", 0.1, "many tokens are rejected"),
    Limit("effective_sample_fraction", "", 0.5, FEW, below=True),
    Limit("ratio_p99", "", 2.0, "the policy moves far within a step", _is_by_token),
)
FAILED = tuple(f"outcomes/{outcome}" for outcome in FAILURES)
OF_CRITIC = tuple(f"value_{name}" for name in REASONS)
# By a metric that is trouble above 0: what that means, and the metrics that tell more.
EVENTS = {
    "failed_rewards": ("responses had no reward", (*FAILED, "resampled_groups")),
    "broken_groups": ("groups were dropped as rewards failed", ("broken_groups",)),
    "starved": ("too few groups carried signal", ("trained_groups",)),
    "empty_updates": ("updates had no trained token", ("empty_updates",)),
    "skipped_updates": ("updates were skipped as not finite", tuple(REASONS)),
    "value_skipped_updates": ("updates of the critic were skipped as not finite", OF_CRITIC),
}


def finite_values(rows: Rows, name: str) -> np.ndarray:
    """Return the finite numbers of a metric, [rows that have one]."""
    numbers = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return np.asarray([x for x in numbers if np.isfinite(x)], float)


class Alerts:
    """Alerts at the steps of a run; `rows` are the metrics of earlier steps if it resumes."""

    def __init__(self, config: Config, rows: Rows = ()):
        self._settings = scores.settings_of(config)
        lengths = finite_values(rows, "response_tokens_mean")
        self._lengths = collections.deque(lengths, BASELINE_STEPS)
        self._persisted = collections.Counter[str]()  # consecutive steps beyond a limit

    def check_step(self, values: Mapping[str, float]) -> list[str]:
        """Return messages about metrics beyond their limits and about events of the step."""
        tokens = values.get("response_tokens_mean", 0.0)
        growth = tokens / (np.mean(self._lengths) or np.inf) if self._lengths else 0.0
        self._lengths.append(tokens)
        texts = [self._check(limit, {**values, GROWTH: float(growth)}) for limit in LIMITS]
        for name, (text, related) in EVENTS.items():
            facts = [f"{key} {values[key]:g}" for key in related if values.get(key)]
            texts += [f"{text}: {', '.join(facts)}".removesuffix(": ")] * bool(values.get(name))
        return [text for text in texts if text]

    def _check(self, limit: Limit, values: Mapping[str, float]) -> str:
        name, value = limit.step, values.get(limit.metric)
        bound = self._settings[name] if name else 0.0
        is_beyond = value is not None and (value < bound if limit.below else 0 < bound <= value)
        is_told = is_beyond and does_apply(limit.applies, self._settings)
        self._persisted[name] = self._persisted[name] + 1 if is_told else 0
        if self._persisted[name] % REPEATED_STEPS != 1:
            return ""
        side = "below" if limit.below else "at least"
        return f"{limit.metric} is {value:.3g}, {side} config.{name} = {bound:g}"


def check_run(rows: Rows, settings: Settings) -> list[str]:
    """Return messages about a whole run, by its settings' dotted names, for its report."""
    texts, last, total = [], rows[-1]["step"], settings.get("total_steps", 0)
    if last < total:
        texts.append(f"ends at step {last} of {total}: still running, or stopped")
    name = "reward" if scores.reward_leads(settings) else "accuracy"
    score, entropy = finite_values(rows, f"heldout_{name}"), finite_values(rows, "entropy")
    if score.size > 1 and score[-1] < score[0]:
        texts.append(f"held-out {name} fell from {score[0]:.3f} to {score[-1]:.3f}")
    before, after = entropy[:LAST], entropy[LAST:][-LAST:]
    if after.size == LAST and after.mean() <= COLLAPSED * before.mean():
        change = f"from {before.mean():.3g} to {after.mean():.3g} nats"
        texts.append(f"entropy fell {change}: the policy hardly explores any more")
    for limit in LIMITS:
        ends = [finite_values(rows, name)[-LAST:] for name in limit.metric.split(" + ")]
        value = sum(end.mean() for end in ends if end.size)
        is_beyond = abs(value) < limit.end if limit.below else abs(value) > limit.end > 0
        if is_beyond and any(end.size for end in ends) and does_apply(limit.applies, settings):
            texts.append(f"{limit.text}: {limit.metric} is {value:.3g} at the end")
    for name, (text, _) in EVENTS.items():
        steps = [row["step"] for row in rows if finite_values([row], name).sum() > 0]
        shown = ", ".join(map(str, steps[:SHOWN_STEPS])) + ", ..." * (len(steps) > SHOWN_STEPS)
        texts += [f"{text} in {len(steps)} of {len(rows)} rows (step {shown})"] * bool(steps)
    return texts
