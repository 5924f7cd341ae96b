"""Alerts: one table of metrics and limits, with advice.

`Alerts` checks every step against the limits of `config.watch`; `check_run` checks the recorded
rows of a whole run for its report. Alerts and advice that cannot apply to a run are left out.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dapo_jax.config.algorithm import REWARD_FREE_ESTIMATORS
from dapo_jax.config.experiment import OF_THE_ANSWER, Config
from dapo_jax.runtime.nonfinite import PREFIXES, reasons
from dapo_jax.runtime.rules import When
from dapo_jax.runtime.settings import leaves

BASELINE_STEPS = 10  # previous steps that a response length is compared with
REPEATED_STEPS = 10  # an alert that persists is repeated after this many steps
LAST = 10  # rows that represent the end of a run
COLLAPSED = 0.1  # fraction of the initial entropy
SHOWN_STEPS = 8

Rows = Sequence[Mapping[str, Any]]


def _part_names(parts: str) -> set[str]:
    return {entry.partition("=")[0].strip() for entry in parts.split(",")}


def _trains_on_correctness(
    parts: str, correct: str, dynamic_sampling: bool, trained: str, positive_nll: float
) -> bool:
    is_needed = dynamic_sampling or trained != "all" or positive_nll > 0
    is_rewarded = not _part_names(parts).isdisjoint(OF_THE_ANSWER)
    return is_rewarded or is_needed and correct == "verifier"


def _uses_correctness(parts: str, correct: str, *rest: Any) -> bool:
    return correct == "threshold" or _trains_on_correctness(parts, correct, *rest)


_CORRECTNESS = (
    "reward.parts reward.correct algorithm.dynamic_sampling algorithm.trained_responses "
    "algorithm.positive_nll_coefficient"
)
# With a user's reward the verifier's answers may be logged without any influence on training.
READS_ANSWERS = When(
    _CORRECTNESS,
    lambda parts, *rest: "format" in _part_names(parts) or _trains_on_correctness(parts, *rest),
)
USES_CORRECTNESS = When(_CORRECTNESS, _uses_correctness)
GROUPS_BY_CORRECTNESS = When(
    f"rollout.samples_per_prompt {_CORRECTNESS}",
    lambda samples, *rest: samples > 1 and _uses_correctness(*rest),
)
# The first update after scoring has ratios of 1, which are never clipped.
CLIPS = When(
    "algorithm.region rollout.updates_per_rollout algorithm.old_logprobs",
    lambda region, updates, old: region != "none" and (updates > 1 or old == "sampler"),
)
SEVERAL_UPDATES = When("rollout.updates_per_rollout", lambda updates: updates > 1)
_AGE = "rollout.lag rollout.carry_over"
ON_POLICY = When(_AGE, lambda lag, carry_over: (lag, carry_over) == (0, "none"))
OFF_POLICY = When(_AGE, lambda lag, carry_over: (lag, carry_over) != (0, "none"))
TOKEN_RATIO = When("algorithm.ratio", "token")
CAN_PUNISH_LENGTH = When(
    "algorithm.overlong_punishment algorithm.advantage",
    lambda punishes, advantage: not punishes and advantage not in REWARD_FREE_ESTIMATORS,
)
CAN_STOP = When(
    "algorithm.dynamic_sampling rollout.when_starved",
    lambda filters, starved: filters and starved == "partial",
)
NO_BONUS = When("algorithm.entropy_coefficient", lambda weight: not weight)
WRITES_ROLLOUTS = When("log.rollouts")


class Hint(NamedTuple):
    """A piece of advice; `applies` tests the settings and the metrics of the step."""

    text: str
    applies: When | None = None


class Alert(NamedTuple):
    """A row of the table of alerts.

    Attributes:
        scope: "step": each step against the setting `limit`; "event": each step with a metric
            above 0; "end": the mean of a run's last rows against the number `limit`; "rows": a run
            with a metric above 0 in any row.
        metric: its name, or the sum of two as "a + b".
        limit: name of a setting (0 disables the alert) or a number.
        text: the message; metrics can be named in that of an event.
        advice: alternatives to try, or likely causes of an event.
        see: where to look.
        applies: settings for which the alert is meaningful.
        below: True if values below the limit raise the alert, else those at or above it.
    """

    scope: Literal["step", "event", "end", "rows"]
    metric: str
    limit: str | float = 0.0
    text: str = ""
    advice: tuple[Hint, ...] = ()
    see: Hint | None = None
    applies: When | None = None
    below: bool = False


SLOWER = Hint("a smaller optimizer.learning_rate")
FRESHER = Hint("rollout.lag=0 and rollout.carry_over=none", OFF_POLICY)
EXPLORE = (
    Hint("a larger algorithm.clip_high", CLIPS),
    SLOWER,
    Hint("algorithm.entropy_coefficient=0.001", NO_BONUS),
)
SHORTEN = (SLOWER, Hint("algorithm.overlong_punishment=true", CAN_PUNISH_LENGTH))
FIND_ANSWERS = (
    Hint("the pair of data.template and reward.verifier that belongs together"),
    Hint("a larger sampler.max_response_tokens", When("truncated_fraction")),
)
EASIER = (Hint("easier problems"), Hint("a larger rollout.samples_per_prompt"))
HARDER = (Hint("harder problems"), Hint("rollout.when_starved=stop", CAN_STOP))
VERIFY = (Hint("a larger reward.timeout_seconds"), Hint("more reward.workers"))
REJECT_LESS = (FRESHER, Hint("wider bounds of algorithm.rejection"))
SMALLER_WEIGHTS = (FRESHER, Hint("a smaller algorithm.importance_cap"))
MOVE_LESS = (Hint("a smaller rollout.updates_per_rollout", SEVERAL_UPDATES), SLOWER)
EMPTY_CAUSES = (
    Hint("every response filtered", When("algorithm.overlong_filtering")),
    Hint("token weights of 0", When("algorithm.token_weights")),
    Hint("none correct", When("algorithm.trained_responses", "correct pairs")),
    Hint("none incorrect", When("algorithm.trained_responses", "pairs")),
)
SEE_VERDICTS = Hint("see in rollouts/ whether the verdicts are right", WRITES_ROLLOUTS)
SEE_FAILURES = Hint("rollouts/ says what failed", WRITES_ROLLOUTS)
GROWTH = "growth of response_tokens_mean"
FAILURE_RATE = "verifier_failures per verdict"
REJECTED = "rejected_fraction_low + rejected_fraction_high"

# fmt: off
ALERTS = (
    Alert("step", "entropy", "watch.min_entropy", advice=EXPLORE, below=True),
    Alert("step", GROWTH, "watch.max_length_growth", advice=SHORTEN, see=Hint("see repetition")),
    Alert("step", "answer_not_found_rate", "watch.max_answer_not_found", advice=FIND_ANSWERS,
          applies=READS_ANSWERS),
    Alert("step", "all_wrong_fraction", "watch.max_all_wrong", advice=EASIER, see=SEE_VERDICTS,
          applies=GROUPS_BY_CORRECTNESS),
    Alert("step", "all_right_fraction", "watch.max_all_right", advice=HARDER,
          see=Hint("little is left to learn"), applies=GROUPS_BY_CORRECTNESS),
    Alert("step", FAILURE_RATE, "watch.max_verifier_failures", advice=VERIFY, see=SEE_FAILURES,
          applies=READS_ANSWERS),
    Alert("event", "starved", text="only {trained_groups:.0f} {groups} carried signal{broken}"),
    Alert("event", "empty_updates", advice=EMPTY_CAUSES,
          text="{empty_updates:.0f} updates had no trained token and were not taken{causes}"),
    Alert("event", "skipped_updates", text="an update was skipped: {reasons} was not finite"),
    Alert("event", "value_skipped_updates",
          text="an update of the critic was skipped: {value_reasons} was not finite"),
    Alert("end", "truncated_fraction", 0.3, "many responses are cut off by the budget"),
    Alert("end", "answer_not_found_rate", 0.3, advice=FIND_ANSWERS, applies=READS_ANSWERS,
          text="many responses have no answer that the verifier can find"),
    Alert("end", "all_wrong_fraction", 0.8, "most groups are all wrong", EASIER,
          applies=GROUPS_BY_CORRECTNESS),
    Alert("end", "all_right_fraction", 0.8, advice=HARDER, applies=GROUPS_BY_CORRECTNESS,
          text="most groups are all right: little is left to learn"),
    # With lag or carry-over the two policies differ by intention.
    Alert("end", "kl_sampler_trainer", 0.05, "sampler and trainer disagree", applies=ON_POLICY),
    # The ratio of a whole response is clipped for all its tokens.
    Alert("end", "clip_fraction_high", 0.1, "the upper clip cuts many tokens",
          applies=TOKEN_RATIO),
    Alert("end", REJECTED, 0.1, "many tokens are rejected", REJECT_LESS),
    Alert("end", "effective_sample_fraction", 0.5, below=True, advice=SMALLER_WEIGHTS,
          text="a few tokens have most of the importance weight"),
    Alert("end", "ratio_p99", 2.0, "the policy moves far within a step", MOVE_LESS,
          applies=TOKEN_RATIO),
    Alert("rows", "starved", text="too few groups carried signal"),
    Alert("rows", "empty_updates", text="updates had no trained token"),
    Alert("rows", "skipped_updates", text="updates were skipped, their gradient was not finite,"),
    Alert("rows", "broken_groups", text="groups were dropped because their reward failed"),
    Alert("rows", "verifier_failures", text="the verifier failed on responses",
          applies=READS_ANSWERS),
)
# fmt: on


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings of a config by dotted name."""
    return {name: value for name, _, value in leaves(config)}


