"""Fit the simulator to one setting of the embedded task and compare it with two others.

    python tests/benchmarks/simulate.py --base dapo_jax:arithmetic_base --folder runs/simulate

Three runs that differ in slots and in G alternate their steps in one process, so that other work on
the machine affects all alike. Costs come from the first run only. Medians leave out the steps that
compile. Finished runs in the folder are used again. Prints a table and a JSON line.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import runpy
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import bench
import jax
import numpy as np
import scipy.optimize  # comes with jax

from dapo_jax.config.experiment import Checkpoint, Config, Data, Evaluation, Log, Model
from dapo_jax.extras.plan.simulate import Costs, Counts, Simulation, Step
from dapo_jax.extras.plan.workload import PROMPT, Drawn
from dapo_jax.model import load_huggingface
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.run.compute import numerics, open_mesh
from dapo_jax.run.run import open_run
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.signals import Signals

FIRST_STEPS = 2  # compile
SEEDS = 3  # of the law; the prediction is a median over them too


class _Recorded(NamedTuple):
    drawn: Drawn
    surplus: bool  # surplus groups finish faster than others


def _read_step(path: pathlib.Path, prompts: dict[int, int]) -> dict[int, _Recorded]:
    """Read the groups of a rollouts file, and lengths of prompts, by their index in the data."""
    lines: dict[int, list[dict]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        lines.setdefault(line["index"], []).append(line)
        prompts[line["index"]] = line["prompt_tokens"]
    groups = {}
    for index, group in lines.items():
        group.sort(key=lambda line: line["sample"])
        columns = (np.array([line[name] for line in group]) for name in Drawn._fields)
        groups[index] = _Recorded(Drawn(*columns), group[0]["surplus"])
    return groups


class RecordedWorkload:
    """Workload of the groups that a run recorded (`rollouts/`), resampled by step.

    Steps after the last recorded one resample the last, steps before the first the first. With
    `replay`, a prompt that the step recorded has the recorded group itself. Raises `ConfigError` if
    the run's folder holds no rollouts.
    """

    def __init__(self, folder: pathlib.Path | str, *, replay: bool = False, seed: int = 0):
        self._replay, self._seed = replay, seed
        self._steps: dict[int, dict[int, _Recorded]] = {}
        self._prompts: dict[int, int] = {}
        try:
            for path in sorted(pathlib.Path(folder).glob("rollouts/step_*.jsonl")):
                if groups := _read_step(path, self._prompts):
                    self._steps[int(path.stem.removeprefix("step_"))] = groups
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{folder}: its rollouts can't be read: {error!r}") from None
        if not self._steps:
            raise ConfigError(f"{folder}: holds no rollouts; run it with config.log.rollouts=true")
        self._seen = sorted(self._prompts.values())

    def prompt_tokens(self, index: int) -> int:
        """Return the recorded length, or a random recorded one for other prompts."""
        if index in self._prompts:
            return self._prompts[index]
        return int(np.random.default_rng([self._seed, PROMPT, index]).choice(self._seen))

    def draw(self, step: int, index: int, samples: int) -> Drawn:
        """Return a recorded group in random order; more samples than recorded repeat some."""
        earlier = (number for number in self._steps if number <= step + 1)
        recorded = self._steps[max(earlier, default=min(self._steps))]
        group = recorded.get(index)
        if self._replay and group is not None and len(group.drawn.tokens) == samples:
            return group.drawn
        rng = np.random.default_rng([self._seed, step, index])
        groups = [group for group in recorded.values() if not group.surplus]
        groups = groups or list(recorded.values())
        drawn = groups[rng.integers(len(groups))].drawn
        size = len(drawn.tokens)
        order = rng.permutation(size) if samples <= size else rng.integers(size, size=samples)
        return Drawn(*(column[order[:samples]] for column in drawn))


def step_figures(step: Step) -> dict[str, float]:
    """Return figures of a simulated step, named as in a run's metrics."""
    decoding = sum(step.seconds[name] for name in ("prefill_token", "decode_step", "slot_step"))
    return {
        "seconds_decode": decoding,
        "seconds_rollout": step.rollout_seconds,
        "seconds_learning": step.update_seconds,
        "seconds_step": step.rollout_seconds + step.update_seconds,
        "tokens": step.sampled.tokens,
        "decode_steps": step.counts["decode_step"],
    }


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


