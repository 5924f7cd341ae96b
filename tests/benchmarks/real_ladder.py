"""Climbs DAPO's ladder with SmolLM2-135M, from a policy that often does not stop at its result.

    python tests/benchmarks/real_ladder.py --folder runs/real_ladder --seeds 3

Half of the worked examples of the supervised start go on after the result: they write `again` and
the same steps once more, up to `MOST_AGAIN` times, and a response is cut at its limit. The rungs
are those of configs/two_strategies.py; `dr_grpo` is the first with its changes. A step is half of
that of configs/smollm2.py. Each run has a core of its own. The command can be repeated after an
interruption: finished runs are used again, others go on. `--picture FILE.png` draws the curves.
"""

import concurrent.futures
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
from typing import Any

import bench
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # where configs and notebooks are

from configs.two_strategies import CLAIMS, NAIVE, RUNGS, SWITCHES
from notebooks import measure, measured

STEPS, EXAMPLES = 20, 176
AGAIN, MOST_AGAIN = 0.8, 5  # chance of going on once more
LENGTHS = ["response_tokens_right", "response_tokens_wrong"]
CURVES = ["accuracy", "entropy", *LENGTHS, "all_right_fraction", "up_clipped_probability"]


def write_examples(path: pathlib.Path) -> pathlib.Path:
    """Write worked problems, half of which work the same steps several times."""
    from dapo_jax.extras.words import make_rows

    with path.open("w") as file:
        for index, row in enumerate(make_rows("word_problems", EXAMPLES, 0)):
            rng = np.random.default_rng(index)
            work = row["response"].partition("####")[0]
            times = min(rng.geometric(1 - AGAIN), MOST_AGAIN) if rng.random() < 0.5 else 0
            row["response"] = f"{work}again\n" * times + row["response"]
            file.write(json.dumps(row) + "\n")
    return path


def settings_of(rung: str) -> str:
    values = {f"algorithm.{name}": value for name, value in NAIVE.items()}
    for switch in RUNGS.get(rung, ()):
        values |= {f"algorithm.{name}": value for name, value in SWITCHES[switch].items()}
    values |= CLAIMS[rung][1] if rung in CLAIMS else {}
    return " ".join(f"{name}={str(value).lower()}" for name, value in values.items())


def train(folder: pathlib.Path, rung: str, seed: int, base: pathlib.Path, cores: Any) -> None:
    """Run a rung to its end, on one core."""
    settings = (
        f"run_dir={folder} seed={seed} model.folder={base} total_steps={STEPS}"
        " rollout.prompts_per_step=4 sampler.slots=32 sampler.max_response_tokens=64"
        " algorithm.old_logprobs=sampler packing.row_tokens=272 packing.rows_per_microbatch=1"
        " evaluation.every_steps=0 evaluation.top_p=1 checkpoint.keep=1 log.console=false "
    )
    core = cores.get()
    command = [sys.executable, "-m", "dapo_jax", "train", "smollm2"]
    with subprocess.Popen(command + bench.flags(settings + settings_of(rung))) as process:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
    cores.put(core)
    if process.returncode:
        raise SystemExit(f"{folder}: exit code {process.returncode}")
    shutil.rmtree(folder / "checkpoints")  # 1.6 GB that nobody reads again
    print(f"{folder}: done", file=sys.stderr, flush=True)


def read(folder: pathlib.Path, rung: str, seed: int) -> measured.Run:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    names = *CURVES, "clip_fraction_high", "truncated_fraction", "seconds_step"
    columns = {name: np.array([row.get(name, np.nan) for row in rows], float) for name in names}
    for name in LENGTHS:  # 0 in a step without any
        columns[name][columns[name] == 0] = np.nan
    first, *_, last = sorted((folder / "evaluations").glob("step_*.jsonl"))
    right = (np.array(measure.right_counts(path), float) for path in (first, last))
    return measured.Run(rung, seed, columns, *right)


def print_ladder(runs: dict[str, list[measured.Run]]) -> None:
    heads = "accuracy, difference, over all steps, difference, truncated, tokens of right, of wrong"
    bench.print_table(["rung", *heads.split(", "), "entropy"])
    ends = "truncated_fraction", *LENGTHS, "entropy"
    earlier = None
    for rung, found in runs.items():
        against = runs.get("1_naive") if rung in CLAIMS else earlier
        cells = []
        for outcome in measured.OUTCOMES.values():
            cells.append(measured.written(measured.estimate(found, outcome)))
            step = measured.difference(found, against, outcome) if against else None
            cells.append(measured.written(step, signed=True) if step else "")
        means = [np.nanmean([run.end(name) for run in found]) for name in ends]
        cells += [f"{mean:.{places}f}" for mean, places in zip(means, (3, 1, 1, 3), strict=True)]
        bench.print_row([f"`{rung}`", *cells])
        earlier = found
    before = measured.estimate_over_seeds([run.before for run in found], 0)
    seconds = [run.columns["seconds_step"] for found in runs.values() for run in found]
    print(f"\nbefore: {measured.written(before)}; a step: {np.median(seconds):.1f} s")


def draw(picture: str, runs: dict[str, list[measured.Run]]) -> None:
    """Draw the metrics over the steps: means of the seeds, and what they span."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from notebooks import curves

    figure, grid = curves.new_panels(2, 3)
    for axes, name in zip(grid.flat, CURVES, strict=True):
        curves.draw_metric(axes, name, runs)
        plt.setp(axes.lines, marker=".", markersize=4)  # else a step alone would not be seen
        plt.setp(axes.collections, alpha=0.05)  # seven bands over each other
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(picture, dpi=90)


def main() -> None:
    rungs, jobs = [*RUNGS, "dr_grpo"], os.cpu_count() or 1
    defaults = {"folder": "runs/real_ladder", "seeds": 3, "rungs": rungs, "jobs": jobs}
    args = bench.read_arguments(__doc__, **defaults, picture="")
    root = pathlib.Path(args.folder)
    root.mkdir(parents=True, exist_ok=True)
    start = f"data.source={write_examples(root / 'examples.jsonl')} data.generated_examples=400"
    start += " packing.row_tokens=176"
    base = bench.sft(root / "policy", "smollm2_base", *bench.flags(start))
    cores: queue.Queue = queue.Queue()
    for core in range(args.jobs):
        cores.put(core if hasattr(os, "sched_setaffinity") else None)
    folders = {(r, s): root / f"{r}_{s}" for s in range(args.seeds) for r in args.rungs}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        missing = [key for key, run in folders.items() if not (run / "summary.json").exists()]
        list(pool.map(lambda key: train(folders[key], *key, base, cores), missing))
    runs = {r: [read(folders[r, s], r, s) for s in range(args.seeds)] for r in args.rungs}
    print_ladder(runs)
    if args.picture:
        draw(args.picture, runs)


if __name__ == "__main__":
    main()
