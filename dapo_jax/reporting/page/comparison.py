"""Runs side by side: which are seeds of one experiment, what sets them apart, what each reached."""

import dataclasses
import os.path
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit  # comes with jax

from dapo_jax.algorithms import PRESETS
from dapo_jax.config.experiment import Config
from dapo_jax.reporting.alerts import LAST, finite_values
from dapo_jax.reporting.page.recorded_run import Recorded, heldout_shares
from dapo_jax.reporting.scores import estimate_over_seeds
from dapo_jax.runtime.settings import leaves, require

# What may differ between two seeds of one experiment.
OF_A_SEED = ("seed", "run_dir", "log.")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs whose settings differ only in their seed."""

    name: str
    runs: list[Recorded]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings


def _decisive(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith(OF_A_SEED)}


def _name(runs: list[Recorded]) -> str:
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("0123456789_-.= ").removesuffix("seed")
    return f"{common.rstrip('_-. ') or names[0]} ({len(runs)} seeds)"


def experiments(runs: Sequence[Recorded]) -> list[Experiment]:
    """The runs, seeds of one experiment together, in the order given; no name twice."""
    together: list[list[Recorded]] = []
    for run in runs:
        for others in together:
            if _decisive(others[0].settings) == _decisive(run.settings):
                others.append(run)
                break
        else:
            together.append([run])
    named: list[Experiment] = []
    for number, members in enumerate(together, 1):
        name = _name(members)
        taken = any(name == one.name for one in named)
        named.append(Experiment(f"{name} [{number}]" if taken else name, members))
    return named


def mean_interval(samples: np.ndarray) -> list[float | None]:
    """Mean and 95 % interval (Student's t) of independent values; of fewer than 2, no interval."""
    if not samples.size:
        return [None, None, None]
    mean = float(samples.mean())
    if samples.size < 2:
        return [mean, None, None]
    error = samples.std(ddof=1) / np.sqrt(samples.size)
    half = float(stdtrit(samples.size - 1, 0.975) * error)
    return [mean, mean - half, mean + half]


# Name, metric, what is made of its rows, and the form to show it in.
HEADLINES = (
    ("Held-out accuracy before", "heldout_accuracy", "first", "share"),
    ("Held-out accuracy after", "heldout_accuracy", "last", "share"),
    (f"Sampled accuracy, last {LAST} steps", "accuracy", "end", "share"),
    (f"Reward, last {LAST} steps", "reward", "end", "number"),
    (f"Entropy, last {LAST} steps", "entropy", "end", "number"),
    (f"Response tokens, last {LAST} steps", "response_tokens_mean", "end", "number"),
    (f"Seconds per step, last {LAST} steps", "seconds_step", "end", "number"),
)


def _reached(experiment: Experiment, metric: str, taken: str) -> tuple[list[float | None], str]:
    """[mean, low, high] of a headline number, and over what the interval is."""
    part = {"first": slice(0, 1), "last": slice(-1, None), "end": slice(-LAST, None)}[taken]
    chosen = [finite_values(run.rows, metric)[part] for run in experiment.runs]
    chosen = [one for one in chosen if one.size]
    if len(experiment.runs) > 1 and metric == "heldout_accuracy":
        kept = [heldout_shares(run, 0 if taken == "first" else -1) for run in experiment.runs]
        shares = [one for one in kept if one is not None]
        if len(shares) == len(kept):
            found = estimate_over_seeds(shares, 0)
            return list(dataclasses.astuple(found)), f"over {len(shares)} seeds and their problems"
    if len(experiment.runs) > 1:
        found = mean_interval(np.array([one.mean() for one in chosen]))
        return found, f"over {len(chosen)} seeds"
    if taken in ("first", "last"):
        rows = [row for row in experiment.runs[0].rows if finite_values([row], metric).size]
        row = rows[0 if taken == "first" else -1] if rows else {}
        ends = [row.get(f"{metric}{end}") for end in ("", "_low", "_high")]
        return ends, "over problems (bootstrap)"
    return mean_interval(np.concatenate([*chosen, np.zeros(0)])), "over these steps"


def headlines(experiment: Experiment) -> list[dict[str, Any]]:
    """The numbers to read first, each with its 95 % interval where there is one."""
    found = []
    for name, metric, taken, form in HEADLINES:
        numbers, over = _reached(experiment, metric, taken)
        if form == "share":  # which a t interval knows nothing of
            numbers = [x and min(1.0, max(0.0, x)) for x in numbers]
        if numbers[0] is not None:
            found.append({"name": name, "form": form, "value": numbers, "over": over})
    return found


def _changed(settings: dict[str, Any], others: dict[str, Any]) -> list[list[Any]]:
    """[name, value, other value] of every setting that differs and that both have."""
    both = [name for name in settings if name in others]
    return [[n, settings[n], others[n]] for n in both if settings[n] != others[n]]


def from_preset(settings: dict[str, Any], preset: str = "") -> tuple[str, list[list[Any]]]:
    """The preset of that name, or else the nearest, and what of `algorithm` differs from it.

    Raises `ConfigError` for a name that is none.
    """
    require(not preset or preset in PRESETS, "preset", preset, f"one of {', '.join(PRESETS)}")
    differences = {
        name: _changed(settings, {f"algorithm.{n}": v for n, _, v in leaves(PRESETS[name]())})
        for name in ([preset] if preset else PRESETS)
    }
    nearest = min(differences, key=lambda name: len(differences[name]))
    return nearest, differences[nearest]


def from_defaults(settings: dict[str, Any]) -> list[list[Any]]:
    """What differs from the defaults of all settings."""
    return _changed(settings, {name: value for name, _, value in leaves(Config())})


def apart(found: Sequence[Experiment]) -> list[list[Any]]:
    """[setting, value of each experiment, ...] of every decisive setting in which they differ."""
    tables = [_decisive(one.settings) for one in found]
    names = list(dict.fromkeys(name for table in tables for name in table))
    lines = [[name, *(table.get(name) for table in tables)] for name in names]
    return [line for line in lines if any(value != line[1] for value in line[2:])]


# What tells how many tokens of a step were trained on.
OF_TOKENS = (
    "sampled_tokens_per_second seconds_rollout abandoned_tokens put_back_tokens "
    "sampled_to_kept_tokens trained_groups"
).split()


def spent(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Seconds and tokens of all runs together, by what they went into."""
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
        # Missing or not finite is as good as none.
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
