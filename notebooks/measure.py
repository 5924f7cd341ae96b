"""Runs the ladder, the combinations of switches and the claims, and keeps what they measured.

    python notebooks/measure.py                   everything; goes on where it was cut off
    python notebooks/measure.py --names 1_naive --seeds 300
    python notebooks/measure.py --tables          nothing is run: the tables in docs/ablation.md

A run of configs/two_strategies.py has one core, and as many go at once as there are cores
(--jobs). Its measures are a small JSON in notebooks/measurements, and it is not run again;
rollouts and checkpoints stay in --folder.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where the folder of configs is

from configs import two_strategies  # noqa: E402
from notebooks import measured  # noqa: E402

COLUMNS = (
    "accuracy reward entropy response_tokens_mean response_tokens_right response_tokens_wrong "
    "truncated_fraction kept_fraction all_right_fraction all_wrong_fraction clip_fraction_low "
    "clip_fraction_high up_clipped_probability mean_probability gradient_norm trained_groups "
    "kl_reference explained_variance"
).split()
NOT_DECISIVE = ("run_dir", "seed", "log.", "model.folder")
AT_ONCE = "####"  # how an answer without working begins
PAGE = ROOT / "docs/ablation.md"


def decisive(config: object) -> dict[str, object]:
    """The settings that differ from the defaults; not where it runs, nor its seed."""
    from dapo_jax.config.settings import leaves

    defaults = {name: value for name, _, value in leaves(type(config)())}
    differing = {name: value for name, _, value in leaves(config) if value != defaults[name]}
    return {name: v for name, v in differing.items() if not name.startswith(NOT_DECISIVE)}


def right_counts(path: pathlib.Path) -> list[int]:
    """How many responses to each held-out problem were right, in the order of the problems."""
    counts: dict[int, int] = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        counts[one["index"]] = counts.get(one["index"], 0) + one["correct"]
    return [counts[index] for index in sorted(counts)]


def strategies(path: pathlib.Path) -> dict[str, float]:
    """Share of a step's responses that work, and how many of those are right or cut off."""
    judged = [json.loads(line) for line in path.read_text().splitlines()]
    drawn = [one for one in judged if not one["surplus"]]  # it is short: it was finished first
    working = [one for one in drawn if not one["response"].startswith(AT_ONCE)]

    def share(found: Sequence[dict], of: Sequence[dict]) -> float:
        return float(f"{len(found) / len(of):.4g}") if of else 0.0

    return {
        "working_fraction": share(working, drawn),
        "working_correct": share([one for one in working if one["correct"]], working),
        "working_truncated": share([one for one in working if one["truncated"]], working),
    }


def kept_row(row: dict) -> dict[str, float | None]:
    """What is kept of a step's metrics, in four digits."""
    drawn = row["sampled_tokens_per_second"] * row["seconds_rollout"]
    tokens = round(drawn + row["abandoned_tokens"] + row["put_back_tokens"])
    found = {name: row.get(name) for name in COLUMNS}
    found = {name: v if v is None else float(f"{v:.4g}") for name, v in found.items()}
    return found | {"sampled_tokens": tokens}


def run(name: str, seed: int, folder: pathlib.Path) -> None:
    """One run, here, to its JSON."""
    import dapo_jax

    config = two_strategies.get_config(name)
    config.seed, config.log.console = seed, False
    config.run_dir = str(folder / f"{name}_seed{seed}")
    rows = dapo_jax.train(config).metrics.to_pylist()
    steps = [
        kept_row(row)
        | strategies(folder / f"{name}_seed{seed}/rollouts/step_{row['step']:06d}.jsonl")
        for row in rows
        if row["step"] > 0
    ]
    evaluations = sorted((pathlib.Path(config.run_dir) / "evaluations").glob("step_*.jsonl"))
    found = {
        "name": name,
        "seed": seed,
        "settings": decisive(config),
        "heldout_samples": config.evaluation.samples_per_problem,
        "heldout_right_before": right_counts(evaluations[0]),
        "heldout_right_after": right_counts(evaluations[-1]),
        "steps": {column: [row[column] for row in steps] for column in steps[0]},
    }
    out = measured.path(name, seed)
    out.parent.mkdir(exist_ok=True)
    out.with_suffix(".part").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    out.with_suffix(".part").replace(out)


def run_all(wanted: list[tuple[str, int]], folder: pathlib.Path, jobs: int) -> None:
    """Those that are missing, each in a process of its own, on a core of its own."""
    cores: queue.Queue[int] = queue.Queue()
    for core in range(jobs):
        cores.put(core)

    def one(name: str, seed: int) -> None:
        core = cores.get()
        command = [sys.executable, __file__, "--names", name, "--core", str(core)]
        command += ["--seeds", str(seed), "--folder", str(folder)]
        subprocess.run(command, check=True)
        cores.put(core)
        mean = measured.read(measured.path(name, seed)).after.mean()
        print(f"{name}, seed {seed}: held-out accuracy {mean:.3f}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda pair: one(*pair), wanted))


def with_tables(page: str) -> str:
    """The page with the tables between their marks."""
    for name, table in measured.tables().items():
        marks = rf"(<!-- {name} -->\n\n).*?(\n\n<!-- /{name} -->)"
        page = re.sub(marks, lambda found, new=table: found[1] + new + found[2], page, flags=re.S)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", nargs="*", help="rungs, combinations or claims; none: all")
    parser.add_argument("--seeds", type=int, nargs="*", help="none: those of the page")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/two_strategies"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.core is not None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {options.core})
        return run(options.names[0], options.seeds[0], options.folder)
    if not options.tables:
        names = {str(measured.LADDER.get(name, name)) for name in options.names or ()}
        for name in names:
            two_strategies.get_config(name)  # refuses one that does not exist
        wanted = [(name, seed) for name, seed in measured.PLAN if not names or name in names]
        if options.seeds:
            wanted = [(name, seed) for name in names for seed in options.seeds]
        run_all(
            [one for one in wanted if not measured.path(*one).exists()],
            options.folder,
            options.jobs,
        )
    if all(measured.path(*one).exists() for one in measured.PLAN):
        PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
