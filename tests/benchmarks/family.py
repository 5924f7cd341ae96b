"""Train the embedded task with every preset and print the tables of docs/results.md.

    python tests/benchmarks/family.py --seeds 3 --folder runs/family
    python tests/benchmarks/family.py --presets dapo --vary rollout.carry_over=none,unfinished,all

The command can be repeated after an interruption: finished runs are used again, and a trainer's run
resumes from its checkpoint. Runs are sequential, and alternate, so that other work on the machine
affects all alike. `--vary` runs every preset with each value of a setting. `--base` is the start of
all runs, in place of a base policy for each seed. Other arguments go to the trainer. Decode steps
and seconds per step leave out the first steps, which compile.
"""

import json
import pathlib
import runpy
import statistics
import sys
import time

import bench

from dapo_jax.config.algorithms import PRESETS

WITHOUT_TEACHER = [name for name, make in PRESETS.items() if make().distillation == "none"]
OTHER_SUMS = 1000  # added to the seed of supervised runs, for other examples than the base's
FIRST_STEPS = 3
FIGURES = {
    "steps": "{:.0f}",
    "heldout_entropy": "{:.3f}",
    "heldout_response_tokens": "{:.1f}",
    "seconds": "{:.0f}",
}
COSTS = {
    "seconds_step": "{:.2f}",
    "decode_steps": "{:.0f}",
    "sampled_to_trained": "{:.2f}",
    "policy_lag": "{:.2f}",
    "kl_sampler_trainer": "{:.5f}",
}


def reinforced(folder: pathlib.Path, preset: str, arguments: list[str]) -> dict:
    given = folder / "arguments.txt"
    if given.exists() and given.read_text() != "\n".join(arguments):
        raise SystemExit(f"{folder} was made with other arguments; take another --folder")
    before, *rows = bench.train(folder, preset, *arguments)
    given.write_text("\n".join(arguments))
    summary = json.loads((folder / "summary.json").read_text())
    late = rows[min(FIRST_STEPS, len(rows) - 1) :]
    names = "skipped_updates", "value_skipped_updates"
    learned = [row for row in rows if "trained_tokens_per_second" in row]
    trained = [row["trained_tokens_per_second"] * row["seconds_update"] for row in learned]
    pairs = zip(learned, trained, strict=True)
    sampled = sum(row["sampled_to_kept_tokens"] * tokens for row, tokens in pairs)
    return rows[-1] | {
        "before": before["heldout_accuracy"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "skipped": sum(row.get(name, 0.0) > 0 for row in rows for name in names),
        "seconds_step": statistics.median(row["seconds_step"] for row in late),
        "decode_steps": statistics.mean(row.get("decode_steps", 0.0) for row in late),
        "sampled_to_trained": sampled / max(1.0, sum(trained)),
        "policy_lag": statistics.mean(row.get("policy_lag", 0.0) for row in late),
    }


def supervised(root: pathlib.Path, base: pathlib.Path, seed: int) -> dict:
    """Return the figures of a supervised run on worked examples without mistakes."""
    folder, kept = root / f"sft_{seed}", root / f"sft_{seed}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    started = time.perf_counter()
    given = bench.flags(f"seed={seed + OTHER_SUMS} start={base}")
    bench.sft(folder, f"--config={bench.SFT}", *given)
    seconds = time.perf_counter() - started
    start, policy = (f"seed={seed} model.folder={model}" for model in (base, folder))
    before = bench.evaluate(root / f"sft_{seed}_before", *bench.flags(start))
    figures = bench.evaluate(root / f"sft_{seed}_after", *bench.flags(policy)) | {
        "before": before["heldout_accuracy"],
        "steps": runpy.run_path(bench.SFT)["get_config"]().total_steps,
        "seconds": seconds,
        "skipped": 0,
    }
    kept.write_text(json.dumps(figures))
    return figures


def cells(runs: list[dict], formats: dict[str, str]) -> list[str]:
    means = {name: statistics.mean(run.get(name, float("nan")) for run in runs) for name in formats}
    return [form.format(means[name]) for name, form in formats.items()]


def main() -> int:
    """Return the exit code: 1 if an update had a gradient that was not finite."""
    options, extra = bench.read_arguments(
        __doc__,
        others=True,
        seeds=3,
        folder=pathlib.Path("runs/family"),
        presets=WITHOUT_TEACHER,
        vary="",  # SETTING=VALUE,VALUE
        base="",
    )
    root = options.folder
    name, _, values = options.vary.partition("=")
    arms = [(preset, value) for preset in options.presets for value in values.split(",")]
    runs = {arm: [] for arm in arms}
    for seed in range(options.seeds):
        made = f"--config={bench.BASE}", f"--config.seed={seed}"
        base = options.base or bench.sft(root / f"base_{seed}", *made)
        for preset, value in arms:
            varied = f"{name}={value}" if name else ""
            start = bench.flags(f"seed={seed} model.folder={base} {varied}")
            folder = root / "_".join(filter(None, (preset, value, str(seed))))
            if preset == "sft":
                run = supervised(root, pathlib.Path(base), seed)
            else:
                run = reinforced(folder, preset, [*start, *extra])
            runs[preset, value].append(run)
    bench.print_table(["preset", "before", "after", *FIGURES])
    for (preset, value), each in runs.items():
        before = statistics.mean(run["before"] for run in each)
        after = [run["heldout_accuracy"] for run in each]
        scores = " ".join(f"{score:.3f}" for score in after)
        accuracy = f"{before:.3f}", f"**{statistics.mean(after):.3f}** ({scores})"
        bench.print_row([f"`{preset}` {value}".strip(), *accuracy, *cells(each, FIGURES)])
    print()
    bench.print_table(["preset", *COSTS])
    for (preset, value), each in runs.items():
        if preset != "sft":
            bench.print_row([f"`{preset}` {value}".strip(), *cells(each, COSTS)])
    skipped = {arm: n for arm, each in runs.items() if (n := sum(r["skipped"] for r in each))}
    print(f"\nsteps with a gradient that was not finite: {skipped or 'none'}")
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
