"""Workload, clock and output of the peers' scripts, which run in environments without dapo_jax."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

# The model and the batch of ours.py's `uniform`.
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 512, 256, 4, 4, 2, 1024
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 32
RESPONSES = PROMPTS * GROUP
PAD, END = 0, 1
BENCHES = ("rollout", "update", "step")


def read_arguments(purpose: str) -> argparse.Namespace:
    """Arguments of a peer's script."""
    parser = argparse.ArgumentParser(
        description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new-tokens", type=int, default=128, help="of each response")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(BENCHES), help="what is timed")
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - set(BENCHES)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: is none of {', '.join(BENCHES)}")
    return args


def require(modules: str, install: str) -> None:
    """Exits with the command that installs the peer where a module is missing."""
    missing = [name for name in modules.split() if importlib.util.find_spec(name) is None]
    if missing:
        script = pathlib.Path(sys.argv[0]).name
        raise SystemExit(
            f"{script}: {', '.join(missing)} not installed; in an environment of its own: {install}"
        )


def report(args: argparse.Namespace, calls: dict[str, Callable[[int], list[float]]], packages: str):
    """Prints the lines that compare.py reads. The first call, which warms up, is reported apart."""
    for bench in args.only.split(","):
        with contextlib.redirect_stdout(sys.stderr):  # what a peer prints looks like JSON
            first, *seconds = calls[bench](args.repeats)
        line = {
            "bench": bench,
            "median_s": round(statistics.median(seconds), 4),
            "all_s": [round(second, 4) for second in seconds],
            "first_call_s": round(first, 2),
            "versions": {name: importlib.metadata.version(name) for name in packages.split()},
        }
        print(json.dumps(line), flush=True)


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of `repeats` calls and of one before them."""
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds
