"""Measure the seconds of a rollout or an update by kind of operation.

    python tests/benchmarks/operations.py --only update
    XLA_FLAGS=--xla_force_host_platform_device_count=1 \\
        python tests/benchmarks/operations.py --only update --rows 64

JAX's profiler traces one call of ours.py. Seconds are processor seconds: two devices that compute
at once count twice. `waiting` is the cores' idle time.
"""

import argparse
import collections
import gzip
import json
import os
import pathlib
import re
import tempfile
import time

import jax
from ours import WORKLOADS, measured

# The first match counts; a fusion is named after its operations.
KINDS = (
    ("matrix products", re.compile(r"dot|gemm|convolution|ynn")),
    ("exchange between devices", re.compile(r"all-|reduce-scatter|collective|permute")),
    ("exponentials: softmax, SiLU", re.compile(r"exponential|exp|logistic|softmax")),
    ("draws: keys, sorts, arg max", re.compile(r"threefry|rng|sort|argmax|cumsum|shift|xor")),
    ("copies and places", re.compile(r"copy|slice|gather|scatter|concatenate|pad|transpose|cache")),
    ("sums and norms", re.compile(r"reduce|rsqrt")),
)
PARENTS = re.compile(r"^(while|call|conditional|ThunkExecutor|Thunk|custom-call-start)")


def seconds_by_kind(folder: pathlib.Path) -> dict[str, float]:
    """Return the seconds of the operations in the newest trace of a folder."""
    path = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    seconds: collections.Counter[str] = collections.Counter()
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        name = event.get("args", {}).get("hlo_op", "")
        if event.get("ph") == "X" and name and not PARENTS.match(name):
            kind = next((kind for kind, names in KINDS if names.search(name)), "other elementwise")
            seconds[kind] += event["dur"] / 1e6
    return dict(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="uniform")
    parser.add_argument("--only", choices=("rollout", "update"), default="update")
    parser.add_argument("--rows", type=int, default=0, help="per microbatch; 0: the workload's")
    args = parser.parse_args()
    with measured(args.workload, args.rows) as calls, tempfile.TemporaryDirectory() as folder:
        call = calls[args.only]
        call()
        call()
        with jax.profiler.trace(folder):
            started = time.perf_counter()
            call()
            wall = time.perf_counter() - started
        seconds = seconds_by_kind(pathlib.Path(folder))
    cores = min(os.cpu_count() or 1, 2)
    idle = cores * wall - sum(seconds.values())
    print(f"{args.only}, {args.workload}: {wall:.2f} s on {jax.device_count()} devices")
    print("| operations | processor seconds | share |\n|---|---|---|")
    for kind, value in sorted(seconds.items(), key=lambda item: -item[1]) + [("waiting", idle)]:
        print(f"| {kind} | {value:.3f} | {value / (cores * wall):.0%} |")


if __name__ == "__main__":
    main()
