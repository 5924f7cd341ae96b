"""Runs our benchmark and the peers' scripts in turn, several rounds, and prints the ratios.

    python tests/benchmarks/compare.py --rounds 3 \\
        --trl "V/bin/python bench_trl.py" --tunix "T/bin/python bench_tunix.py"

Interleaved, because a shared machine's speed drifts: a ratio is taken inside a round, and the
median over rounds is what to quote.
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


def json_lines(command: str) -> list[dict]:
    """The JSON lines a command prints. Raises where it fails."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}\nfailed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ours(repeats: int, only: str) -> dict[str, float]:
    """Median seconds of each bench."""
    lines = json_lines(f"{OURS} --repeats {repeats} --only {only}")
    return {line["bench"]: line["median_s"] for line in lines}


def trl(command: str, repeats: int) -> dict[str, float]:
    lines = json_lines(
        f"{command} --what rollout,update,e2e --rollout-impl dynamic --repeats {repeats}"
    )
    names = {"rollout_dynamic": "rollout", "update_gc_off": "update", "e2e_gc_off": "step"}
    return {names[line["bench"]]: line["median_s"] for line in lines}


def tunix(command: str, repeats: int) -> dict[str, float]:
    parts = json_lines(f"{command} --repeats {repeats}")[0]
    whole = json_lines(f"{command} --only e2e --repeats {repeats}")[0]
    return {
        "rollout": parts["sample"]["median_s"],
        "update": parts["train_step"]["median_s"],
        "step": whole["dapo_step_e2e"]["median_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(BENCHES), help="what of ours is timed")
    parser.add_argument("--trl", help="command that runs the TRL script")
    parser.add_argument("--tunix", help="command that runs the Tunix script")
    args = parser.parse_args()
    peers = {
        name: (run, command)
        for name, run, command in (("trl", trl, args.trl), ("tunix", tunix, args.tunix))
        if command
    }
    rounds = []
    for number in range(args.rounds):
        seconds = {"dapo_jax": ours(args.repeats, args.only)}
        for name, (run, command) in peers.items():
            seconds[name] = run(command, args.repeats)
        rounds.append(seconds)
        print(json.dumps({"round": number, "seconds": seconds}), flush=True)
    for bench in args.only.split(","):
        for name in peers:
            ratios = [r[name][bench] / r["dapo_jax"][bench] for r in rounds]
            print(
                f"{bench:8s} {name:6s} / dapo_jax: median {statistics.median(ratios):.2f}x "
                f"(rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
            )


if __name__ == "__main__":
    main()
