"""Train the embedded task with every preset and print the table of docs/results.md.

    python tests/benchmarks/family.py --seeds 3 --folder runs/family

The command can be repeated after an interruption: finished runs are used again, and a trainer's run
resumes from its checkpoint. Runs are sequential. Their seconds include imports (`sft`) or
evaluations (the others). Other arguments go to the trainer; take another folder for a quick look:

    python tests/benchmarks/family.py --seeds 1 --folder /tmp/look --config.total_steps=2
"""

import contextlib
import io
import json
import pathlib
import runpy
import statistics
import subprocess
import sys
import time

from arguments import read_arguments

from dapo_jax.algorithms import PRESETS

BASE, SFT, RL = (f"configs/arithmetic{name}.py" for name in ("_base", "_sft", ""))
WITHOUT_TEACHER = [name for name, make in PRESETS.items() if make().distillation == "none"]
OTHER_SUMS = 1000  # added to the seed of supervised runs, for other examples than the base's
COLUMNS = {
    "heldout_accuracy": 3,
    "steps": 0,
    "heldout_entropy": 3,
    "heldout_response_tokens": 1,
    "seconds": 0,
}


def python(module: str, *arguments: object) -> str:
    """Run a command of the project in a process, and return its output."""
    command = ["python", "-m", "dapo_jax", module, *map(str, arguments)]
    print("$", *command, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *command[1:]], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}exit code {done.returncode}: {' '.join(command)}")
    return done.stdout


def here(module: str, *arguments: object) -> str:
    """Run a command within this process, which imports and compiles once for all commands."""
    from dapo_jax.__main__ import entry

    arguments_before, output = sys.argv, io.StringIO()
    sys.argv = [f"dapo-jax {module}", *map(str, arguments)]
    print("$", *sys.argv, file=sys.stderr, flush=True)
    try:
        with contextlib.redirect_stdout(output):
            code = entry(module)()
    finally:
        sys.argv = arguments_before
    if code:
        raise SystemExit(f"{output.getvalue()}exit code {code}: {module}")
    return output.getvalue()


def base_policy(root: pathlib.Path, seed: int) -> pathlib.Path:
    """Return the base policy of a seed; train it if it is missing."""
    folder = root / f"base_{seed}"
    if not folder.exists():
        python("sft", f"--config={BASE}", f"--config.seed={seed}", f"--config.out={folder}")
    return folder


def trained(folder: pathlib.Path, seed: int, *arguments: str) -> list[dict]:
    """Return all rows of the run in a folder; run it on the base policy if it is missing."""
    if not (folder / "summary.json").exists():
        python(
            "train",
            f"--config={RL}",
            f"--config.seed={seed}",
            f"--config.model.folder={base_policy(folder.parent, 0)}",
            f"--config.run_dir={folder}",
            *arguments,
        )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reinforced(root: pathlib.Path, preset: str, seed: int, extra: list[str]) -> dict:
    """Return a run's first and last rows, its steps, seconds, and skipped updates."""
    folder = root / f"{preset}_{seed}"
    arguments = [
        f"--config={RL}:{preset}",
        f"--config.seed={seed}",
        f"--config.model.folder={base_policy(root, seed)}",
        f"--config.run_dir={folder}",
        *extra,
    ]
    made_by = folder / "arguments.txt"
    if not (folder / "summary.json").exists():
        python("train", *arguments)
        made_by.write_text("\n".join(arguments))
    elif made_by.read_text() != "\n".join(arguments):
        raise SystemExit(f"{folder} was made with other arguments; take another --folder")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    skipped = sum(
        row.get(name, 0.0) > 0
        for row in rows
        for name in ("skipped_updates", "value_skipped_updates")
    )
    timed = {"steps": summary["steps"], "seconds": summary["seconds"], "skipped": skipped}
    memory = {"megabytes": sum(summary["megabytes_per_device"].values())}
    step = statistics.median(row["seconds_step"] for row in rows[1:])
    return {"before": rows[0], "after": rows[-1] | timed} | memory | {"seconds_step": step}


def supervised(root: pathlib.Path, seed: int) -> dict:
    """Return the same of a supervised run on worked examples without mistakes."""
    folder, row = root / f"sft_{seed}", root / f"sft_{seed}.json"
    if not row.exists():
        base = base_policy(root, seed)
        started = time.perf_counter()
        python(
            "sft",
            f"--config={SFT}",
            f"--config.seed={seed + OTHER_SUMS}",
            f"--config.start={base}",
            f"--config.out={folder}",
        )
        seconds = time.perf_counter() - started
        found = {}
        for name, path in ("before", base), ("after", folder):
            printed = python(
                "evaluate",
                f"--config={RL}",
                f"--config.seed={seed}",
                f"--config.model.folder={path}",
                f"--config.run_dir={folder}_scores",
            )
            found[name] = json.loads(printed.splitlines()[-1])
        steps = runpy.run_path(SFT)["get_config"]().total_steps
        found["after"] |= {"steps": steps, "seconds": seconds, "skipped": 0}
        row.write_text(json.dumps(found))
    return json.loads(row.read_text())


def table_row(preset: str, runs: list[dict]) -> str:
    """Return a row of the table: means over the seeds, with each accuracy."""

    def mean(end: str, column: str) -> str:
        return f"{statistics.mean(run[end][column] for run in runs):.{COLUMNS[column]}f}"

    before, *after = mean("before", "heldout_accuracy"), *(mean("after", c) for c in COLUMNS)
    each = " ".join(f"{run['after']['heldout_accuracy']:.3f}" for run in runs)
    after[0] = f"**{after[0]}** ({each})"
    return f"| `{preset}` | {before} | " + " | ".join(after) + " |"


def main() -> int:
    """Return the exit code: 1 if an update had a gradient that was not finite."""
    options, extra = read_arguments(
        __doc__, others=True, seeds=3, folder=pathlib.Path("runs/family"), presets=WITHOUT_TEACHER
    )
    found = {
        (preset, seed): supervised(options.folder, seed)
        if preset == "sft"
        else reinforced(options.folder, preset, seed, extra)
        for seed in range(options.seeds)
        for preset in options.presets
    }
    print("| preset | accuracy before | after | steps | entropy | mean length | seconds |")
    print("|---|---|---|---|---|---|---|")
    for preset in options.presets:
        print(table_row(preset, [found[preset, seed] for seed in range(options.seeds)]))
    print("\n| preset | models and optimizers, MB per device | seconds per step |\n|---|---|---|")
    for preset in options.presets:
        if preset != "sft":
            step = statistics.mean(found[preset, s]["seconds_step"] for s in range(options.seeds))
            print(f"| `{preset}` | {found[preset, 0]['megabytes']:.1f} | {step:.2f} |")
    skipped = {f"{p} {s}": n for (p, s), run in found.items() if (n := run["after"]["skipped"])}
    print(f"\nsteps with a gradient that was not finite: {skipped or 'none'}")
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
