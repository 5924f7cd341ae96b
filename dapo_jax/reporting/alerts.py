"""Alerts of a run: one table of metrics with their limits, and what to try beyond them.

A step is compared with the limits of `config.watch`; the report compares the last rows of a run
with limits of its own, and names the steps in which something happened that never should. A line,
or a piece of advice, is left out where the run's settings or metrics say that it can't apply.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.config.algorithm import REWARD_FREE_ESTIMATORS
from dapo_jax.config.experiment import Config
from dapo_jax.config.sections import OF_THE_ANSWER
from dapo_jax.runtime.nonfinite import PREFIXES, reasons
from dapo_jax.runtime.rules import When
from dapo_jax.runtime.settings import leaves

STEPS_BEFORE = 10  # whose mean length a step's is compared with
REPEATED_STEPS = 10  # after so many an alert that lasts is given again
LAST = 10  # rows that stand for the end of a run
COLLAPSED = 0.1  # share of the first steps' entropy

Rows = Sequence[Mapping[str, Any]]


def _names(parts: str) -> set[str]:
    return {entry.partition("=")[0].strip() for entry in parts.split(",")}


def _learns_right(
    parts: str, correct: str, dynamic_sampling: bool, trained: str, positive_nll: float
) -> bool:
    asks = dynamic_sampling or trained != "all" or positive_nll > 0
    by_answer = not _names(parts).isdisjoint(OF_THE_ANSWER)
    return by_answer or asks and correct == "verifier"


def _counts_right(parts: str, correct: str, *rest: Any) -> bool:
    return correct == "threshold" or _learns_right(parts, correct, *rest)


_OF_RIGHT = (
    "reward.parts reward.correct algorithm.dynamic_sampling algorithm.trained_responses "
    "algorithm.positive_nll_coefficient"
)
# An own reward may leave the verifier's answers unread: they are then measured, and decide nothing.
READS_ANSWERS = When(
    _OF_RIGHT, lambda parts, *rest: "format" in _names(parts) or _learns_right(parts, *rest)
)
COUNTS_RIGHT = When(_OF_RIGHT, _counts_right)
GROUPS_OF_RIGHT = When(
    f"rollout.samples_per_prompt {_OF_RIGHT}",
    lambda samples, *rest: samples > 1 and _counts_right(*rest),
)
# The first update after fresh log-probs sees ratios of 1, which no clip cuts.
CLIPS = When(
    "algorithm.region rollout.updates_per_rollout algorithm.old_logprobs",
    lambda region, updates, old: region != "none" and (updates > 1 or old == "sampler"),
)
SEVERAL_UPDATES = When("rollout.updates_per_rollout", lambda updates: updates > 1)
ONE_POLICY = When("rollout.lag rollout.carry_over", lambda lag, carry: (lag, carry) == (0, "none"))
TOKEN_RATIO = When("algorithm.ratio", "token")
NO_PUNISHMENT = When(
    "algorithm.overlong_punishment algorithm.advantage",
    lambda punishes, advantage: not punishes and advantage not in REWARD_FREE_ESTIMATORS,
)
MAY_STOP = When(
    "algorithm.dynamic_sampling rollout.when_starved",
    lambda filters, starved: filters and starved == "partial",
)
NO_BONUS = When("algorithm.entropy_coefficient", lambda weight: not weight)


class Hint(NamedTuple):
    """A piece of advice, and when it applies: by settings and the step's metrics; None: always."""

    text: str
    applies: When | None = None


class Alert(NamedTuple):
    """A metric with one or several of: a limit of a step, an event of a step, a problem of a run.

    Attributes:
        metric: or the sum of two, as "a + b".
        setting: the limit of a step, a lower one where its name begins with `min_`; 0 is none.
        advice: alternatives to try beyond it.
        see: where to look beyond it.
        event: text of a step in which the metric is above 0.
        causes: of the event, as far as they apply.
        problem: text of a run whose last rows have a mean beyond `limit`, on either side of 0, or
            below `least`; without either, of a run with the metric above 0 in any step.
        applies: the settings with which it is said at all; None: all.
    """

    metric: str
    setting: str = ""
    advice: tuple[Hint, ...] = ()
    see: Hint | None = None
    event: str = ""
    causes: tuple[Hint, ...] = ()
    problem: str = ""
    limit: float = 0.0
    least: float = 0.0
    applies: When | None = None


