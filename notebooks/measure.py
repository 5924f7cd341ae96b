"""Runs the ladder and the sixteen combinations of four switches, and keeps what they measured.

    python notebooks/measure.py                   everything; goes on where it was cut off
    python notebooks/measure.py --names 1_naive --seeds 1
    python notebooks/measure.py --tables          nothing is run: the tables in docs/ablation.md

A run of configs/ladder.py has one core, and as many go at once as there are cores (--jobs). What
it measured comes to lie in notebooks/measurements, a small JSON per run, and is not measured
again; rollouts and checkpoints stay in --folder.
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where the folder of configs is

from configs import ladder  # noqa: E402
from notebooks import measured  # noqa: E402

LADDER_SEEDS, KNOB_SEEDS = 5, 3
COLUMNS = (
    "accuracy reward entropy response_tokens_mean response_tokens_right response_tokens_wrong "
    "truncated_fraction kept_fraction all_right_fraction all_wrong_fraction clip_fraction_low "
    "clip_fraction_high up_clipped_probability gradient_norm trained_groups"
).split()
NOT_DECISIVE = ("run_dir", "seed", "log.", "model.folder")
PAGE = ROOT / "docs/ablation.md"


def decisive(config: object) -> dict[str, object]:
    """The settings that differ from the defaults; not where it runs, nor its seed."""
    from dapo_jax.runtime.settings import leaves

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

    config = ladder.get_config(name)
    config.seed, config.model.folder = seed, str(folder / "base")
    config.run_dir, config.log.console = str(folder / f"{name}_seed{seed}"), False
    rows = dapo_jax.train(config).metrics.to_pylist()
    steps = [kept_row(row) for row in rows if row["step"] > 0]
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
    out = result(name, seed)
    out.parent.mkdir(exist_ok=True)
    out.with_suffix(".part").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    out.with_suffix(".part").replace(out)


def result(name: str, seed: int) -> pathlib.Path:
    return measured.FOLDER / f"{name}_seed{seed}.json"


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
        mean = measured.read(result(name, seed)).after.mean()
        print(f"{name}, seed {seed}: held-out accuracy {mean:.3f}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda pair: one(*pair), wanted))


def make_base(folder: pathlib.Path) -> None:
    if not (folder / "base").exists():
        config = ["--config=configs/arithmetic_base.py", f"--config.out={folder / 'base'}"]
        subprocess.run([sys.executable, "-m", "dapo_jax", "sft", *config], check=True, cwd=ROOT)


def tables() -> dict[str, str]:
    """By the name of their place in the page."""
    return {
        "ladder": measured.ladder_table(),
        "effects": measured.effects_table(KNOB_SEEDS),
        "knobs": measured.knobs_table(KNOB_SEEDS),
    }


def with_tables(page: str) -> str:
    """The page with the tables between their marks."""
    for name, table in tables().items():
        marks = rf"(<!-- {name} -->\n\n).*?(\n\n<!-- /{name} -->)"
        page = re.sub(marks, lambda found, new=table: found[1] + new + found[2], page, flags=re.S)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", nargs="*", help="rungs or combinations; none: all")
    parser.add_argument("--seeds", type=int, nargs="*", help="none: 0 to 4, or 0 to 2")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/ladder"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.core is not None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {options.core})
        return run(options.names[0], options.seeds[0], options.folder)
    if not options.tables:
        names = options.names or [*measured.LADDER, *measured.COMBINATIONS]
        names = list(dict.fromkeys(measured.LADDER.get(name, name) for name in names))
        of_ladder = [range(LADDER_SEEDS) if n in measured.LADDER.values() else None for n in names]
        wanted = [
            (name, seed)
            for name, many in zip(names, of_ladder, strict=True)
            for seed in options.seeds or many or range(KNOB_SEEDS)
            if not result(name, seed).exists()
        ]
        wanted.sort(key=lambda pair: pair[1])
        make_base(options.folder)
        run_all(wanted, options.folder, options.jobs)
    PAGE.write_text(with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
