"""What `measure.py` kept, and the tables that docs/ablation.md shows of it."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from configs.ladder import RUNGS, SWITCHES
from dapo_jax.reporting.scores import Estimate, estimate_over_seeds

FOLDER = pathlib.Path(__file__).resolve().parent / "measurements"
KNOBS = ("clip_higher", "dynamic_sampling", "token_level", "overlong_punishment")
PAPER = (30, 36, 38, 41, 42, 50)  # AIME 2024 avg@32 of the same rungs (2503.14476, table 1)
LEVEL = 0.7  # an accuracy to reach
SMOOTHED = 3  # steps


def combined(switches: Sequence[str]) -> str:
    """The one name of a combination, so that the ladder and the knobs share runs."""
    return "+".join(name for name in SWITCHES if name in switches) or "none"


LADDER = {rung: combined(switches) for rung, switches in RUNGS.items()}
COMBINATIONS = [
    combined([knob for place, knob in enumerate(KNOBS) if number >> place & 1])
    for number in range(2 ** len(KNOBS))
]


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured run; `columns` are the metrics of docs/metrics.md by step."""

    name: str
    seed: int
    columns: dict[str, np.ndarray]
    before: np.ndarray  # [P], share of right responses to each held-out problem
    after: np.ndarray

    def end(self, column: str) -> float:
        """Mean of the last steps; NaN where they had nothing to take it of."""
        last = self.columns[column][-SMOOTHED:]
        return float(last[~np.isnan(last)].mean()) if np.isfinite(last).any() else float("nan")

    @property
    def died(self) -> bool:
        """Nothing that is sampled is right any more."""
        return self.end("accuracy") < 0.02

    def reached(self, level: float = LEVEL) -> int | None:
        """The first step up to which a few steps' sampled accuracy has a mean of `level`."""
        accuracy, window = self.columns["accuracy"], np.full(SMOOTHED, 1 / SMOOTHED)
        there = np.flatnonzero(np.convolve(accuracy, window, "valid") >= level)
        return int(there[0]) + SMOOTHED if there.size else None

    def tokens_until(self, step: int) -> int:
        """All tokens sampled in the first steps."""
        return int(self.columns["sampled_tokens"][:step].sum())


def read(path: pathlib.Path) -> Run:
    """The run in that file."""
    found = json.loads(path.read_text())
    columns = {key: np.array(values, float) for key, values in found["steps"].items()}
    before, after = (np.array(found[f"heldout_right_{at}"]) for at in ("before", "after"))
    samples = found["heldout_samples"]
    return Run(found["name"], found["seed"], columns, before / samples, after / samples)


def runs(name: str, seeds: int | None = None) -> list[Run]:
    """The measured runs of a combination, by seed."""
    found = sorted(map(read, FOLDER.glob(f"{name}_seed*.json")), key=lambda run: run.seed)
    return found[:seeds]


def accuracy(found: Sequence[Run]) -> Estimate:
    """Held-out accuracy after training, over seeds and problems."""
    return estimate_over_seeds([run.after for run in found], 0)


def difference(ones: Sequence[Run], others: Sequence[Run]) -> Estimate:
    """Of `accuracy`, by seed and problem, which both share."""
    pairs = zip(ones, others, strict=True)
    return estimate_over_seeds([one.after - other.after for one, other in pairs], 0, lowest=-1.0)


def written(one: Estimate, signed: bool = False) -> str:
    form = "+.3f" if signed else ".3f"
    bounds = "" if one.low is None else f" [{one.low:{form}}, {one.high:{form}}]"
    return f"{one.value:{form}}{bounds}"


def _mean(found: Sequence[Run], column: str, digits: int) -> str:
    return f"{np.nanmean([run.end(column) for run in found]):.{digits}f}"


def _died(found: Sequence[Run]) -> str:
    return f"{sum(run.died for run in found)} of {len(found)}"


def _cost(found: Sequence[Run]) -> tuple[str, str]:
    """Steps and thousands of sampled tokens until LEVEL, means of the seeds that got there."""
    there = [(run, step) for run in found if (step := run.reached())]
    if not there:
        return "never", "-"
    steps = np.mean([step for _, step in there])
    tokens = np.mean([run.tokens_until(step) for run, step in there])
    missing = "" if len(there) == len(found) else f" ({len(there)} of {len(found)} seeds)"
    return f"{steps:.1f}{missing}", f"{tokens / 1000:.0f}"


def ladder_table() -> str:
    """Markdown, a row for each rung."""
    lines = [
        "| rung | accuracy | against the rung before | died | entropy | tokens | truncated | "
        f"kept | steps to {LEVEL} | thousand tokens to {LEVEL} | the paper |",
        "|---" * 11 + "|",
    ]
    earlier: list[Run] = []
    for (rung, name), paper in zip(LADDER.items(), PAPER, strict=True):
        found = runs(name)
        cells = [
            f"`{rung}`",
            written(accuracy(found)),
            written(difference(found, earlier), signed=True) if earlier else "",
            _died(found),
            _mean(found, "entropy", 3),
            _mean(found, "response_tokens_mean", 1),
            _mean(found, "truncated_fraction", 3),
            _mean(found, "kept_fraction", 2),
            *_cost(found),
            str(paper),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        earlier = found
    return "\n".join(lines)


def knobs_table(seeds: int) -> str:
    """Markdown, a row for each combination of the four switches."""
    heads = ["clip higher", "dynamic sampling", "token level", "overlong punishment"]
    heads += [
        "accuracy",
        "died",
        "reward",
        "entropy",
        "tokens",
        "truncated",
        "kept",
        "thousand tokens",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in COMBINATIONS:
        found = runs(name, seeds)
        spent = np.mean([run.columns["sampled_tokens"].sum() for run in found])
        cells = [
            *("on" if knob in name else "" for knob in KNOBS),
            written(accuracy(found)),
            _died(found),
            _mean(found, "reward", 2),
            _mean(found, "entropy", 3),
            _mean(found, "response_tokens_mean", 1),
            _mean(found, "truncated_fraction", 3),
            _mean(found, "kept_fraction", 2),
            f"{spent / 1000:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def effect(knob: str, seeds: int) -> Estimate:
    """What a switch adds to the accuracy, mean over the eight states of the others."""
    by_seed: dict[int, list[np.ndarray]] = {}
    for name in COMBINATIONS:
        if knob not in name:
            on = runs(combined([*name.split("+"), knob]), seeds)
            for one, other in zip(on, runs(name, seeds), strict=True):
                by_seed.setdefault(one.seed, []).append(one.after - other.after)
    differences = [np.mean(found, axis=0) for found in by_seed.values()]
    return estimate_over_seeds(differences, 0, lowest=-1.0)


def effects_table(seeds: int) -> str:
    """Markdown, a row for each switch."""
    lines = ["| switch | what it adds to the accuracy |", "|---|---|"]
    lines += [f"| `{knob}` | {written(effect(knob, seeds), signed=True)} |" for knob in KNOBS]
    return "\n".join(lines)
