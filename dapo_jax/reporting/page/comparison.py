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
from dapo_jax.reporting.scores import estimate_over_seeds
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


def mean_interval(samples: np.ndarray) -> list[float | None]:
    """[mean, low, high] of independent values: 95 % by Student's t, no interval below 2 values."""
    if not samples.size:
        return [None, None, None]
    mean = float(samples.mean())
    if samples.size < 2:
        return [mean, None, None]
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


def _headline(experiment: Experiment, metric: str, at: str) -> tuple[list[float | None], str]:
    """[mean, low, high] of a headline number, and what the interval is over."""
    part = {"first": slice(0, 1), "last": slice(-1, None), "end": slice(-LAST, None)}[at]
    which, runs = 0 if at == "first" else -1, experiment.runs
    chosen = [numbers for run in runs if (numbers := finite_values(run.rows, metric)[part]).size]
    if len(runs) > 1 and metric == "heldout_accuracy":
        shares = [share for run in runs if (share := heldout_shares(run, which)) is not None]
        if len(shares) == len(runs):
            estimate = dataclasses.astuple(estimate_over_seeds(shares, 0))
            return list(estimate), f"over {len(runs)} seeds and their problems"
    if len(runs) > 1:
        means = np.array([numbers.mean() for numbers in chosen])
        return mean_interval(means), f"over {len(chosen)} seeds"
    if at == "end":
        return mean_interval(np.concatenate([*chosen, np.zeros(0)])), "over these steps"
    rows = [row for row in runs[0].rows if finite_values([row], metric).size] or [{}]
    names = (metric, f"{metric}_low", f"{metric}_high")
    return [rows[which].get(name) for name in names], "over problems (bootstrap)"


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
