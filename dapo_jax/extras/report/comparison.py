"""Comparison of runs: seeds of an experiment, headline numbers, differences between settings."""

import dataclasses
import os.path
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit  # a dependency of jax

from dapo_jax.algorithms import PRESETS
from dapo_jax.config.experiment import Config
from dapo_jax.extras.alerts import LAST, finite_values, reward_leads
from dapo_jax.extras.report.recorded_run import RecordedRun, heldout_means
from dapo_jax.reporting.scores import wilson
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


def _shared_settings(run: RecordedRun) -> dict[str, Any]:
    return {name: v for name, v in run.settings.items() if not name.startswith(SEED_SETTINGS)}


def _experiment_name(runs: list[RecordedRun]) -> str:
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("0123456789_-.= ").removesuffix("seed")
    return f"{common.rstrip('_-. ') or names[0]} ({len(runs)} seeds)"


def experiments(runs: Sequence[RecordedRun]) -> list[Experiment]:
    """Group runs that are seeds of one experiment, in the order given, under unique names."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(_shared_settings(run).items())), []).append(run)
    named: dict[str, Experiment] = {}
    for number, group in enumerate(groups.values(), 1):
        name = _experiment_name(group)
        name = f"{name} [{number}]" if name in named else name
        named[name] = Experiment(name, group)
    return list(named.values())


def _t_interval(mean: float, variance: float, freedom: float) -> Interval:
    half = float(stdtrit(freedom, 0.975) * np.sqrt(variance))
    return [mean, mean - half, mean + half]


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
    return _t_interval(mean, samples.var(ddof=1) / samples.size, samples.size - 1)


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
    return _t_interval(difference, errors.sum(), freedom)


class Headline(NamedTuple):
    """A headline number: the metric in the first row, the last row, or the last `LAST` rows."""

    name: str
    metric: str
    rows: Literal["first", "last", "end"]
    form: Literal["share", "number"]


OF_CORRECTNESS = (
    Headline("Held-out accuracy before", "heldout_accuracy", "first", "share"),
    Headline("Held-out accuracy after", "heldout_accuracy", "last", "share"),
    Headline(f"Sampled accuracy, last {LAST} steps", "accuracy", "end", "share"),
)
OF_REWARD = (
    Headline("Held-out reward before", "heldout_reward", "first", "number"),
    Headline("Held-out reward after", "heldout_reward", "last", "number"),
    Headline(f"Reward, last {LAST} steps", "reward", "end", "number"),
)
OTHERS = (
    Headline(f"Entropy, last {LAST} steps", "entropy", "end", "number"),
    Headline(f"Response tokens, last {LAST} steps", "response_tokens_mean", "end", "number"),
    Headline(f"Seconds per step, last {LAST} steps", "seconds_step", "end", "number"),
)
ROWS = {"first": slice(0, 1), "last": slice(-1, None), "end": slice(-LAST, None)}
EVALUATION = {"first": 0, "last": -1}
FIELDS = {"heldout_accuracy": "correct", "heldout_reward": "reward"}  # of responses, by metric


def _samples(experiment: Experiment, headline: Headline) -> np.ndarray:
    """Return independent values: means of the seeds, or the problems or steps of the only run."""
    rows = ROWS[headline.rows]
    values = [finite_values(run.rows, headline.metric)[rows] for run in experiment.runs]
    if len(values) > 1:
        return np.array([numbers.mean() for numbers in values if numbers.size])
    if headline.metric in FIELDS:
        which = EVALUATION[headline.rows]
        means = heldout_means(experiment.runs[0], FIELDS[headline.metric], which)
        return values[0] if means is None else means
    return values[0]


def _headline_interval(experiment: Experiment, headline: Headline) -> tuple[Interval, str]:
    """Return a headline number, and a text that tells what its interval is over."""
    runs = experiment.runs
    metric = headline.metric
    if len(runs) == 1 and headline.rows != "end":
        rows = [row for row in runs[0].rows if finite_values([row], metric).size] or [{}]
        row = rows[EVALUATION[headline.rows]]
        return [
            row.get(name) for name in (metric, f"{metric}_low", f"{metric}_high")
        ], "over problems"
    samples = _samples(experiment, headline)
    over = f"over {samples.size} seeds" if len(runs) > 1 else "over these steps"
    return mean_interval(samples, "accuracy" in metric), over


def headlines(experiment: Experiment) -> list[dict[str, Any]]:
    """Return the headline numbers of an experiment, with 95 % intervals if there are any."""
    lines = []
    leaders = OF_CORRECTNESS + OF_REWARD
    if reward_leads(experiment.settings):
        leaders = OF_REWARD + OF_CORRECTNESS
    for headline in leaders + OTHERS:
        numbers, over = _headline_interval(experiment, headline)
        if headline.form == "share":  # a t interval can leave [0, 1]
            numbers = [x and min(1.0, max(0.0, x)) for x in numbers]
        if numbers[0] is not None:
            line = {"name": headline.name, "form": headline.form, "value": numbers, "over": over}
            lines.append(line)
    return lines


def differences(experiment: Experiment, first: Experiment) -> dict[str, Interval]:
    """Return differences to another experiment's headline numbers with 95 % intervals, by name."""
    by_name: dict[str, Interval] = {}
    has_lone_run = (len(experiment.runs) > 1) != (len(first.runs) > 1)
    for headline in OF_CORRECTNESS + OF_REWARD + OTHERS:
        left, right = (_samples(side, headline) for side in (experiment, first))
        numbers = welch_interval(left, right)
        if has_lone_run:  # the problems and steps of a run do not show the spread of its seeds
            numbers = [numbers[0], None, None]
        if numbers[0] is not None:
            by_name[headline.name] = numbers
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
    tables = [_shared_settings(experiment.runs[0]) for experiment in shown]
    names = dict.fromkeys(name for table in tables for name in table)
    lines = [[name, *(table.get(name) for table in tables)] for name in names]
    return [line for line in lines if any(value != line[1] for value in line[2:])]