def read_rows(folder: pathlib.Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def calibrate(
    config: Config, decoder: DecoderConfig, mesh: jax.sharding.Mesh, folder: pathlib.Path
) -> Costs:
    """Return the costs of a run's machine, from its settings, `metrics.jsonl` and `rollouts/`.

    Learning counts by tokens alone: the steps of one setting hardly differ. A prefilled token costs
    what a scored one does, and so does a slot's share of a decode step at most. The host's other
    work counts by bursts, responses and rollouts. The first steps, which compile, are left out.

    Raises `ConfigError` if the run has too few steps.
    """
    rows = read_rows(folder)
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


def make_config(options: argparse.Namespace, slots: int, samples: int) -> Config:
    """Return the config of a run with nothing but its steps."""
    config = runpy.run_path(bench.RL)["get_config"]()
    config.run_dir = str(options.folder / f"slots_{slots}_samples_{samples}")
    config.total_steps = options.steps
    config.model = Model(folder=str(options.base))
    config.data = Data(max_terms=options.terms, max_prompt_tokens=16, heldout_problems=0)
    config.rollout.prompts_per_step = options.prompts
    config.rollout.samples_per_prompt = samples
    config.sampler.slots = slots
    config.checkpoint = Checkpoint(every_steps=0)
    config.evaluation = Evaluation(every_steps=0)
    config.log = Log(show_group_every_steps=0, tensorboard=False)
    return config


def run_in_turn(configs: list[Config]) -> None:
    """Run all first steps, then all second steps, and so on, starting with each run in turn."""
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        runs = [open_run(config, signals, stack) for config in configs]
        for run in runs:
            run.begin()
        for step in range(configs[0].total_steps):
            first = step % len(runs)
            for run in runs[first:] + runs[:first]:
                run.step()
        for run in runs:
            run.finish()


def measured(folder: pathlib.Path) -> list[dict[str, float]]:
    """Return the rows of a run's steps with the figures of `step_figures`."""
    rows = read_rows(folder)[FIRST_STEPS:]
    for row in rows:
        row["tokens"] = row["sampled_tokens_per_second"] * row["seconds_rollout"]
        row["seconds_learning"] = row["seconds_score"] + row["seconds_update"]
    return rows


def predict(config: Config, model: tuple, law: pathlib.Path, costs: Costs) -> list[dict]:
    """Simulate steps with resampled lengths and verdicts of another run."""
    records = []
    for seed in range(SEEDS):
        simulation = Simulation(config, *model, RecordedWorkload(law, seed=seed), costs)
        steps = [simulation.step() for _ in range(config.total_steps)]
        records += map(step_figures, steps[FIRST_STEPS:])
    return records


def main() -> None:
    options = bench.read_arguments(
        __doc__,
        base="dapo_jax:arithmetic_base",
        folder=pathlib.Path("runs/simulate"),
        steps=24,
        prompts=32,  # groups of a step
        terms=8,  # of a sum, at most
        slots=[128, 64],  # fitted, predicted
        samples=[16, 8],  # fitted, predicted
    )
    (slots, other_slots), (samples, other_samples) = options.slots, options.samples
    settings = ((slots, samples), (other_slots, samples), (slots, other_samples))
    configs = [make_config(options, *setting) for setting in settings]
    folders = [pathlib.Path(config.run_dir) for config in configs]
    if not all((folder / "summary.json").exists() for folder in folders):
        run_in_turn(configs)
    fitted = configs[0]
    mesh = open_mesh(fitted.mesh, fitted.packing.rows_per_microbatch)
    numbers = numerics(fitted.compute, mesh, fitted.packing.row_tokens)
    model = load_huggingface.read_config(str(options.base), **numbers), mesh
    costs = calibrate(fitted, *model, folders[0])
    result = {"costs": {k: v for k, v in dataclasses.asdict(costs).items() if v}}
    bench.print_table(["slots", "G", "", "measured", "predicted", "off"])
    for config, folder, (s, g) in zip(configs, folders, settings, strict=True):
        real, virtual = measured(folder), predict(config, model, folders[0], costs)
        for name in virtual[0]:
            actual = statistics.median(row[name] for row in real)
            predicted = statistics.median(row[name] for row in virtual)
            error = predicted / actual - 1
            bench.print_row([s, g, name, f"{actual:.4g}", f"{predicted:.4g}", f"{error:+.1%}"])
            result[f"{s}/{g}/{name}"] = error
    print(json.dumps(result))


if __name__ == "__main__":
    main()
