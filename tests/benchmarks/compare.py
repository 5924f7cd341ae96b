"""Runs our benchmark and the peers' scripts in turn, several rounds, and prints one table.

    python tests/benchmarks/compare.py --rounds 3 --workload uniform real \\
        --trl V/bin/python --tunix T/bin/python

Interleaved, because a shared machine's speed drifts: a ratio is taken inside a round, and the
median over rounds is what to quote. The peers decode static batches, which run until their longest
row is done: beside the 512 responses of `real` (ours.py says their law) stand eight of their
uniform batches of 64 at 512 new tokens. A ratio is of seconds for the same responses.
"""

import argparse
import json
import pathlib
import shlex
import statistics
import subprocess
import sys

OURS = f"{sys.executable} {pathlib.Path(__file__).parent / 'ours.py'}"
BENCHES = ("rollout", "update", "step")
# Of the peers: new tokens of a response, and batches of 64 for all of them.
PEERS_SIZES = {"uniform": (128, 1), "real": (512, 8), "smoke": (32, 1)}


def json_lines(command: str) -> list[dict]:
    """The JSON lines that a command prints. Exits where it fails."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}\nfailed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ours(workload: str, repeats: int, only: str) -> dict[str, dict]:
    """Its line for each bench."""
    lines = json_lines(f"{OURS} --workload {workload} --repeats {repeats} --only {only}")
    return {line["bench"]: line for line in lines}


def peer(name: str, python: str, new_tokens: int, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each bench, by the peer's script in its own environment."""
    script = pathlib.Path(__file__).parent / f"peer_{name}.py"
    options = f"--new-tokens {new_tokens} --repeats {args.repeats} --only {args.only}"
    return {line["bench"]: line["median_s"] for line in json_lines(f"{python} {script} {options}")}


def one_round(args: argparse.Namespace, workload: str) -> dict:
    """Our lines, and the peers' seconds for the same responses."""
    new_tokens, batches = PEERS_SIZES[workload]
    found = {"workload": workload, "dapo_jax": ours(workload, args.repeats, args.only)}
    for name in ("trl", "tunix"):
        if python := getattr(args, name):
            seconds = peer(name, python, new_tokens, args)
            found[name] = {bench: batches * value for bench, value in seconds.items()}
    print(json.dumps(found), flush=True)
    return found


def row(workload: str, bench: str, rounds: list[dict]) -> str:
    """A line of the table: medians over the rounds; the ratios one by one."""

    def median(values) -> float:
        return statistics.median(values)

    own = [one["dapo_jax"][bench] for one in rounds]
    cells = [workload, bench, f"{median(o['tokens_per_s'] for o in own):,.0f}"]
    cells.append(f"{median(o['median_s'] for o in own):.2f}")
    peers = [peer for peer in ("trl", "tunix") if peer in rounds[0]]
    cells += [f"{median(one[peer][bench] for one in rounds):.2f}" for peer in peers]
    if peers:
        best = [min(one[peer][bench] for peer in peers) for one in rounds]
        ratios = [b / o["median_s"] for b, o in zip(best, own, strict=True)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        cells.append(f"{median(ratios):.2f}x ({each})")
    share = median(o["gflops"] / o["matmul_gflops"] for o in own)
    cells.append(f"{share:.0%} of {median(o['matmul_gflops'] for o in own):.0f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="*", choices=PEERS_SIZES, default=["uniform"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(BENCHES), help="what is timed")
    parser.add_argument("--trl", help="Python with TRL (peer_trl.py says what to install)")
    parser.add_argument("--tunix", help="Python with Tunix (peer_tunix.py says it)")
    args = parser.parse_args()
    rounds = [one_round(args, workload) for _ in range(args.rounds) for workload in args.workload]
    heads = ["workload", "bench", "tokens/s", "dapo_jax, s"]
    heads += [f"{name}, s" for name in ("TRL", "Tunix") if getattr(args, name.lower())]
    heads += ["against the better peer"] if args.trl or args.tunix else []
    heads.append("GFLOP/s of matmul peak")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for workload in args.workload:
        of_workload = [one for one in rounds if one["workload"] == workload]
        for bench in args.only.split(","):
            print(row(workload, bench, of_workload))


if __name__ == "__main__":
    main()
