"""Train the embedded task with each `rollout.carry_over`: waste, speed and accuracy.

    python tests/benchmarks/carry_over.py --seeds 3 --folder runs/carry_over

Finished runs are used again. Other arguments go to the trainer. The sums have 2 to 8 terms and half
of a batch decodes at once, so a step without carry-over ends with most slots idle. Decode steps and
steps per hour leave out the first steps, which compile.
"""

import pathlib
import statistics

from arguments import read_arguments
from family import trained

CAP = 2.0
TAIL = (
    "--config.data.min_terms=2",
    "--config.sampler.max_response_tokens=128",
    "--config.sampler.slots=256",
)
FIRST_STEPS = 3
HEADER = (
    "| carry_over | held-out accuracy | sampled per trained token | decode steps a step "
    "| steps per hour | policy lag, mean and most |\n|---|---|---|---|---|---|"
)


def train(root: pathlib.Path, kind: str, seed: int, extra: list[str]) -> list[dict]:
    """Return the rows of a run's steps; run it if it is missing."""
    folder = root / f"{kind}_{seed}"
    kind_of = f"--config.algorithm.importance_cap={CAP}", f"--config.rollout.carry_over={kind}"
    return trained(folder, seed, *kind_of, *TAIL, *extra)[1:]


def waste(rows: list[dict]) -> float:
    """Return sampled tokens per trained token over a whole run."""
    trained = [row["trained_tokens_per_second"] * row["seconds_update"] for row in rows]
    sampled = [row["sampled_to_kept_tokens"] * n for row, n in zip(rows, trained, strict=True)]
    return sum(sampled) / sum(trained)


def table_row(kind: str, runs: list[list[dict]]) -> str:
    """Return a row of means over the seeds, with each accuracy."""
    scores = [rows[-1]["heldout_accuracy"] for rows in runs]
    late = [row for rows in runs for row in rows[min(FIRST_STEPS, len(rows) - 1) :]]

    def mean(name: str) -> float:
        return statistics.mean(row[name] for row in late)

    cells = (
        kind,
        f"{statistics.mean(scores):.3f} ({' '.join(f'{score:.3f}' for score in scores)})",
        f"{statistics.mean(map(waste, runs)):.2f}",
        f"{mean('decode_steps'):.0f}",
        f"{3600 / mean('seconds_step'):.0f}",
        f"{mean('policy_lag'):.2f}, {max(row['policy_lag_max'] for row in late):.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    options, extra = read_arguments(
        __doc__,
        others=True,
        seeds=3,
        kinds=["none", "unfinished", "all"],
        folder=pathlib.Path("runs/carry_over"),
    )
    # Alternate the kinds, so that other work on the machine affects all alike.
    runs = {
        (kind, seed): train(options.folder, kind, seed, extra)
        for seed in range(options.seeds)
        for kind in options.kinds
    }
    print(HEADER)
    for kind in options.kinds:
        print(table_row(kind, [runs[kind, seed] for seed in range(options.seeds)]))


if __name__ == "__main__":
    main()
