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

import bench
from calibrate import FIRST_STEPS, calibrate, step_figures

from dapo_jax.commands.plan.simulate import Costs, Simulation, Step
from dapo_jax.commands.plan.workload import RecordedWorkload
from dapo_jax.config.experiment import Checkpoint, Config, Data, Evaluation, Log, Model
from dapo_jax.model import load_huggingface
from dapo_jax.run.compute import numerics, open_mesh
from dapo_jax.run.run import open_run
from dapo_jax.runtime.signals import Signals

SEEDS = 3  # of the law; the prediction is a median over them too
COMPARED = (
    "seconds_decode",
    "seconds_rollout",
    "seconds_learning",
    "seconds_step",
    "tokens",
    "decode_steps",
)


def make_config(options: argparse.Namespace, name: str, slots: int, samples: int) -> Config:
    """Return the config of a run with nothing but its steps."""
    config = runpy.run_path(bench.RL)["get_config"]()
    config.run_dir = str(options.folder / name)
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


def measured(config: Config) -> list[dict[str, float]]:
    """Return the rows of a run's steps."""
    lines = (pathlib.Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > FIRST_STEPS]
    return [
        row
        | {
            "tokens": row["sampled_tokens_per_second"] * row["seconds_rollout"],
            "seconds_learning": row["seconds_score"] + row["seconds_update"],
        }
        for row in rows
    ]


def record(step: Step) -> dict[str, float]:
    """Return the same of a simulated step."""
    figures = step_figures(step)
    parts = ("prefill_token", "decode_step", "slot_step")
    decoding = (figures[f"seconds_{name}"] for name in parts)
    whole = figures["seconds_rollout"] + figures["seconds_learning"]
    return figures | {"seconds_step": whole, "seconds_decode": sum(decoding)}


def predict(config: Config, model: tuple, law: pathlib.Path, costs: Costs) -> list[dict]:
    """Simulate steps with resampled lengths and verdicts of another run."""
    records = []
    for seed in range(SEEDS):
        simulation = Simulation(config, *model, RecordedWorkload(law, seed=seed), costs)
        steps = [simulation.step() for _ in range(config.total_steps)]
        records += map(record, steps[FIRST_STEPS:])
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
    configs = [make_config(options, f"slots_{s}_samples_{g}", s, g) for s, g in settings]
    if not all((pathlib.Path(config.run_dir) / "summary.json").exists() for config in configs):
        run_in_turn(configs)
    fitted = configs[0]
    mesh = open_mesh(fitted.mesh, fitted.packing.rows_per_microbatch)
    numbers = numerics(fitted.compute, mesh, fitted.packing.row_tokens)
    model = load_huggingface.read_config(str(options.base), **numbers), mesh
    folder = pathlib.Path(fitted.run_dir)
    costs = calibrate(fitted, *model, folder)
    result = {"costs": {k: v for k, v in dataclasses.asdict(costs).items() if v}}
    bench.print_table(["slots", "G", "", "measured", "predicted", "off"])
    for config, (s, g) in zip(configs, settings, strict=True):
        real, virtual = measured(config), predict(config, model, folder, costs)
        for name in COMPARED:
            actual = statistics.median(row[name] for row in real)
            predicted = statistics.median(row[name] for row in virtual)
            error = predicted / actual - 1
            bench.print_row([s, g, name, f"{actual:.4g}", f"{predicted:.4g}", f"{error:+.1%}"])
            result[f"{s}/{g}/{name}"] = error
    print(json.dumps(result))


if __name__ == "__main__":
    main()
