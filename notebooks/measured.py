"""Runs that `measure.py` kept, and the tables that docs/ablation.md shows of them."""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from configs.two_strategies import CLAIMS, RUNGS, SWITCHES
from dapo_jax.run.scores import PERCENTILES, RESAMPLES, Estimate, wilson

FOLDER = pathlib.Path(__file__).resolve().parent / "measurements"
KNOBS = ("clip_higher", "dynamic_sampling", "token_level", "overlong_punishment")
PAPER = (30, 36, 38, 41, 42, 50)  # AIME 2024 avg@32 of the same rungs (2503.14476, table 1)
SMOOTHED = 3  # steps


def _without_spread(value: float, units: float, lowest: float) -> Estimate:
    """Return the estimate of units with equal values, between `lowest` and 1."""
    ends = (lowest + (1 - lowest) * end for end in wilson((value - lowest) / (1 - lowest), units))
    return Estimate(value, *ends)


def estimate_over_seeds(shares: Sequence[np.ndarray], seed: int, lowest: float = 0.0) -> Estimate:
    """Return the mean over runs and problems; the interval resamples both.

    Equal values have Wilson's interval of as many units as a run has problems.

    Args:
        shares: values of each run's problems, [P] each, at most 1.
        seed: of the resampling.
        lowest: smallest possible value.
    """
    mean = float(np.mean([values.mean() for values in shares]))
    if len(shares) < 2:
        return Estimate(mean, None, None)
    if np.ptp(np.concatenate(shares)) == 0:
        return _without_spread(float(shares[0][0]), min(map(len, shares)), lowest)
    rng = np.random.default_rng(seed)
    draws = (RESAMPLES, len(shares))
    chosen = rng.integers(len(shares), size=draws)
    resampled = np.zeros(draws)
    for number, values in enumerate(shares):
        mask = chosen == number
        # Faster by distinct value: a run has hundreds of problems and few distinct shares.
        distinct, sizes = np.unique(values, return_counts=True)
        counts = rng.multinomial(len(values), sizes / len(values), mask.sum())
        resampled[mask] = counts @ distinct / len(values)
    low, high = np.percentile(resampled.mean(axis=1), PERCENTILES)
    return Estimate(mean, float(low), float(high))


def combined(switches: Sequence[str]) -> str:
    """The one name of a combination, so that the ladder and the knobs share runs."""
    return "+".join(name for name in SWITCHES if name in switches) or "none"


