"""Held-out accuracy of the embedded task against `rollout.staleness`, by correction.

    python tests/benchmarks/staleness.py --plot docs/staleness.png

trains the shipped policy once for each staleness, correction and seed; finished runs in the folder
are used again, and a stopped one resumes. Other arguments go to the trainer. It prints a JSON line
per run and a table of means. An older policy without a correction is rejected; importance weights
between 1 and 1.0001 correct nothing.
"""

import json
import pathlib
import statistics

import bench

CORRECTIONS = {
    "none": "algorithm.importance_floor=1 algorithm.importance_cap=1.0001",
    "importance_cap=2": "algorithm.importance_cap=2",
    "old_logprobs=sampler": "algorithm.old_logprobs=sampler",
}
# 128 responses, two optimizer steps each; a constant rate, so that late steps move the policy too.
SETTING = """rollout.prompts_per_step=16 rollout.samples_per_prompt=8 rollout.updates_per_rollout=2
    optimizer.schedule=constant log.report=false log.tensorboard=false checkpoint.every_steps=8
    evaluation.samples_per_problem=1"""
Points = dict[tuple[str, int], list[float]]


def accuracy(name: str, staleness: int, seed: int, options, extra: list[str]) -> float:
    """Train unless the run is finished; return its accuracy, the mean of the last two scores."""
    run = options.folder / f"{name}_{staleness}_{seed}"
    settings = f"seed={seed} total_steps={options.steps} optimizer.learning_rate={options.rate}"
    late = f"evaluation.every_steps={max(1, options.steps // 3)} rollout.staleness={staleness}"
    given = bench.flags(f"{SETTING} {settings} {late} {CORRECTIONS[name]}")
    rows = bench.train(run, "dapo", *given, *extra)
    scores = [row["heldout_accuracy"] for row in rows if "heldout_accuracy" in row]
    late_kl = statistics.mean([row["kl_sampler_trainer"] for row in rows[1:]][-3:])
    line = {"correction": name, "staleness": staleness, "seed": seed, "rate": options.rate}
    print(json.dumps(line | {"heldout_accuracy": scores, "kl": round(late_kl, 4)}), flush=True)
    return statistics.mean(scores[-2:])


def plot(points: Points, path: str) -> None:
    """Draw a line of means per correction, and a point per run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for name, marker in zip(CORRECTIONS, "osD", strict=True):
        stale = sorted(staleness for other, staleness in points if other == name)
        means = [statistics.mean(points[name, staleness]) for staleness in stale]
        (line,) = axes.plot(range(len(stale)), means, label=name)
        for i, staleness in enumerate(stale):
            scores = points[name, staleness]
            axes.plot([i] * len(scores), scores, marker, color=line.get_color())
    axes.set_xticks(range(len(stale)), map(str, stale))
    axes.set(xlabel="rollout.staleness", ylabel="held-out accuracy", ylim=(0, 1))
    axes.legend(title="correction", frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)


def main() -> None:
    options, extra = bench.read_arguments(
        __doc__,
        others=True,
        folder=pathlib.Path("runs/staleness"),
        staleness=[0, 1, 2, 4, 8],
        seeds=1,
        steps=24,
        rate=5e-4,
        plot="",
    )
    points: Points = {}
    for seed in range(options.seeds):
        for staleness in options.staleness:
            # On policy, corrections differ by rounding: one run.
            for name in list(CORRECTIONS)[: None if staleness else 1]:
                score = accuracy(name, staleness, seed, options, extra)
                for arm in [name] if staleness else CORRECTIONS:
                    points.setdefault((arm, staleness), []).append(score)
    bench.print_table(["correction", *map(str, options.staleness)])
    for name in CORRECTIONS:
        means = [statistics.mean(points[name, staleness]) for staleness in options.staleness]
        bench.print_row([name, *(f"{mean:.3f}" for mean in means)])
    if options.plot:
        plot(points, options.plot)


if __name__ == "__main__":
    main()
