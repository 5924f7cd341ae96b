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
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

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
LIMIT = 128  # of a response, where another size is changed


def setup(axis: str, size: int):
    """Return the shape and the workload of a point."""
    from ours import DECODER, Workload

    limit = size if axis == "limit" else LIMIT
    devices = size if axis == "devices" else 2
    group = size if axis == "group" else 8
    slots = size if axis == "slots" else 64 if axis == "group" else 16
    responses = 2 * slots if axis == "slots" else slots
    rows = max(devices, MICROBATCH_TOKENS // (limit + 32) // devices * devices)
    decoder = dataclasses.replace(
        DECODER,
        vocab=size if axis == "vocab" else DECODER.vocab,
        layers=size if axis == "layers" else DECODER.layers,
    )
    group = min(group, responses)
    workload = Workload(
        responses // group, limit, False, rows_per_microbatch=rows, group=group, slots=slots
    )
    return decoder, workload


def shrink() -> None:
    """Choose the smallest shape and few tokens, and time each call once."""
    global LIMIT, ENOUGH_SECONDS
    import ours

    ours.DECODER, LIMIT, ENOUGH_SECONDS = ours.SMOKE_DECODER, 8, 1e-6


def open_parts(decoder, workload):
    """Return the parts of a run, and its parameters."""
    from ours import RandomPrompts, make_config, write_folder

    from dapo_jax.run.components import build

    with tempfile.TemporaryDirectory() as folder:
        write_folder(pathlib.Path(folder), decoder)
        parts = build(make_config(pathlib.Path(folder), workload, decoder.layers))
        parts = dataclasses.replace(parts, prompts=RandomPrompts())
        return parts, parts.first_params()


def added_bytes(parts, batch) -> int:
    """Return the bytes that the compiled update adds to its arguments on one device."""
    compiled = parts.learners.policy.lower("update", batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def fastest(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the fastest call after one that compiles, and its result."""
    work()
    best, spent = float("inf"), 0.0
    while spent < ENOUGH_SECONDS:
        started = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds), spent + seconds
    return best, result


def measure(axis: str, size: int) -> dict:
    """Measure tokens a second of rollout and update, and memory, in this process."""
    import jax
    from ours import draw_within, make_batch, rollout

    from dapo_jax.rollout import decode_step

    decoder, workload = setup(axis, size)
    decode_step.sample_tokens = draw_within(workload)
    parts, params = open_parts(decoder, workload)
    rollout_seconds, tokens = fastest(lambda: rollout(parts, params, 0, workload))
    batch, used, trained = make_batch(workload)
    state = parts.learners.policy.start(params)

    def update() -> None:
        nonlocal state
        state, (means, _) = parts.learners.policy.update(state, batch, used, 1e-5)
        jax.block_until_ready((state, means))

    update_seconds, _ = fastest(update)
    added = added_bytes(parts, batch)
    parts.close()
    return {
        "axis": axis,
        "size": size,
        "rollout_tokens_per_s": round(tokens / rollout_seconds),
        "update_tokens_per_s": round(trained / update_seconds),
        "update_added_mb": round(added / MEGA, 1),
        "microbatch_tokens": workload.rows_per_microbatch * workload.row_tokens,
        "process_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def grid(most: int) -> None:
    """Print a line per pair of vocabulary and limit, compiled for one row per device."""
    from ours import DECODER, Workload, make_batch

    for vocab in GRID_VOCABULARIES:
        for limit in GRID_LIMITS:
            if max(vocab, limit) > most:
                continue
            workload = Workload(1, limit, False, rows_per_microbatch=2, group=2, slots=2)
            parts, _ = open_parts(dataclasses.replace(DECODER, vocab=vocab), workload)
            added = added_bytes(parts, make_batch(workload)[0]) / MEGA
            parts.close()
            line = {"vocab": vocab, "row_tokens": limit + 32, "update_added_mb": round(added, 1)}
            print(json.dumps(line), flush=True)


def in_a_process(arguments: list[str], devices: int) -> list[dict]:
    """Run this script with those arguments; return its JSON lines."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"  # the last such flag counts
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        raise SystemExit(f"{arguments}\nfailed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(points: list[dict]) -> str:
    """Return all points as Markdown."""
    lines = [
        "| | | rollout, tokens/s | update, tokens/s | update adds, MB a device | process, MB |",
        "|---|---|---|---|---|---|",
    ]
    for p in points:
        speeds = f"{p['rollout_tokens_per_s']:,} | {p['update_tokens_per_s']:,}"
        memory = f"{p['update_added_mb']:,.0f} | {p['process_mb']:,}"
        lines.append(f"| {NAMES[p['axis']]} | {p['size']:,} | {speeds} | {memory} |")
    return "\n".join(lines)


def grid_table(points: list[dict]) -> str:
    """Return a table with a row per vocabulary and a column per row length."""
    lengths = sorted({p["row_tokens"] for p in points})
    cells = {(p["vocab"], p["row_tokens"]): p["update_added_mb"] for p in points}
    lines = [
        "| vocabulary | " + " | ".join(f"rows of {n:,} tokens" for n in lengths) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for vocab in sorted({p["vocab"] for p in points}):
        row = " | ".join(f"{cells[vocab, n]:,.0f} MB" for n in lengths)
        lines.append(f"| {vocab:,} | {row} |")
    return "\n".join(lines)


def plot(points: list[dict], path: str) -> None:
    """Plot speed above, memory below, with a column per size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys(p["axis"] for p in points))
    figure, rows = plt.subplots(
        2, len(axes), figsize=(3.1 * len(axes), 5.6), squeeze=False, sharex="col"
    )
    for column, axis in enumerate(axes):
        of_axis = [p for p in points if p["axis"] == axis]
        sizes = [p["size"] for p in of_axis]
        above, below = rows[0][column], rows[1][column]
        for key, label in ("rollout", "rollout"), ("update", "update"):
            above.plot(sizes, [p[f"{key}_tokens_per_s"] for p in of_axis], "o-", label=label)
        for key, label in ("process_mb", "process"), ("update_added_mb", "update adds"):
            below.plot(sizes, [p[key] for p in of_axis], "o-", label=label)
        below.set_xlabel(NAMES[axis])
        for panel in above, below:
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        below.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    rows[0][0].set_ylabel("tokens/s")
    rows[1][0].set_ylabel("MB")
    rows[0][0].legend()
    rows[1][0].legend()
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
    parser.add_argument("--one", nargs=2, metavar=("AXIS", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    small = ["--smoke"] if args.smoke else []
    if args.one:
        if args.smoke:
            shrink()
        axis, size = args.one[0], int(args.one[1])
        return grid(size) if axis == "grid" else print(json.dumps(measure(axis, size)))
    points = []
    for axis in args.axes:
        for size in SIZES.get(axis, ()):
            if size <= args.most:
                devices = size if axis == "devices" else 2
                points += in_a_process(["--one", axis, str(size), *small], devices)
                print(json.dumps(points[-1]), flush=True)
    if points:
        print(table(points))
    if "grid" in args.axes:
        pairs = in_a_process(["--one", "grid", str(args.most), *small], 2)
        print("\n" + grid_table(pairs))
    if args.plot:
        plot(points, args.plot)
    return None


if __name__ == "__main__":
    main()