LADDER = {rung: combined(switches) for rung, switches in RUNGS.items()}
COMBINATIONS = [
    combined([knob for place, knob in enumerate(KNOBS) if number >> place & 1])
    for number in range(2 ** len(KNOBS))
]
# Seeds of the page. None of them was seen while the task was being chosen.
LADDER_SEEDS, KNOB_SEEDS, CLAIM_SEEDS = range(300, 308), range(300, 305), range(300, 304)
PLAN = list(
    dict.fromkeys(
        [
            *itertools.product(LADDER.values(), LADDER_SEEDS),
            *itertools.product(COMBINATIONS, KNOB_SEEDS),
            *itertools.product(CLAIMS, CLAIM_SEEDS),
        ]
    )
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured run; `columns` are the metrics of docs/metrics.md by step of the policy.

    Three columns are of the working strategy: `working_fraction` of what is sampled,
    `working_correct` and `working_truncated` of what works.
    """

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
    def speed(self) -> float:
        """Mean over all steps of the accuracy of what is sampled: the area under its curve."""
        return float(self.columns["accuracy"].mean())

    @property
    def take_off(self) -> int | None:
        """The first step up to which half of a few steps' responses work; None: never."""
        working, window = self.columns["working_fraction"], np.full(SMOOTHED, 1 / SMOOTHED)
        there = np.flatnonzero(np.convolve(working, window, "valid") >= 0.5)
        return int(there[0]) + SMOOTHED if there.size else None


def path(name: str, seed: int) -> pathlib.Path:
    """The file of that run's measures."""
    return FOLDER / f"{name}_seed{seed}.json"


def read(file: pathlib.Path) -> Run:
    """The run in that file."""
    found = json.loads(file.read_text())
    alone = found["settings"].get("critic.pretrain_steps", 0)  # steps of the critic alone
    columns = {key: np.array(values[alone:], float) for key, values in found["steps"].items()}
    before, after = (np.array(found[f"heldout_right_{at}"]) for at in ("before", "after"))
    samples = found["heldout_samples"]
    return Run(found["name"], found["seed"], columns, before / samples, after / samples)


@functools.cache
def runs(name: str, seeds: Sequence[int] = KNOB_SEEDS) -> list[Run]:
    """The measured runs of a combination, rung or claim, by seed."""
    return [read(path(LADDER.get(name, name), seed)) for seed in seeds]


def all_runs(name: str) -> list[Run]:
    """Those with every seed that was planned for that name."""
    return runs(name, tuple(seed for one, seed in PLAN if one == LADDER.get(name, name)))


def accuracy(run: Run) -> np.ndarray:
    """Held-out accuracy after training, of each problem."""
    return run.after


def speed(run: Run) -> np.ndarray:
    """Mean sampled accuracy over all steps, as the one value of a run."""
    return np.array([run.speed])


Outcome = Callable[[Run], np.ndarray]
OUTCOMES: dict[str, Outcome] = {"accuracy": accuracy, "over all steps": speed}
STEPS = {"accuracy": "difference", "over all steps": "over all steps"}  # heads of differences


def estimate(found: Sequence[Run], outcome: Outcome = accuracy) -> Estimate:
    """Mean over runs, with the 95 % interval that resamples runs and problems."""
    return estimate_over_seeds([outcome(run) for run in found], 0)


def difference(ones: Sequence[Run], others: Sequence[Run], outcome: Outcome = accuracy) -> Estimate:
    """Of an outcome, by seed and problem, which both share."""
    pairs = zip(ones, others, strict=True)
    differences = [outcome(one) - outcome(other) for one, other in pairs]
    return estimate_over_seeds(differences, 0, lowest=-1.0)


def contrast(switches: Sequence[str], outcome: Outcome = accuracy) -> Estimate:
    """Mean of an outcome with minus without one switch, over the states of the others.

    Of two switches, their interaction: half of what the second adds beside the first, less half
    of what it adds without.
    """
    by_seed = []
    for seed in range(len(KNOB_SEEDS)):
        terms = []
        for name in COMBINATIONS:
            signs = [1 if switch in name.split("+") else -1 for switch in switches]
            terms.append(np.prod(signs) * outcome(runs(name)[seed]))
        by_seed.append(np.mean(terms, axis=0) * 2)
    return estimate_over_seeds(by_seed, 0, lowest=-2.0)


def written(one: Estimate, signed: bool = False) -> str:
    form = "+.3f" if signed else ".3f"
    bounds = "" if one.low is None else f" [{one.low:{form}}, {one.high:{form}}]"
    return f"{one.value:{form}}{bounds}"


def _mean(found: Sequence[Run], column: str, digits: int) -> str:
    return f"{np.nanmean([run.end(column) for run in found]):.{digits}f}"


def _take_off(found: Sequence[Run]) -> str:
    steps = [run.take_off for run in found if run.take_off is not None]
    if not steps:
        return "never"
    missing = "" if len(steps) == len(found) else f" ({len(steps)} of {len(found)} seeds)"
    return f"{np.mean(steps):.1f}{missing}"


def _table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown; the columns are the keys of the first row."""
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(row[head] for head in heads)} |" for row in rows]
    return "\n".join(lines)


def _cut_and_sampled(found: Sequence[Run]) -> dict[str, str]:
    sampled = [run.columns["sampled_tokens"].sum() for run in found]
    return {
        "truncated": _mean(found, "truncated_fraction", 3),
        "thousand tokens": f"{np.mean(sampled) / 1000:.0f}",
    }


def ladder_table() -> str:
    """A row for each rung."""
    rows, earlier = [], None
    for (rung, name), paper in zip(LADDER.items(), PAPER, strict=True):
        found = runs(name, LADDER_SEEDS)
        row = {"rung": f"`{rung}`", "accuracy": written(estimate(found))}
        for outcome, measure in OUTCOMES.items():
            step = written(difference(found, earlier, measure), True) if earlier else ""
            row[STEPS[outcome]] = step
        row |= {"take-off": _take_off(found), "entropy": _mean(found, "entropy", 3)}
        rows.append(row | _cut_and_sampled(found) | {"the paper": str(paper)})
        earlier = found
    return _table(rows)


def effects_table() -> str:
    """A row for each switch, then for each pair of them."""
    pairs = itertools.combinations(KNOBS, 2)
    rows = []
    for switches in [*((knob,) for knob in KNOBS), *pairs]:
        row = {"switch": " with ".join(f"`{one}`" for one in switches)}
        for name, outcome in OUTCOMES.items():
            row[name] = written(contrast(switches, outcome), signed=True)
        rows.append(row)
    return _table(rows)


def knobs_table() -> str:
    """A row for each combination of the four switches."""
    rows = []
    for name in COMBINATIONS:
        found = runs(name)
        row = {"combination": f"`{name}`", "accuracy": written(estimate(found))}
        rows.append(row | _cut_and_sampled(found))
    return _table(rows)


CLAIM_BASES = {  # the runs that a claim is held against
    "dr_grpo": "none",
    "gspo": "none",
    "critic_pretrained": "critic",
    "critic_lambda_0.95": "critic_pretrained",
    "rft": "one_update",
    "dpo": "one_update",
}


def claims_table() -> str:
    """A row for each variant of another paper, and for each that one of them starts from."""
    rows = []
    for name in ["none", "token_level", *CLAIMS]:
        found, base = runs(name, CLAIM_SEEDS), CLAIM_BASES.get(name, "token_level")
        against = name not in ("none", "token_level")
        row = {"variant": f"`{name}`", "accuracy": written(estimate(found))}
        row["against"] = f"`{base}`" if against else ""
        for outcome, measure in OUTCOMES.items():
            step = difference(found, runs(base, CLAIM_SEEDS), measure)
            row[STEPS[outcome]] = written(step, True) if against else ""
        row |= {
            "take-off": _take_off(found),
            "tokens of wrong": _mean(found, "response_tokens_wrong", 1),
            "clipped": f"{np.mean([_clipped(run) for run in found]):.3f}",
        }
        rows.append(row)
    return _table(rows)


def _clipped(run: Run) -> float:
    """Share of trained tokens whose gradient a bound cut, mean over all steps."""
    both = run.columns["clip_fraction_low"] + run.columns["clip_fraction_high"]
    return float(np.nanmean(both))


@functools.cache
def tables() -> dict[str, str]:
    """By the name of their place in the page."""
    return {
        "ladder": ladder_table(),
        "effects": effects_table(),
        "knobs": knobs_table(),
        "claims": claims_table(),
    }
