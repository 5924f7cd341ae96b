"""Alerts of a run: one table of metrics with their limits, and what to try beyond them.

A step is compared with the limits of `config.watch`; the report compares the last rows of a run
with limits of its own, and names the steps in which something happened that never should.
"""

import collections
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.runtime.nonfinite import PREFIXES, reasons

STEPS_BEFORE = 10  # whose mean length a step's is compared with
REPEATED_STEPS = 10  # after so many an alert that lasts is given again
LAST = 10  # rows that stand for the end of a run
COLLAPSED = 0.1  # share of the first steps' entropy

Rows = Sequence[Mapping[str, Any]]


class Alert(NamedTuple):
    """A metric with one or several of: a limit of a step, an event of a step, a problem of a run.

    Attributes:
        setting: the limit of a step, a lower one where its name begins with `min_`; 0 is none.
        advice: settings to try beyond it.
        event: text of a step in which the metric is above 0.
        problem: text of a run whose last rows have a mean beyond `limit`, on either side of 0;
            without a limit, of a run with the metric above 0 in any step.
    """

    metric: str
    setting: str = ""
    advice: str = ""
    event: str = ""
    problem: str = ""
    limit: float = 0.0


ALERTS = (
    Alert(
        "entropy",
        "watch.min_entropy",
        "algorithm.clip_high=0.28 or more, a smaller optimizer.learning_rate, or "
        "algorithm.entropy_coefficient=0.001",
    ),
    Alert(
        "growth of response_tokens_mean",
        "watch.max_length_growth",
        "a smaller optimizer.learning_rate or algorithm.overlong_punishment=true; see repetition",
    ),
    Alert("truncated_fraction", problem="many responses are cut off by the budget", limit=0.3),
    Alert(
        "answer_not_found_rate",
        "watch.max_answer_not_found",
        "the pair of data.template and reward.verifier that belongs together, or a larger "
        "sampler.max_response_tokens",
        problem="many responses have no answer the verifier can find",
        limit=0.3,
    ),
    Alert(
        "all_wrong_fraction",
        "watch.max_all_wrong",
        "easier problems, a larger rollout.samples_per_prompt; see in rollouts/ whether the "
        "verdicts are right",
        problem="most groups are all wrong",
        limit=0.8,
    ),
    Alert(
        "all_right_fraction",
        "watch.max_all_right",
        "harder problems, or rollout.when_starved=stop: little is left to learn",
        problem="most groups are all right: little is left to learn",
        limit=0.8,
    ),
    Alert(
        "verifier_failures per verdict",
        "watch.max_verifier_failures",
        "a larger reward.timeout_seconds or more reward.workers; rollouts/ says what failed",
    ),
    Alert("kl_sampler_trainer", problem="sampler and trainer disagree", limit=0.05),
    Alert("clip_fraction_high", problem="the upper clip cuts many tokens", limit=0.1),
    Alert(
        "starved",
        event="only {trained_groups:.0f} {groups} carried signal{broken}",
        problem="too few groups carried signal",
    ),
    Alert(
        "empty_updates",
        event="{empty_updates:.0f} updates had no trained token and were not taken (every "
        "response filtered, weighed 0, or none right?)",
        problem="updates had no trained token",
    ),
    Alert(
        "skipped_updates",
        event="an update was skipped: {reasons} was not finite",
        problem="updates were skipped, their gradient was not finite,",
    ),
    Alert(
        "value_skipped_updates",
        event="an update of the critic was skipped: {value_reasons} was not finite",
    ),
    Alert("broken_groups", problem="groups were dropped because their reward failed"),
    Alert("verifier_failures", problem="the verifier failed on responses"),
)


def finite_values(rows: Rows, name: str) -> np.ndarray:
    """Finite numbers of a metric, [rows that have one]."""
    numbers = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return np.asarray([x for x in numbers if np.isfinite(x)], float)


