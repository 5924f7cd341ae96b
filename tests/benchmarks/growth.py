"""Measure speed and memory against response limit, slots, G, vocabulary, layers and devices.

    python tests/benchmarks/growth.py --plot docs/growth.png

Each point changes one size of the model and workload of ours.py, 16 responses of 128 tokens in 16
slots, in a separate process. Memory is what a program adds to its arguments on one device, by XLA,
and the resident memory of the process. The last table compiles the update for pairs of vocabulary
and row length; its memory may not grow with their product. `--smoke` only shows, in seconds, that
everything runs.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import resource
import sys

import bench

AXES = {
    "limit": ("response limit, tokens", (128, 256, 512, 1024, 2048, 4096)),
    "slots": ("slots, each used twice", (4, 16, 64, 256)),
    "group": ("G, of 64 responses", (2, 4, 8, 16, 32, 64)),
    "vocab": ("vocabulary", (512, 8_192, 32_768, 152_064)),
    "layers": ("layers", (2, 4, 8, 16)),
    "devices": ("virtual devices, two cores", (1, 2, 4, 8)),
}
GRID_VOCABULARIES, GRID_LIMITS = (512, 32_768, 152_064), (128, 1024, 4096)
MICROBATCH_TOKENS, MEGA = 1280, 1e6
REPEATS = 3
COLUMNS = {
    "rollout_tokens_per_s": "rollout, tokens/s",
    "update_tokens_per_s": "update, tokens/s",
    "update_added_mb": "update adds, MB a device",
    "process_mb": "process, MB",
}


def make_workload(axis: str, size: int, smoke: bool):
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
    return compiled.memory_analysis().temp_size_in_bytes / MEGA


def measure(axis: str, size: int, smoke: bool) -> None:
    """Print the tokens a second of rollout and update, and memory, of this process."""
    import ours

    with contextlib.closing(ours.Calls(make_workload(axis, size, smoke))) as calls:
        line = {
            "rollout_tokens_per_s": ours.measure(calls.rollout, REPEATS)["tokens_per_s"],
            "update_tokens_per_s": ours.measure(calls.update, REPEATS)["tokens_per_s"],
            "update_added_mb": added_megabytes(calls),
            "process_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }
    print(json.dumps({"axis": axis, "size": size} | line), flush=True)


def measure_grid(most: int, smoke: bool) -> None:
    """Print a line per vocabulary, with memory by limit, compiled for one row per device."""
    from ours import Calls

    for vocab in (vocab for vocab in GRID_VOCABULARIES if vocab <= most):
        workload = make_workload("vocab", vocab, smoke)
        row = {"prompts": 1, "rows_per_microbatch": 2, "group": 2, "slots": 2}
        line = {"vocab": vocab}
        for limit in (limit for limit in GRID_LIMITS if limit <= most):
            one_row = dataclasses.replace(workload, new_tokens=limit, **row)
            with contextlib.closing(Calls(one_row)) as calls:
                line[f"rows of {limit + 32:,} tokens"] = added_megabytes(calls)
        print(json.dumps(line), flush=True)


def measure_point(axis: str, size: int, smoke: bool) -> None:
    if axis == "grid":
        measure_grid(size, smoke)
    else:
        measure(axis, size, smoke)


def in_a_process(axis: str, size: int, smoke: bool) -> list[dict]:
    """Return the JSON lines of a point, or of the grid, in a separate process unless `smoke`."""
    if smoke:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            measure_point(axis, size, smoke)
        return [json.loads(line) for line in output.getvalue().splitlines()]
    devices = size if axis == "devices" else 2
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"  # the last such flag counts
    command = [sys.executable, __file__, "--point", axis, str(size)]
    return bench.json_lines(command, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"})


def plot(points: dict[str, list[dict]], path: str) -> None:
    """Plot speed above, memory below, with a column per size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = {
        "tokens/s": {"rollout_tokens_per_s": "rollout", "update_tokens_per_s": "update"},
        "MB": {"process_mb": "process", "update_added_mb": "update adds"},
    }
    size = 3.1 * len(points), 5.6
    figure, panels = plt.subplots(2, len(points), figsize=size, squeeze=False, sharex="col")
    for row, (unit, labels) in zip(panels, lines.items(), strict=True):
        for panel, (axis, values) in zip(row, points.items(), strict=True):
            sizes = [value["size"] for value in values]
            for key, label in labels.items():
                panel.plot(sizes, [value[key] for value in values], "o-", label=label)
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
            panel.set_xlabel(AXES[axis][0] if unit == "MB" else "")
        row[0].set_ylabel(unit)
        row[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--axes", nargs="*", choices=[*AXES, "grid"], default=[*AXES, "grid"])
    parser.add_argument("--most", type=int, default=10**9, help="leave larger sizes out")
    parser.add_argument("--plot", help="a PNG to write")
    parser.add_argument("--smoke", action="store_true", help="everything small: does it run?")
    parser.add_argument("--point", nargs=2, metavar=("AXIS", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        return measure_point(args.point[0], int(args.point[1]), args.smoke)
    points = {}
    bench.print_table(["", "", *COLUMNS.values()])
    for axis in (axis for axis in args.axes if axis != "grid"):
        name, sizes = AXES[axis]
        points[axis] = []
        for size in (size for size in sizes if size <= args.most):
            (point,) = in_a_process(axis, size, args.smoke)
            points[axis].append(point)
            bench.print_row([name, f"{size:,}", *(f"{point[key]:,.0f}" for key in COLUMNS)])
    if "grid" in args.axes:
        first, *others = in_a_process("grid", args.most, args.smoke)
        print()
        bench.print_table(["vocabulary", *list(first)[1:]])
        for vocab, *megabytes in (line.values() for line in (first, *others)):
            bench.print_row([f"{vocab:,}", *(f"{added:,.0f} MB" for added in megabytes)])
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    main()