ROLLOUTS = When("log.rollouts")
SLOWER = Hint("a smaller optimizer.learning_rate")
FRESHER = Hint(
    "rollout.lag=0 and rollout.carry_over=none",
    When("rollout.lag rollout.carry_over", lambda lag, carry: (lag, carry) != (0, "none")),
)
ALERTS = (
    Alert(
        "entropy",
        "watch.min_entropy",
        (
            Hint("a larger algorithm.clip_high", CLIPS),
            SLOWER,
            Hint("algorithm.entropy_coefficient=0.001", NO_BONUS),
        ),
    ),
    Alert(
        "growth of response_tokens_mean",
        "watch.max_length_growth",
        (SLOWER, Hint("algorithm.overlong_punishment=true", NO_PUNISHMENT)),
        Hint("see repetition"),
    ),
    Alert("truncated_fraction", problem="many responses are cut off by the budget", limit=0.3),
    Alert(
        "answer_not_found_rate",
        "watch.max_answer_not_found",
        (
            Hint("the pair of data.template and reward.verifier that belongs together"),
            Hint("a larger sampler.max_response_tokens", When("truncated_fraction")),
        ),
        problem="many responses have no answer the verifier can find",
        limit=0.3,
        applies=READS_ANSWERS,
    ),
    Alert(
        "all_wrong_fraction",
        "watch.max_all_wrong",
        (Hint("easier problems"), Hint("a larger rollout.samples_per_prompt")),
        Hint("see in rollouts/ whether the verdicts are right", ROLLOUTS),
        problem="most groups are all wrong",
        limit=0.8,
        applies=GROUPS_OF_RIGHT,
    ),
    Alert(
        "all_right_fraction",
        "watch.max_all_right",
        (Hint("harder problems"), Hint("rollout.when_starved=stop", MAY_STOP)),
        Hint("little is left to learn"),
        problem="most groups are all right: little is left to learn",
        limit=0.8,
        applies=GROUPS_OF_RIGHT,
    ),
    Alert(
        "verifier_failures per verdict",
        "watch.max_verifier_failures",
        (Hint("a larger reward.timeout_seconds"), Hint("more reward.workers")),
        Hint("rollouts/ says what failed", ROLLOUTS),
        applies=READS_ANSWERS,
    ),
    Alert(
        "kl_sampler_trainer",
        problem="sampler and trainer disagree",
        limit=0.05,
        applies=ONE_POLICY,  # else they are two by intent
    ),
    Alert(
        "clip_fraction_high",
        problem="the upper clip cuts many tokens",
        limit=0.1,
        applies=TOKEN_RATIO,  # that of a whole response is cut for all its tokens
    ),
    Alert(
        "rejected_fraction_low + rejected_fraction_high",
        advice=(FRESHER, Hint("wider bounds of algorithm.rejection")),
        problem="many tokens are rejected",
        limit=0.1,
    ),
    Alert(
        "effective_sample_fraction",
        advice=(FRESHER, Hint("a smaller algorithm.importance_cap")),
        problem="a few tokens have most of the importance weight",
        least=0.5,
    ),
    Alert(
        "ratio_p99",
        advice=(Hint("a smaller rollout.updates_per_rollout", SEVERAL_UPDATES), SLOWER),
        problem="the policy moves far within a step",
        limit=2.0,
        applies=TOKEN_RATIO,
    ),
    Alert(
        "starved",
        event="only {trained_groups:.0f} {groups} carried signal{broken}",
        problem="too few groups carried signal",
    ),
    Alert(
        "empty_updates",
        event="{empty_updates:.0f} updates had no trained token and were not taken{causes}",
        causes=(
            Hint("every response filtered", When("algorithm.overlong_filtering")),
            Hint("weighed 0", When("algorithm.token_weights")),
            Hint("none right", When("algorithm.trained_responses", "correct pairs")),
            Hint("none wrong", When("algorithm.trained_responses", "pairs")),
        ),
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
    Alert("verifier_failures", problem="the verifier failed on responses", applies=READS_ANSWERS),
)


def settings_of(config: Config) -> dict[str, Any]:
    """Settings of a config by dotted name."""
    return {name: value for name, _, value in leaves(config)}


def does_apply(when: When | None, values: Mapping[str, Any]) -> bool:
    """True without a condition, where it holds, and for a run older than one of its settings."""
    known = when is None or any(name not in values for name in when.names.split())
    return known or when is None or when(values)


def _alternatives(hints: Sequence[Hint], values: Mapping[str, Any]) -> str:
    """Hints that apply, as `a`, `a or b`, `a, b, or c`."""
    *others, last = [hint.text for hint in hints if does_apply(hint.applies, values)] or [""]
    comma = "," * (len(others) > 1)
    return f"{', '.join(others)}{comma} or {last}" if others else last


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
        self._settings = settings_of(config)
        self._alerts = [alert for alert in ALERTS if does_apply(alert.applies, self._settings)]
        self._tokens = collections.deque(finite_values(rows, "response_tokens_mean"), STEPS_BEFORE)
        self._lasting = collections.Counter[Alert]()  # steps in a row

    def of_step(self, values: Mapping[str, float]) -> list[str]:
        """Texts about a step's metrics beyond their limits, and about its events.

        A metric that stays beyond its limit is named again after ten steps.
        """
        texts, measured = [], self._settings | dict(values) | self._derived(values)
        for alert in self._alerts:
            limit = self._settings.get(alert.setting, 0.0)
            value, is_lower = measured.get(alert.metric), alert.setting.startswith("watch.min_")
            beyond = value is not None and (value < limit if is_lower else 0 < limit <= value)
            if beyond and self._lasting[alert] % REPEATED_STEPS == 0:
                side = f"{'below' if is_lower else 'at least'} config.{alert.setting} = {limit:g}"
                advice = _alternatives(alert.advice, measured)
                if alert.see and does_apply(alert.see.applies, measured):
                    advice += f"; {alert.see.text}"
                texts.append(f"{alert.metric} is {value:.3g}, {side}: try {advice}")
            self._lasting[alert] = self._lasting[alert] + 1 if beyond else 0
        return texts + _events(self._alerts, measured)

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


def _events(alerts: Sequence[Alert], values: Mapping[str, Any]) -> list[str]:
    broken = values.get("broken_groups", 0.0)
    words = {f"{prefix}reasons": reasons(dict(values), prefix) for prefix in PREFIXES}
    words["groups"] = "group" if values.get("trained_groups") == 1 else "groups"
    words["broken"] = f", {broken:.0f} were broken" if broken else ""
    texts = []
    for alert in alerts:
        if alert.event and values.get(alert.metric):
            causes = _alternatives(alert.causes, values)
            words["causes"] = f" ({causes}?)" if causes else ""
            texts.append(alert.event.format_map({**values, **words}))
    return texts


def alerts_of_run(rows: Rows, total_steps: int, settings: Mapping[str, Any]) -> list[str]:
    """Sentences on what is wrong with a whole run, for its report.

    Args:
        settings: of the run, by dotted name.
    """
    texts, last = [], rows[-1]["step"]
    if last < total_steps:
        texts.append(f"ends at step {last} of {total_steps}: still running, or stopped")
    accuracy = finite_values(rows, "heldout_accuracy")
    right_counts = does_apply(COUNTS_RIGHT, settings)
    if right_counts and accuracy.size > 1 and accuracy[-1] < accuracy[0]:
        texts.append(f"held-out accuracy fell from {accuracy[0]:.3f} to {accuracy[-1]:.3f}")
    entropy = finite_values(rows, "entropy")
    if entropy.size >= 2 * LAST:
        before, after = entropy[:LAST].mean(), entropy[-LAST:].mean()
        if after <= COLLAPSED * before:
            fall = f"from {before:.3g} to {after:.3g} nats"
            texts.append(f"entropy fell {fall}: little is explored any more")
    alerts = (alert for alert in ALERTS if does_apply(alert.applies, settings))
    return texts + [text for alert in alerts if (text := _problem(alert, rows, settings))]


def _problem(alert: Alert, rows: Rows, settings: Mapping[str, Any]) -> str:
    if not alert.problem:
        return ""
    if alert.limit or alert.least:
        ends = [finite_values(rows, name)[-LAST:] for name in alert.metric.split(" + ")]
        mean = sum(end.mean() for end in ends if end.size)
        known = any(end.size for end in ends)
        if not known or alert.least <= abs(mean) <= (alert.limit or np.inf):
            return ""
        advice = _alternatives(alert.advice, settings)
        advice = f": try {advice}" if advice else ""
        return f"{alert.problem}: {alert.metric} is {mean:.3g} at the end{advice}"
    steps = [row["step"] for row in rows if finite_values([row], alert.metric).sum() > 0]
    named = ", ".join(map(str, steps[:8])) + ", ..." * (len(steps) > 8)
    return f"{alert.problem} in {len(steps)} of {len(rows)} rows (step {named})" if steps else ""