class Alerts:
    """Alerts at the steps of one run.

    Args:
        rows: metrics of the steps before, where the run goes on from a checkpoint.
    """

    def __init__(self, config: Config, rows: Rows = ()):
        self._limits = {
            alert: float(operator.attrgetter(alert.setting)(config))
            for alert in ALERTS
            if alert.setting
        }
        self._tokens = collections.deque(finite_values(rows, "response_tokens_mean"), STEPS_BEFORE)
        self._lasting = collections.Counter[Alert]()  # steps in a row

    def of_step(self, values: Mapping[str, float]) -> list[str]:
        """Texts about a step's metrics beyond their limits, and about its events.

        A metric that stays beyond its limit is named again after ten steps.
        """
        texts, measured = [], dict(values) | self._derived(values)
        for alert, limit in self._limits.items():
            value, is_lower = measured.get(alert.metric), alert.setting.startswith("watch.min_")
            beyond = value is not None and (value < limit if is_lower else 0 < limit <= value)
            if beyond and self._lasting[alert] % REPEATED_STEPS == 0:
                side = f"{'below' if is_lower else 'at least'} config.{alert.setting} = {limit:g}"
                texts.append(f"{alert.metric} is {value:.3g}, {side}: try {alert.advice}")
            self._lasting[alert] = self._lasting[alert] + 1 if beyond else 0
        return texts + _events(values)

    def _derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """Ratios of a step's metrics; its length counts as one before the next step."""
        verdicts = sum(count for name, count in values.items() if name.startswith("verdicts/"))
        tokens = values["response_tokens_mean"]
        growth = tokens / (np.mean(self._tokens) or np.inf) if self._tokens else 0.0
        self._tokens.append(tokens)
        return {
            "growth of response_tokens_mean": float(growth),
            "verifier_failures per verdict": values["verifier_failures"] / max(1.0, verdicts),
        }


def _events(values: Mapping[str, float]) -> list[str]:
    broken = values.get("broken_groups", 0.0)
    words = {f"{prefix}reasons": reasons(dict(values), prefix) for prefix in PREFIXES}
    words["groups"] = "group" if values.get("trained_groups") == 1 else "groups"
    words["broken"] = f", {broken:.0f} were broken" if broken else ""
    events = (alert for alert in ALERTS if alert.event and values.get(alert.metric))
    return [alert.event.format_map({**values, **words}) for alert in events]


def alerts_of_run(rows: Rows, total_steps: int) -> list[str]:
    """Sentences on what is wrong with a whole run, for its report."""
    texts, last = [], rows[-1]["step"]
    if last < total_steps:
        texts.append(f"ends at step {last} of {total_steps}: still running, or stopped")
    accuracy = finite_values(rows, "heldout_accuracy")
    if accuracy.size > 1 and accuracy[-1] < accuracy[0]:
        texts.append(f"held-out accuracy fell from {accuracy[0]:.3f} to {accuracy[-1]:.3f}")
    entropy = finite_values(rows, "entropy")
    if entropy.size >= 2 * LAST:
        before, after = entropy[:LAST].mean(), entropy[-LAST:].mean()
        if after <= COLLAPSED * before:
            fall = f"from {before:.3g} to {after:.3g} nats"
            texts.append(f"entropy fell {fall}: little is explored any more")
    return texts + [text for alert in ALERTS if (text := _problem(alert, rows))]


def _problem(alert: Alert, rows: Rows) -> str:
    if not alert.problem:
        return ""
    if alert.limit:
        end = finite_values(rows, alert.metric)[-LAST:]
        beyond = end.size > 0 and abs(end.mean()) > alert.limit
        return f"{alert.problem}: {alert.metric} is {end.mean():.3g} at the end" if beyond else ""
    steps = [row["step"] for row in rows if finite_values([row], alert.metric).sum() > 0]
    named = ", ".join(map(str, steps[:8])) + ", ..." * (len(steps) > 8)
    return f"{alert.problem} in {len(steps)} of {len(rows)} rows (step {named})" if steps else ""