def does_apply(when: When | None, values: Mapping[str, Any]) -> bool:
    """Return True if the condition holds; also if a run is older than one of its settings."""
    if when is None or any(name not in values for name in when.names.split()):
        return True
    return when(values)


def _join_hints(hints: Sequence[Hint], values: Mapping[str, Any]) -> str:
    """Join the hints that apply as `a`, `a or b`, `a, b, or c`."""
    *others, last = [hint.text for hint in hints if does_apply(hint.applies, values)] or [""]
    comma = "," * (len(others) > 1)
    return f"{', '.join(others)}{comma} or {last}" if others else last


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
        measured = self._settings | dict(values) | self._derived(values)
        texts = []
        for alert in self._alerts:
            if alert.scope == "step" and (text := self._threshold(alert, measured)):
                texts.append(text)
        events = [alert for alert in self._alerts if alert.scope == "event"]
        return texts + [_event(alert, measured) for alert in events if measured.get(alert.metric)]

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
        advice = _join_hints(alert.advice, measured)
        if alert.see and does_apply(alert.see.applies, measured):
            advice += f"; {alert.see.text}"
        text = f"{alert.metric} is {value:.3g}, {side} config.{alert.limit} = {limit:g}"
        return f"{text}: try {advice}"

    def _derived(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return ratios of the step's metrics, and record its response length."""
        verdicts = sum(count for name, count in values.items() if name.startswith("verdicts/"))
        tokens = values["response_tokens_mean"]
        growth = tokens / (np.mean(self._lengths) or np.inf) if self._lengths else 0.0
        self._lengths.append(tokens)
        rate = values["verifier_failures"] / max(1.0, verdicts)
        return {GROWTH: float(growth), FAILURE_RATE: rate}


def _event(alert: Alert, values: Mapping[str, Any]) -> str:
    broken = values.get("broken_groups", 0.0)
    causes = _join_hints(alert.advice, values)
    words = {f"{prefix}reasons": reasons(dict(values), prefix) for prefix in PREFIXES}
    words["groups"] = "group" if values.get("trained_groups") == 1 else "groups"
    words["broken"] = f", {broken:.0f} were broken" if broken else ""
    words["causes"] = f" ({causes}?)" if causes else ""
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
    accuracy = finite_values(rows, "heldout_accuracy")
    uses_correctness = does_apply(USES_CORRECTNESS, settings)
    if uses_correctness and accuracy.size > 1 and accuracy[-1] < accuracy[0]:
        texts.append(f"held-out accuracy fell from {accuracy[0]:.3f} to {accuracy[-1]:.3f}")
    entropy = finite_values(rows, "entropy")
    if entropy.size >= 2 * LAST:
        before = entropy[:LAST].mean()
        after = entropy[-LAST:].mean()
        if after <= COLLAPSED * before:
            change = f"from {before:.3g} to {after:.3g} nats"
            texts.append(f"entropy fell {change}: the policy hardly explores any more")
    for alert in ALERTS:
        if does_apply(alert.applies, settings):
            if alert.scope == "end":
                texts.append(_check_end(alert, rows, settings))
            elif alert.scope == "rows":
                texts.append(_check_rows(alert, rows))
    return [text for text in texts if text]


def _check_end(alert: Alert, rows: Rows, settings: Mapping[str, Any]) -> str:
    ends = [finite_values(rows, name)[-LAST:] for name in alert.metric.split(" + ")]
    means = [end.mean() for end in ends if end.size]
    size = abs(sum(means))
    limit = float(alert.limit)
    if not means or (size >= limit if alert.below else size <= limit):
        return ""
    advice = _join_hints(alert.advice, settings)
    advice = f": try {advice}" if advice else ""
    return f"{alert.text}: {alert.metric} is {sum(means):.3g} at the end{advice}"


def _check_rows(alert: Alert, rows: Rows) -> str:
    steps = [row["step"] for row in rows if finite_values([row], alert.metric).sum() > 0]
    if not steps:
        return ""
    shown = ", ".join(map(str, steps[:SHOWN_STEPS])) + ", ..." * (len(steps) > SHOWN_STEPS)
    return f"{alert.text} in {len(steps)} of {len(rows)} rows (step {shown})"
