"""Trains the embedded task with and without `rollout.lag`: accuracy, wall-clock, pod seconds.

    python tests/benchmarks/lag.py --seeds 3 --folder runs/lag

Resumable: what is finished is kept. Any other argument is handed to the trainer. On one machine
rollouts and updates share the processor, so wall-clock gains nothing; `pod seconds` is what the
steps of the run without lag would take where the two have devices of their own: their sum without a
lag, and with one the longer of an update and the rollout beside it.
"""

import argparse
import json
import pathlib
import statistics

from family import trained
from rule_of_thumb import overlapped_seconds

LAGS, CAP = (0, 1), 2.0
PARTS = ("seconds_score", "seconds_update")


def train(root: pathlib.Path, lag: int, seed: int, extra: list[str]) -> list[dict]:
    """The rows of a run, made where it is missing."""
    folder = root / f"lag_{lag}_{seed}"
    lag_of = f"--config.algorithm.importance_cap={CAP}", f"--config.rollout.lag={lag}"
    rows = trained(folder, seed, *lag_of, *extra)
    seconds = json.loads((folder / "summary.json").read_text())["seconds"]
    rows[-1]["wall_seconds"] = seconds
    return rows


def pod_seconds(rows: list[dict], lag: int) -> float:
    """Of the steps of a run without lag, were rollouts and updates on devices of their own."""
    rollouts = [row["seconds_rollout"] for row in rows[1:]]
    updates = [sum(row.get(name, 0.0) for name in PARTS) for row in rows[1:]]
    return overlapped_seconds(rollouts, updates, lag)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/lag"))
    options, extra = parser.parse_known_args()
    seeds = range(options.seeds)
    runs = {(lag, seed): train(options.folder, lag, seed, extra) for seed in seeds for lag in LAGS}
    print("| lag | held-out accuracy | wall seconds | pod seconds |\n|---|---|---|---|")
    for lag in LAGS:
        scores = [runs[lag, seed][-1]["heldout_accuracy"] for seed in seeds]
        wall = statistics.mean(runs[lag, seed][-1]["wall_seconds"] for seed in seeds)
        pod = statistics.mean(pod_seconds(runs[0, seed], lag) for seed in seeds)
        each = " ".join(f"{score:.3f}" for score in scores)
        print(f"| {lag} | {statistics.mean(scores):.3f} ({each}) | {wall:.0f} | {pod:.0f} |")


if __name__ == "__main__":
    main()
