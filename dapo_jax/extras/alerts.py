"""Alerts: one table of metrics and limits.

`Alerts` checks every step against the limits of `config.watch`; `check_run` checks the recorded
rows of a whole run for its report. Alerts that cannot apply to a run are left out.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.reporting.correctness import (
    Condition,
    Settings,
    does_apply,
    reads_answers,
    reward_leads,
    settings_of,
    uses_correctness,
)
from dapo_jax.runtime.nonfinite import PREFIXES, reasons
from dapo_jax.types.structs import FAILURES

BASELINE_STEPS = 10  # previous steps that a response length is compared with
REPEATED_STEPS = 10  # an alert that persists is repeated after this many steps
LAST = 10  # rows that represent the end of a run
COLLAPSED = 0.1  # fraction of the initial entropy
SHOWN_STEPS = 8

Rows = Sequence[Mapping[str, Any]]


# --- settings for which alerts are meaningful -----------------------------------------------


def _has_graded_groups(settings: Settings) -> bool:
    return settings["rollout.samples_per_prompt"] > 1 and uses_correctness(settings)


def _has_token_ratio(settings: Settings) -> bool:
    return settings["algorithm.ratio"] == "token"


# --- the table ------------------------------------------------------------------------------


class Alert(NamedTuple):
    """A row of the table of alerts.

    Attributes:
        scope: "step": each step against the setting `limit`; "event": each step with a metric
            above 0; "end": the mean of a run's last rows against the number `limit`; "rows": a run
            with a metric above 0 in any row.
        metric: its name, or the sum of two as "a + b".
        limit: name of a setting (0 disables the alert) or a number.
        text: the message; metrics can be named in that of an event.
        below: True if values below the limit raise the alert, else those at or above it.
    """

    scope: Literal["step", "event", "end", "rows"]
    metric: str
    limit: str | float = 0.0
    text: str = ""
    applies: Condition | None = None
    below: bool = False


GROWTH = "growth of response_tokens_mean"
REJECTED = "rejected_fraction_low + rejected_fraction_high"

# fmt: off
ALERTS = (
    Alert("step", "entropy", "watch.min_entropy", below=True),
    Alert("step", GROWTH, "watch.max_length_growth"),
    Alert("step", "answer_not_found_rate", "watch.max_answer_not_found", applies=reads_answers),
    Alert("step", "all_wrong_fraction", "watch.max_all_wrong", applies=_has_graded_groups),
    Alert("step", "all_right_fraction", "watch.max_all_right", applies=_has_graded_groups),
    Alert("event", "failed_rewards",
          text="{failures} have no reward and are in no mean and no loss{dropped}"),
    Alert("event", "starved", text="only {trained_groups:.0f} {groups} carried signal{broken}"),
    Alert("event", "empty_updates",
          text="{empty_updates:.0f} updates had no trained token and were not taken"),
    Alert("event", "skipped_updates", text="an update was skipped: {reasons} was not finite"),
    Alert("event", "value_skipped_updates",
          text="an update of the critic was skipped: {value_reasons} was not finite"),
    Alert("end", "truncated_fraction", 0.3, "many responses are cut off by the budget"),
    Alert("end", "answer_not_found_rate", 0.3, applies=reads_answers,
          text="many responses have no answer that the verifier can find"),
    Alert("end", "all_wrong_fraction", 0.8, "most groups are all wrong",
          applies=_has_graded_groups),
    Alert("end", "all_right_fraction", 0.8, "most groups are all right: little is left to learn",
          applies=_has_graded_groups),
    # With staleness or carry-over the two policies differ by intention.
    Alert("end", "kl_sampler_trainer", 0.05, "sampler and trainer disagree",
          applies=lambda s: s["rollout.staleness"] == 0 and s["rollout.carry_over"] == "none"),
    # The ratio of a whole response is clipped for all its tokens.
    Alert("end", "clip_fraction_high", 0.1, "the upper clip cuts many tokens",
          applies=_has_token_ratio),
    Alert("end", REJECTED, 0.1, "many tokens are rejected"),
    Alert("end", "effective_sample_fraction", 0.5, below=True,
          text="a few tokens have most of the importance weight"),
    Alert("end", "ratio_p99", 2.0, "the policy moves far within a step", applies=_has_token_ratio),
    Alert("rows", "starved", text="too few groups carried signal"),
    Alert("rows", "empty_updates", text="updates had no trained token"),
    Alert("rows", "skipped_updates", text="updates were skipped, their gradient was not finite,"),
    Alert("rows", "broken_groups", text="groups were dropped because their rewards failed"),
    Alert("rows", "failed_rewards", text="responses had no reward"),
)
# fmt: on


def finite_values(rows: Rows, name: str) -> np.ndarray:
    """Return the finite numbers of a metric, [rows that have one]."""
    numbers = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return np.asarray([x for x in numbers if np.isfinite(x)], float)


class Alerts:
    """Alerts at the steps of a run.

    Args:
        rows: metrics of earlier steps if the run resumes from a checkpoint.
    """

    def __init__(self, config: Config, rows: Rows = ()):
        self._settings = settings_of(config)
        self._alerts = [alert for alert in ALERTS if does_apply(alert.applies, self._settings)]
        lengths = finite_values(rows, "response_tokens_mean")
        self._lengths = collections.deque(lengths, BASELINE_STEPS)
        self._persisted = collections.Counter[Alert]()  # consecutive steps

    def check_step(self, values: Mapping[str, float]) -> list[str]:
        """Return messages about metrics beyond their limits and about events of the step."""
        tokens = values["response_tokens_mean"]
        growth = tokens / (np.mean(self._lengths) or np.inf) if self._lengths else 0.0
        self._lengths.append(tokens)
        measured = {**values, GROWTH: float(growth)}
        texts = []
        for alert in self._alerts:
            if alert.scope == "step":
                texts.append(self._threshold(alert, measured))
            elif alert.scope == "event" and measured.get(alert.metric):
                texts.append(_event(alert, measured))
        return [text for text in texts if text]

    def _threshold(self, alert: Alert, measured: Mapping[str, Any]) -> str:
        limit = self._settings[str(alert.limit)]
        value = measured.get(alert.metric)
        if value is None or not (value < limit if alert.below else 0 < limit <= value):
            self._persisted[alert] = 0
            return ""
        self._persisted[alert] += 1
        if (self._persisted[alert] - 1) % REPEATED_STEPS:
            return ""
        side = "below" if alert.below else "at least"
        return f"{alert.metric} is {value:.3g}, {side} config.{alert.limit} = {limit:g}"


def _event(alert: Alert, values: Mapping[str, Any]) -> str:
    broken = values.get("broken_groups", 0.0)
    words = {f"{prefix}reasons": reasons(dict(values), prefix) for prefix in PREFIXES}
    words["groups"] = "group" if values.get("trained_groups") == 1 else "groups"
    words["broken"] = f", {broken:.0f} were broken" if broken else ""
    outcomes = {n.removeprefix("outcomes/"): values[n] for n in values if n.startswith("outcomes/")}
    failed = {name: count for name, count in outcomes.items() if name in FAILURES and count}
    kinds = ", ".join(f"{count:.0f} {name}" for name, count in failed.items())
    total = f"{sum(failed.values()):.0f} of {sum(outcomes.values()):.0f}"
    words["failures"] = f"{total} responses ({kinds})"
    numbers = {"dropped": broken, "sampled again": values.get("resampled_groups", 0.0)}
    words["dropped"] = "".join(f"; groups {verb}: {n:.0f}" for verb, n in numbers.items() if n)
    return alert.text.format_map({**values, **words})


def check_run(rows: Rows, total_steps: int, settings: Mapping[str, Any]) -> list[str]:
    """Return messages about a whole run for its report.

    Args:
        settings: of the run, by dotted name.
    """
    texts = []
    last_step = rows[-1]["step"]
    if last_step < total_steps:
        texts.append(f"ends at step {last_step} of {total_steps}: still running, or stopped")
    name = "reward" if reward_leads(settings) else "accuracy"
    score = finite_values(rows, f"heldout_{name}")
    if score.size > 1 and score[-1] < score[0]:
        texts.append(f"held-out {name} fell from {score[0]:.3f} to {score[-1]:.3f}")
    entropy = finite_values(rows, "entropy")
    if entropy.size >= 2 * LAST:
        before = entropy[:LAST].mean()
        after = entropy[-LAST:].mean()
        if after <= COLLAPSED * before:
            change = f"from {before:.3g} to {after:.3g} nats"
            texts.append(f"entropy fell {change}: the policy hardly explores any more")
    checks = {"end": _check_end, "rows": _check_rows}
    for alert in ALERTS:
        if alert.scope in checks and does_apply(alert.applies, settings):
            texts.append(checks[alert.scope](alert, rows))
    return [text for text in texts if text]


def _check_end(alert: Alert, rows: Rows) -> str:
    ends = [finite_values(rows, name)[-LAST:] for name in alert.metric.split(" + ")]
    means = [end.mean() for end in ends if end.size]
    size = abs(sum(means))
    limit = float(alert.limit)
    if not means or (size >= limit if alert.below else size <= limit):
        return ""
    return f"{alert.text}: {alert.metric} is {sum(means):.3g} at the end"


def _check_rows(alert: Alert, rows: Rows) -> str:
    steps = [row["step"] for row in rows if finite_values([row], alert.metric).sum() > 0]
    if not steps:
        return ""
    shown = ", ".join(map(str, steps[:SHOWN_STEPS])) + ", ..." * (len(steps) > SHOWN_STEPS)
    return f"{alert.text} in {len(steps)} of {len(rows)} rows (step {shown})"
