"""Costs fitted to a run, whose schedule is replayed; figures of a simulated step."""

import json
import math
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
import scipy.optimize  # comes with jax

from dapo_jax.commands.plan.simulate import Costs, Counts, Simulation, Step
from dapo_jax.commands.plan.workload import RecordedWorkload
from dapo_jax.config.experiment import Config
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.runtime.settings import ConfigError

FIRST_STEPS = 2  # compile


def step_figures(step: Step) -> dict[str, float]:
    """Return figures of a simulated step for a table or JSON."""
    names = "asked judged kept surplus kept_tokens rows fill utilisation".split()
    sampled = "prefills tokens abandoned_tokens put_back_tokens".split()
    return (
        {"seconds_rollout": step.rollout_seconds, "seconds_learning": step.update_seconds}
        | {f"seconds_{name}": value for name, value in step.seconds.items()}
        | {name: getattr(step, name) for name in names}
        | {name: getattr(step.sampled, name) for name in sampled}
        | {
            "seconds_tail": step.tail_seconds,
            "decode_steps": step.counts["decode_step"],
            "decode_bursts": step.counts["burst"],
            "sampled_to_kept_tokens": step.drawn_tokens / max(1, step.kept_tokens),
            "tokens_per_second": step.sampled.tokens / (step.rollout_seconds or math.inf),
        }
    )


def replay(
    config: Config,
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    folder: pathlib.Path,
    steps: int,
) -> list[Step]:
    """Simulate the run's first steps with the groups that it judged.

    Responses that were stopped were never written: others of their step stand in for them.
    """
    simulation = Simulation(config, decoder, mesh, RecordedWorkload(folder, replay=True), Costs())
    return [simulation.step() for _ in range(steps)]


def fit(
    rows: Sequence[Counts], seconds: Sequence[float] | np.ndarray, names: Sequence[str]
) -> dict[str, float]:
    """Fit costs of those names, none below 0, to seconds by least absolute deviations.

    So a step in which the machine did something else counts for little.
    """
    used = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    count = len(used)
    apart = np.hstack([used, np.eye(count), -np.eye(count)])
    objective = np.repeat([0.0, 1.0], [len(names), 2 * count])
    solved = scipy.optimize.linprog(objective, A_eq=apart, b_eq=seconds)
    return dict(zip(names, map(float, solved.x), strict=False))


def calibrate(
    config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, folder: pathlib.Path
) -> Costs:
    """Return the costs of a run's machine, from its settings, `metrics.jsonl` and `rollouts/`.

    Learning counts by tokens alone: the steps of one setting hardly differ. A prefilled token costs
    what a scored one does, and so does a slot's share of a decode step at most. The host's other
    work counts by bursts, responses and rollouts. The first steps, which compile, are left out.

    Raises `ConfigError` if the run has too few steps.
    """
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    if len(rows) <= FIRST_STEPS:
        raise ConfigError(f"{folder}: has {len(rows)} steps: must be more than {FIRST_STEPS}")
    steps = replay(config, decoder, mesh, folder, len(rows))[FIRST_STEPS:]
    counts = [step.counts for step in steps]

    def seconds(name: str) -> np.ndarray:
        return np.array([row[f"seconds_{name}"] for row in rows[FIRST_STEPS:]])

    def used(name: str) -> np.ndarray:
        return np.array([count[name] for count in counts])

    costs = fit(counts, seconds("update"), ("update_token",))
    costs |= fit(counts, seconds("score"), ("score_token",))
    costs |= fit(counts, seconds("rollout") - seconds("decode"), ("load", "burst", "response"))
    token = costs["prefill_token"] = costs["score_token"]
    decoding = seconds("decode") - token * used("prefill_token")
    costs |= fit(counts, decoding, ("slot_step",))
    if costs["slot_step"] > token > 0:
        costs |= fit(counts, decoding - token * used("slot_step"), ("decode_step",))
        costs["slot_step"] = token
    return Costs(**costs)
