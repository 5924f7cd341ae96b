"""Measure speed and memory against response limit, slots, G, vocabulary, layers and devices.

    python tests/benchmarks/growth.py --plot docs/growth.png

Each point changes one size of the model and workload of ours.py, 16 responses of 128 tokens in 16
slots, in a separate process. Memory is what a program adds to its arguments on one device, by XLA,
and the resident memory of the process. The last table compiles the update for pairs of vocabulary
and row length; its memory may not grow with their product. `--smoke` only shows, in seconds, that
everything runs.
"""

import argparse
import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable

import bench

SIZES = {
    "limit": (128, 256, 512, 1024, 2048, 4096),
    "slots": (4, 16, 64, 256),
    "group": (2, 4, 8, 16, 32, 64),
    "vocab": (512, 8_192, 32_768, 152_064),
    "layers": (2, 4, 8, 16),
    "devices": (1, 2, 4, 8),
}
NAMES = {
    "limit": "response limit, tokens",
    "slots": "slots, each used twice",
    "group": "G, of 64 responses",
    "vocab": "vocabulary",
    "layers": "layers",
    "devices": "virtual devices, two cores",
}
GRID_VOCABULARIES, GRID_LIMITS = (512, 32_768, 152_064), (128, 1024, 4096)
MICROBATCH_TOKENS, MEGA = 1280, 1e6
ENOUGH_SECONDS = 2.0  # of timing, for a point that takes less
HEADS = ("", "", "rollout, tokens/s", "update, tokens/s", "update adds, MB a device", "process, MB")


def make_workload(axis: str, size: int, smoke: bool):
    """Return the workload of a point."""
    from ours import DECODER, SMOKE_DECODER, Workload

    sizes = {"limit": 8 if smoke else 128, "devices": 2, "group": 8, axis: size}
    slots = sizes.get("slots", 64 if axis == "group" else 16)
    responses = 2 * slots if axis == "slots" else slots
    group = min(sizes["group"], responses)
    devices = sizes["devices"]
    rows = MICROBATCH_TOKENS // (sizes["limit"] + 32) // devices * devices
    decoder = SMOKE_DECODER if smoke else DECODER
    changed = {name: sizes[name] for name in ("vocab", "layers") if name in sizes}
    return Workload(
        responses // group,
        sizes["limit"],
        ragged=False,
        rows_per_microbatch=max(devices, rows),
        group=group,
        slots=slots,
        decoder=dataclasses.replace(decoder, **changed),
    )


def added_megabytes(calls) -> float:
    """Return the megabytes that the compiled update adds to its arguments on one device."""
    compiled = calls.learner.lower("update", calls.batch).compile()
    return round(compiled.memory_analysis().temp_size_in_bytes / MEGA, 1)


def fastest(work: Callable[[], float], enough: float) -> float:
    """Return the tokens per second of the fastest call after one that compiles."""
    work()
    best = spent = 0.0
    while spent < enough:
        started = time.perf_counter()
        tokens = work()
        seconds = time.perf_counter() - started
        best = max(best, tokens / seconds)
        spent += seconds
    return best


def measure(axis: str, size: int, smoke: bool) -> None:
    """Print the tokens a second of rollout and update, and memory, of this process."""
    from ours import opened

    workload = make_workload(axis, size, smoke)
    enough = 1e-6 if smoke else ENOUGH_SECONDS
    with opened(workload) as calls:
        line = {
            "axis": axis,
            "size": size,
            "rollout_tokens_per_s": round(fastest(calls.rollout, enough)),
            "update_tokens_per_s": round(fastest(calls.update, enough)),
            "update_added_mb": added_megabytes(calls),
            "microbatch_tokens": workload.rows_per_microbatch * workload.row_tokens,
            "process_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        }
    print(json.dumps(line), flush=True)


def grid(most: int, smoke: bool) -> None:
    """Print a line per pair of vocabulary and limit, compiled for one row per device."""
    from ours import opened

    for vocab in GRID_VOCABULARIES:
        for limit in GRID_LIMITS:
            if max(vocab, limit) <= most:
                workload = dataclasses.replace(
                    make_workload("vocab", vocab, smoke),
                    prompts=1,
                    new_tokens=limit,
                    rows_per_microbatch=2,
                    group=2,
                    slots=2,
                )
                with opened(workload) as calls:
                    added = added_megabytes(calls)
                line = {"vocab": vocab, "row_tokens": limit + 32, "update_added_mb": added}
                print(json.dumps(line), flush=True)


def in_a_process(axis: str, size: int, smoke: bool) -> list[dict]:
    """Return the JSON lines of a point, or of the grid, measured in a separate process."""
    devices = size if axis == "devices" else 2
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"  # the last such flag counts
    command = [sys.executable, __file__, "--point", axis, str(size), *["--smoke"] * smoke]
    return bench.json_lines(command, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"})


def print_grid(points: list[dict]) -> None:
    """Print a table with a row per vocabulary and a column per row length."""
    lengths = sorted({p["row_tokens"] for p in points})
    cells = {(p["vocab"], p["row_tokens"]): f"{p['update_added_mb']:,.0f} MB" for p in points}
    bench.print_table(["vocabulary", *(f"rows of {n:,} tokens" for n in lengths)])
    for vocab in sorted({p["vocab"] for p in points}):
        bench.print_row([f"{vocab:,}", *(cells[vocab, n] for n in lengths)])


def plot(points: list[dict], path: str) -> None:
    """Plot speed above, memory below, with a column per size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = {
        "tokens/s": {"rollout_tokens_per_s": "rollout", "update_tokens_per_s": "update"},
        "MB": {"process_mb": "process", "update_added_mb": "update adds"},
    }
    axes = list(dict.fromkeys(p["axis"] for p in points))
    figure, panels = plt.subplots(
        2, len(axes), figsize=(3.1 * len(axes), 5.6), squeeze=False, sharex="col"
    )
    for row, (unit, labels) in zip(panels, lines.items(), strict=True):
        for panel, axis in zip(row, axes, strict=True):
            of_axis = [p for p in points if p["axis"] == axis]
            sizes = [p["size"] for p in of_axis]
            for key, label in labels.items():
                panel.plot(sizes, [p[key] for p in of_axis], "o-", label=label)
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
            panel.set_xlabel(NAMES[axis] if unit == "MB" else "")
        row[0].set_ylabel(unit)
        row[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="*", choices=[*SIZES, "grid"], default=[*SIZES, "grid"])
    parser.add_argument("--most", type=int, default=10**9, help="leave larger sizes out")
    parser.add_argument("--plot", help="a PNG to write")
    parser.add_argument("--smoke", action="store_true", help="everything small: does it run?")
    parser.add_argument("--point", nargs=2, metavar=("AXIS", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        axis, size = args.point[0], int(args.point[1])
        return grid(size, args.smoke) if axis == "grid" else measure(axis, size, args.smoke)
    points = []
    for axis in args.axes:
        for size in SIZES.get(axis, ()):
            if size <= args.most:
                points += in_a_process(axis, size, args.smoke)
    bench.print_table(HEADS)
    for p in points:
        figures = [p[f"{name}_tokens_per_s"] for name in ("rollout", "update")]
        figures += [round(p["update_added_mb"]), p["process_mb"]]
        bench.print_row([NAMES[p["axis"]], f"{p['size']:,}", *(f"{n:,}" for n in figures)])
    if "grid" in args.axes:
        print()
        print_grid(in_a_process("grid", args.most, args.smoke))
    if args.plot:
        plot(points, args.plot)
    return None


if __name__ == "__main__":
    main()
