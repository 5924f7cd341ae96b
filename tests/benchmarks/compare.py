"""Runs our benchmark and the peers' in turn, several rounds, and prints one table.

    python tests/benchmarks/compare.py --rounds 3 --workload uniform real \\
        --trl V/bin/python --tunix T/bin/python

Interleaved, because a shared machine's speed drifts: a ratio is taken inside a round, and the
median over rounds is what to quote. The peers decode static batches, which run until their longest
row is done: beside the 512 responses of `real` (ours.py has their law) stand eight of their
uniform batches of 64 at 512 new tokens. A ratio is of seconds for the same responses.
"""

import argparse
import json
import pathlib
import statistics
import sys

import bench
from peers import BENCHES

FOLDER = pathlib.Path(__file__).parent
PEERS = {"trl": "TRL", "tunix": "Tunix"}
# Of the peers: new tokens of a response, and batches of 64 for all of them.
PEERS_SIZES = {"uniform": (128, 1), "real": (512, 8), "smoke": (32, 1)}


def measure_round(args: argparse.Namespace, workload: str) -> dict:
    """Return our lines, and the peers' seconds for the same responses."""
    new_tokens, batches = PEERS_SIZES[workload]
    common = ["--repeats", str(args.repeats), "--only", *args.only]
    command = [sys.executable, str(FOLDER / "ours.py"), "--workload", workload]
    lines = {"dapo_jax": {line["bench"]: line for line in bench.json_lines([*command, *common])}}
    for name in PEERS:
        if python := getattr(args, name):
            command = [python, str(FOLDER / "peers.py"), name, "--new-tokens", str(new_tokens)]
            measured = bench.json_lines([*command, *common])
            lines[name] = {line["bench"]: batches * line["median_s"] for line in measured}
    print(json.dumps(lines | {"workload": workload}), flush=True)
    return lines


def cells(rounds: list[dict], name: str, peers: list[str]) -> list[str]:
    """Return medians over the rounds, and the ratio of each round."""
    median = statistics.median
    own = [lines["dapo_jax"][name] for lines in rounds]
    made = [f"{median(line['tokens_per_s'] for line in own):,.0f}"]
    made.append(f"{median(line['median_s'] for line in own):.2f}")
    made += [f"{median(lines[peer][name] for lines in rounds):.2f}" for peer in peers]
    if peers:
        best = [min(lines[peer][name] for peer in peers) for lines in rounds]
        ratios = [b / line["median_s"] for b, line in zip(best, own, strict=True)]
        made.append(f"{median(ratios):.2f}x ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    share = median(line["gflops"] / line["matmul_gflops"] for line in own)
    return [*made, f"{share:.0%} of {median(line['matmul_gflops'] for line in own):.0f}"]


def main() -> None:
    args = bench.read_arguments(
        __doc__, workload=["uniform"], rounds=3, repeats=5, only=list(BENCHES), trl="", tunix=""
    )
    rounds = {workload: [] for workload in args.workload}
    for _ in range(args.rounds):
        for workload in args.workload:
            rounds[workload].append(measure_round(args, workload))
    peers = [name for name in PEERS if getattr(args, name)]
    heads = ["workload", "bench", "tokens/s", "dapo_jax, s", *(f"{PEERS[p]}, s" for p in peers)]
    bench.print_table([*heads, *["against the better peer"][: len(peers)], "GFLOP/s of matmul"])
    for workload, lines in rounds.items():
        for name in args.only:
            bench.print_row([workload, name, *cells(lines, name, peers)])


if __name__ == "__main__":
    main()
