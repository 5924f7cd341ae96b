"""Comparison of runs: seeds of one experiment, headline numbers, settings that differ."""

import dataclasses
import os.path
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit  # comes with jax

from dapo_jax.algorithms import PRESETS
from dapo_jax.config.experiment import Config
from dapo_jax.reporting.alerts import LAST, finite_values
from dapo_jax.reporting.page.recorded_run import RecordedRun, heldout_shares
from dapo_jax.reporting.scores import estimate_over_seeds, estimates, wilson
from dapo_jax.runtime.settings import leaves, require

# Beginnings of settings that may differ between two seeds of one experiment.
OF_A_SEED = ("seed", "run_dir", "log.")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs whose settings differ only in the seed."""

    name: str
    runs: list[RecordedRun]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings


def _decisive(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith(OF_A_SEED)}


def _name(runs: list[RecordedRun]) -> str:
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("0123456789_-.= ").removesuffix("seed")
    return f"{common.rstrip('_-. ') or names[0]} ({len(runs)} seeds)"


def experiments(runs: Sequence[RecordedRun]) -> list[Experiment]:
    """Groups runs that are seeds of one experiment, in the order given; no name comes twice."""
    together: list[list[RecordedRun]] = []
    for run in runs:
        seeds = (r for r in together if _decisive(r[0].settings) == _decisive(run.settings))
        if (others := next(seeds, None)) is None:
            together.append([run])
        else:
            others.append(run)
    named: list[Experiment] = []
    for number, members in enumerate(together, 1):
        name = _name(members)
        is_taken = any(name == experiment.name for experiment in named)
        named.append(Experiment(f"{name} [{number}]" if is_taken else name, members))
    return named


def mean_interval(samples: np.ndarray, are_shares: bool = False) -> list[float | None]:
    """[mean, low, high] of independent values: 95 % by Student's t, no interval below 2 values.

    Shares that are all equal, such as 1, have Wilson's interval of so many units.
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


# Name, metric, rows that count (the first, the last, the run's end), form of the number.
HEADLINES = (
    ("Held-out accuracy before", "heldout_accuracy", "first", "share"),
    ("Held-out accuracy after", "heldout_accuracy", "last", "share"),
    (f"Sampled accuracy, last {LAST} steps", "accuracy", "end", "share"),
    (f"Reward, last {LAST} steps", "reward", "end", "number"),
    (f"Entropy, last {LAST} steps", "entropy", "end", "number"),
    (f"Response tokens, last {LAST} steps", "response_tokens_mean", "end", "number"),
    (f"Seconds per step, last {LAST} steps", "seconds_step", "end", "number"),
)


PARTS = {"first": slice(0, 1), "last": slice(-1, None), "end": slice(-LAST, None)}


def _samples(experiment: Experiment, metric: str, at: str) -> np.ndarray:
    """Independent values of a headline number: means of the seeds, or steps of the only run."""
    numbers = [finite_values(run.rows, metric)[PARTS[at]] for run in experiment.runs]
    chosen = [values for values in numbers if values.size]
    return np.array([values.mean() for values in chosen]) if len(numbers) > 1 else numbers[0]


def _headline(experiment: Experiment, metric: str, at: str) -> tuple[list[float | None], str]:
    """[mean, low, high] of a headline number, and what the interval is over."""
    which, runs, are_shares = 0 if at == "first" else -1, experiment.runs, "accuracy" in metric
    samples = _samples(experiment, metric, at)
    if len(runs) > 1 and metric == "heldout_accuracy":
        shares = [share for run in runs if (share := heldout_shares(run, which)) is not None]
        if len(shares) == len(runs):
            estimate = dataclasses.astuple(estimate_over_seeds(shares, 0))
            return list(estimate), f"over {len(runs)} seeds and their problems"
    if len(runs) > 1:
        return mean_interval(samples, are_shares), f"over {samples.size} seeds"
    if at == "end":
        return mean_interval(samples, are_shares), "over these steps"
    rows = [row for row in runs[0].rows if finite_values([row], metric).size] or [{}]
    names = (metric, f"{metric}_low", f"{metric}_high")
    return [rows[which].get(name) for name in names], "over problems"


def headlines(experiment: Experiment) -> list[dict[str, Any]]:
    """Headline numbers of an experiment, each with a 95 % interval where there is one."""
    lines = []
    for name, metric, at, form in HEADLINES:
        numbers, over = _headline(experiment, metric, at)
        if form == "share":  # a t interval does not end at 0 and 1
            numbers = [x and min(1.0, max(0.0, x)) for x in numbers]
        if numbers[0] is not None:
            lines.append({"name": name, "form": form, "value": numbers, "over": over})
    return lines


def welch_interval(ones: np.ndarray, others: np.ndarray) -> list[float | None]:
    """[difference of means, low, high] of independent values: 95 % by Welch's t.

    Without an interval where a side has fewer than two values, or no side has a spread.
    """
    if not (ones.size and others.size):
        return [None, None, None]
    difference = float(ones.mean() - others.mean())
    if min(ones.size, others.size) < 2 or not (ones.std() or others.std()):
        return [difference, None, None]
    errors = np.array([side.var(ddof=1) / side.size for side in (ones, others)])
    freedom = errors.sum() ** 2 / sum(errors**2 / [ones.size - 1, others.size - 1])
    half = float(stdtrit(freedom, 0.975) * np.sqrt(errors.sum()))
    return [difference, difference - half, difference + half]


def _paired_shares(ones: Experiment, others: Experiment, which: int) -> list[np.ndarray]:
    """Differences of held-out shares by seed and problem; empty where the two differ in either."""

    def by_seed(experiment: Experiment) -> dict[Any, np.ndarray | None]:
        return {run.settings.get("seed"): heldout_shares(run, which) for run in experiment.runs}

    def problems(experiment: Experiment) -> dict[str, Any]:
        return {name: v for name, v in experiment.settings.items() if name.startswith("data.")}

    mine, theirs = by_seed(ones), by_seed(others)
    are_alike = mine.keys() == theirs.keys() and problems(ones) == problems(others)
    if not are_alike or not len(mine) == len(ones.runs) == len(others.runs):
        return []
    pairs = [(mine[seed], theirs[seed]) for seed in mine]
    shares = [
        one - other
        for one, other in pairs
        if one is not None and other is not None and len(one) == len(other)
    ]
    return shares if len(shares) == len(pairs) else []


def _heldout_difference(
    ones: Experiment, others: Experiment, which: int
) -> tuple[list[float | None], str] | None:
    """Difference of held-out accuracy by problem; None where seeds and problems don't match."""
    pairs = _paired_shares(ones, others, which)
    if pairs and not np.ptp(np.concatenate(pairs)):  # as of one policy that both begin with
        return [float(pairs[0][0]), None, None], "by problem"
    if len(pairs) > 1:
        estimate = estimate_over_seeds(pairs, 0)
        return list(dataclasses.astuple(estimate)), "by seed and problem"
    if pairs:
        (estimate,) = estimates(pairs[0][:, None], np.ones(len(pairs[0])), 0)
        return list(dataclasses.astuple(estimate)), "by problem"
    lone = [heldout_shares(one.runs[0], which) for one in (ones, others) if len(one.runs) == 1]
    known = [shares for shares in lone if shares is not None]
    if len(known) == 2:
        return welch_interval(*known), "of different problems (Welch)"
    return None


def differences(experiment: Experiment, first: Experiment) -> dict[str, dict[str, Any]]:
    """Differences of headline numbers to another experiment's, with 95 % intervals, by name."""
    found: dict[str, dict[str, Any]] = {}
    is_one_to_many = (len(experiment.runs) > 1) != (len(first.runs) > 1)
    for name, metric, at, _ in HEADLINES:
        told = None
        if metric == "heldout_accuracy":
            told = _heldout_difference(experiment, first, 0 if at == "first" else -1)
        sides = [_samples(one, metric, at) for one in (experiment, first)]
        if is_one_to_many:  # steps of a run say nothing of its seeds' spread
            sides = [side.mean(keepdims=True) if side.size else side for side in sides]
        numbers, over = told or (welch_interval(*sides), "of independent samples (Welch)")
        if numbers[0] is not None:
            found[name] = {"value": numbers, "over": over}
    return found


def _changed(settings: dict[str, Any], others: dict[str, Any]) -> list[list[Any]]:
    """[name, value, other value] of every setting that both have and that differs."""
    both = [name for name in settings if name in others]
    return [[n, settings[n], others[n]] for n in both if settings[n] != others[n]]


def from_preset(settings: dict[str, Any], preset: str = "") -> tuple[str, list[list[Any]]]:
    """Name of a preset, the nearest by default, and the settings of `algorithm` that differ.

    Raises `ConfigError` for a name that no preset has.
    """
    require(not preset or preset in PRESETS, "preset", preset, f"one of {', '.join(PRESETS)}")
    differences = {
        name: _changed(settings, {f"algorithm.{n}": v for n, _, v in leaves(PRESETS[name]())})
        for name in ([preset] if preset else PRESETS)
    }
    nearest = min(differences, key=lambda name: len(differences[name]))
    return nearest, differences[nearest]


def from_defaults(settings: dict[str, Any]) -> list[list[Any]]:
    """[name, value, default] of every setting that differs from its default."""
    return _changed(settings, {name: value for name, _, value in leaves(Config())})


def apart(shown: Sequence[Experiment]) -> list[list[Any]]:
    """[name, value in each experiment, ...] of every setting that sets experiments apart."""
    tables = [_decisive(experiment.settings) for experiment in shown]
    names = list(dict.fromkeys(name for table in tables for name in table))
    lines = [[name, *(table.get(name) for table in tables)] for name in names]
    return [line for line in lines if any(value != line[1] for value in line[2:])]


# Metrics from which the trained tokens of a step follow.
OF_TOKENS = (
    "sampled_tokens_per_second seconds_rollout abandoned_tokens put_back_tokens "
    "sampled_to_kept_tokens trained_groups"
).split()


def spent(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Seconds and tokens of all runs together, by what they were spent on."""
    rows = [row for run in experiment.runs for row in run.rows]

    def total(name: str) -> float:
        return float(finite_values(rows, name).sum())

    rollout, update = total("seconds_rollout"), total("seconds_update")
    decode = min(total("seconds_decode"), rollout)
    seconds = {
        "decoding": decode,
        "rest of the rollout (prefill, judging)": rollout - decode,
        "score pass": total("seconds_score"),
        "update": update,
        "evaluation": total("seconds_evaluation"),
    }
    kept = dropped = 0.0
    for row in rows:
        # A metric may be missing, or null where it was not finite.
        speed, took, lost, back, ratio, groups = (row.get(name) or 0.0 for name in OF_TOKENS)
        drawn = speed * took
        trained = min(drawn, (drawn + lost + back) / ratio) if ratio and groups else 0.0
        kept, dropped = kept + trained, dropped + drawn - trained
    tokens = {
        "kept: trained on": kept,
        "dropped: no signal, or surplus": dropped,
        "abandoned: stopped when the batch was full": total("abandoned_tokens"),
        "put back: drawn again, pages had run out": total("put_back_tokens"),
    }
    return {
        part: {name: round(x, 1) for name, x in table.items() if x > 0}
        for part, table in (("seconds", seconds), ("tokens", tokens))
    }
