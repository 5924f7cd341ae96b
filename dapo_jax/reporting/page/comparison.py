"""Comparison of runs: seeds of an experiment, headline numbers, differences between settings."""

import dataclasses
import os.path
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit  # a dependency of jax

from dapo_jax.algorithms import PRESETS
from dapo_jax.config.experiment import Config
from dapo_jax.reporting.alerts import LAST, finite_values
from dapo_jax.reporting.page.recorded_run import RecordedRun, heldout_shares
from dapo_jax.reporting.scores import estimate_over_seeds, estimates, wilson
from dapo_jax.runtime.settings import leaves, require

# Prefixes of settings that may differ between two seeds of an experiment.
SEED_SETTINGS = ("seed", "run_dir", "log.")
Interval = list[float | None]  # [mean, low, high]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs with settings that differ only in the seed."""

    name: str
    runs: list[RecordedRun]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings


def _shared_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith(SEED_SETTINGS)}


def _experiment_name(runs: list[RecordedRun]) -> str:
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("0123456789_-.= ").removesuffix("seed")
    return f"{common.rstrip('_-. ') or names[0]} ({len(runs)} seeds)"


def experiments(runs: Sequence[RecordedRun]) -> list[Experiment]:
    """Group runs that are seeds of one experiment, in the order given, under unique names."""
    groups: list[list[RecordedRun]] = []
    for run in runs:
        shared = _shared_settings(run.settings)
        matching = (group for group in groups if _shared_settings(group[0].settings) == shared)
        group = next(matching, None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    named: list[Experiment] = []
    for number, group in enumerate(groups, 1):
        name = _experiment_name(group)
        is_taken = any(name == experiment.name for experiment in named)
        named.append(Experiment(f"{name} [{number}]" if is_taken else name, group))
    return named


def mean_interval(samples: np.ndarray, are_shares: bool = False) -> Interval:
    """Return the mean of independent values with its 95 % interval by Student's t.

    There is no interval for fewer than 2 values. Equal shares have Wilson's interval of as many
    units.
    """
    if not samples.size:
        return [None, None, None]
    mean = float(samples.mean())
    if samples.size < 2:
        return [mean, None, None]
    if are_shares and not np.ptp(samples):
        return [mean, *wilson(mean, samples.size)]
    error = samples.std(ddof=1) / np.sqrt(samples.size)
    half = float(stdtrit(samples.size - 1, 0.975) * error)
    return [mean, mean - half, mean + half]


class Headline(NamedTuple):
    """A headline number: the metric in the first row, the last row, or the last `LAST` rows."""

    name: str
    metric: str
    rows: Literal["first", "last", "end"]
    form: Literal["share", "number"]


HEADLINES = (
    Headline("Held-out accuracy before", "heldout_accuracy", "first", "share"),
    Headline("Held-out accuracy after", "heldout_accuracy", "last", "share"),
    Headline(f"Sampled accuracy, last {LAST} steps", "accuracy", "end", "share"),
    Headline(f"Reward, last {LAST} steps", "reward", "end", "number"),
    Headline(f"Entropy, last {LAST} steps", "entropy", "end", "number"),
    Headline(f"Response tokens, last {LAST} steps", "response_tokens_mean", "end", "number"),
    Headline(f"Seconds per step, last {LAST} steps", "seconds_step", "end", "number"),
)
ROWS = {"first": slice(0, 1), "last": slice(-1, None), "end": slice(-LAST, None)}
EVALUATION = {"first": 0, "last": -1}


def _samples(experiment: Experiment, headline: Headline) -> np.ndarray:
    """Return independent values: means of the seeds, or the steps of the only run."""
    rows = ROWS[headline.rows]
    values = [finite_values(run.rows, headline.metric)[rows] for run in experiment.runs]
    if len(values) == 1:
        return values[0]
    return np.array([numbers.mean() for numbers in values if numbers.size])


def _headline_interval(experiment: Experiment, headline: Headline) -> tuple[Interval, str]:
    """Return a headline number, and a text that tells what its interval is over."""
    runs = experiment.runs
    metric = headline.metric
    samples = _samples(experiment, headline)
    if len(runs) > 1 and metric == "heldout_accuracy":
        recorded = [heldout_shares(run, EVALUATION[headline.rows]) for run in runs]
        shares = [values for values in recorded if values is not None]
        if len(shares) == len(runs):
            estimate = estimate_over_seeds(shares, 0)
            return list(dataclasses.astuple(estimate)), f"over {len(runs)} seeds and their problems"
    if len(runs) > 1:
        return mean_interval(samples, "accuracy" in metric), f"over {samples.size} seeds"
    if headline.rows == "end":
        return mean_interval(samples, "accuracy" in metric), "over these steps"
    rows = [row for row in runs[0].rows if finite_values([row], metric).size] or [{}]
    names = (metric, f"{metric}_low", f"{metric}_high")
    return [rows[EVALUATION[headline.rows]].get(name) for name in names], "over problems"


def headlines(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the headline numbers of an experiment, with 95 % intervals if there are any."""
    lines = []
    for headline in HEADLINES:
        numbers, over = _headline_interval(experiment, headline)
        if headline.form == "share":  # a t interval can leave [0, 1]
            numbers = [x and min(1.0, max(0.0, x)) for x in numbers]
        if numbers[0] is not None:
            line = {"name": headline.name, "form": headline.form, "value": numbers, "over": over}
            lines.append(line)
    return lines


def welch_interval(left: np.ndarray, right: np.ndarray) -> Interval:
    """Return the difference of two means of independent values, with 95 % by Welch's t.

    There is no interval if a side has fewer than two values or no side has a spread.
    """
    if not (left.size and right.size):
        return [None, None, None]
    difference = float(left.mean() - right.mean())
    if min(left.size, right.size) < 2 or not (left.std() or right.std()):
        return [difference, None, None]
    errors = np.array([side.var(ddof=1) / side.size for side in (left, right)])
    freedom = errors.sum() ** 2 / sum(errors**2 / [left.size - 1, right.size - 1])
    half = float(stdtrit(freedom, 0.975) * np.sqrt(errors.sum()))
    return [difference, difference - half, difference + half]


def _paired_shares(left: Experiment, right: Experiment, which: int) -> list[np.ndarray]:
    """Return differences of held-out shares by seed and problem; none if these differ."""

    def by_seed(experiment: Experiment) -> dict[Any, np.ndarray | None]:
        return {run.settings.get("seed"): heldout_shares(run, which) for run in experiment.runs}

    def problems(experiment: Experiment) -> dict[str, Any]:
        return {name: v for name, v in experiment.settings.items() if name.startswith("data.")}

    left_shares = by_seed(left)
    right_shares = by_seed(right)
    if left_shares.keys() != right_shares.keys() or problems(left) != problems(right):
        return []
    if not len(left_shares) == len(left.runs) == len(right.runs):
        return []
    differences = []
    for seed, shares in left_shares.items():
        others = right_shares[seed]
        if shares is None or others is None or len(shares) != len(others):
            return []
        differences.append(shares - others)
    return differences


def _heldout_difference(
    left: Experiment, right: Experiment, which: int
) -> tuple[Interval, str] | None:
    """Return the difference of held-out accuracy by problem; None if there are no such records."""
    pairs = _paired_shares(left, right, which)
    if pairs and not np.ptp(np.concatenate(pairs)):  # such as one initial policy
        return [float(pairs[0][0]), None, None], "by problem"
    if len(pairs) > 1:
        estimate = estimate_over_seeds(pairs, 0)
        return list(dataclasses.astuple(estimate)), "by seed and problem"
    if pairs:
        (estimate,) = estimates(pairs[0][:, None], np.ones(len(pairs[0])), 0)
        return list(dataclasses.astuple(estimate)), "by problem"
    if len(left.runs) == len(right.runs) == 1:
        shares = [heldout_shares(side.runs[0], which) for side in (left, right)]
        if shares[0] is not None and shares[1] is not None:
            return welch_interval(shares[0], shares[1]), "of different problems (Welch)"
    return None


def differences(experiment: Experiment, first: Experiment) -> dict[str, dict[str, Any]]:
    """Return differences to another experiment's headline numbers with 95 % intervals, by name."""
    by_name: dict[str, dict[str, Any]] = {}
    has_lone_run = (len(experiment.runs) > 1) != (len(first.runs) > 1)
    for headline in HEADLINES:
        heldout = None
        if headline.metric == "heldout_accuracy":
            heldout = _heldout_difference(experiment, first, EVALUATION[headline.rows])
        sides = [_samples(side, headline) for side in (experiment, first)]
        if has_lone_run:  # the steps of a run do not show the spread of its seeds
            sides = [side.mean(keepdims=True) if side.size else side for side in sides]
        independent = welch_interval(sides[0], sides[1]), "of independent samples (Welch)"
        numbers, over = heldout or independent
        if numbers[0] is not None:
            by_name[headline.name] = {"value": numbers, "over": over}
    return by_name


def _changed(settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[list[Any]]:
    """Return [name, value, other value] of settings that both have and that differ."""
    shared = [name for name in settings if name in others]
    return [[n, settings[n], others[n]] for n in shared if settings[n] != others[n]]


def from_preset(settings: dict[str, Any], preset: str = "") -> tuple[str, list[list[Any]]]:
    """Return the name of the given or nearest preset and the algorithm settings that differ.

    Raises:
        ConfigError: there is no such preset.
    """
    require(not preset or preset in PRESETS, "preset", preset, f"one of {', '.join(PRESETS)}")
    changes = {
        name: _changed(settings, {f"algorithm.{n}": v for n, _, v in leaves(PRESETS[name]())})
        for name in ([preset] if preset else PRESETS)
    }
    nearest = min(changes, key=lambda name: len(changes[name]))
    return nearest, changes[nearest]


def from_defaults(settings: dict[str, Any]) -> list[list[Any]]:
    """Return [name, value, default] of settings that differ from their defaults."""
    return _changed(settings, {name: value for name, _, value in leaves(Config())})


def differing_settings(shown: Sequence[Experiment]) -> list[list[Any]]:
    """Return [name, value in each experiment, ...] of settings that differ between experiments."""
    tables = [_shared_settings(experiment.settings) for experiment in shown]
    names = dict.fromkeys(name for table in tables for name in table)
    lines = [[name, *(table.get(name) for table in tables)] for name in names]
    return [line for line in lines if any(value != line[1] for value in line[2:])]


def spent(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Return the seconds and tokens of all runs by their use."""
    rows = [row for run in experiment.runs for row in run.rows]

    def total(name: str) -> float:
        return float(finite_values(rows, name).sum())

    rollout = total("seconds_rollout")
    decode = min(total("seconds_decode"), rollout)
    seconds = {
        "decoding": decode,
        "rest of the rollout (prefill, scoring)": rollout - decode,
        "score pass": total("seconds_score"),
        "update": total("seconds_update"),
        "evaluation": total("seconds_evaluation"),
    }
    sampled = [_sampled_tokens(row) for row in rows]
    trained = [_trained_tokens(row) for row in rows]
    tokens = {
        "kept: trained on": sum(trained),
        "dropped: no signal, or surplus": sum(sampled) - sum(trained),
        "abandoned: stopped when the batch was full": total("abandoned_tokens"),
        "put back: sampled again, pages had run out": total("put_back_tokens"),
    }
    return {
        part: {name: round(x, 1) for name, x in table.items() if x > 0}
        for part, table in (("seconds", seconds), ("tokens", tokens))
    }


def _sampled_tokens(row: Mapping[str, Any]) -> float:
    speed = row.get("sampled_tokens_per_second") or 0.0  # may be null: not finite
    return speed * (row.get("seconds_rollout") or 0.0)


def _trained_tokens(row: Mapping[str, Any]) -> float:
    ratio = row.get("sampled_to_kept_tokens") or 0.0
    if not ratio or not row.get("trained_groups"):
        return 0.0
    sampled = _sampled_tokens(row)
    lost = (row.get("abandoned_tokens") or 0.0) + (row.get("put_back_tokens") or 0.0)
    return min(sampled, (sampled + lost) / ratio)
