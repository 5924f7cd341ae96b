"""Train where every response is wrong at first, with the presets whose teacher is told more.

    python tests/benchmarks/self_distillation.py --folder runs/told --seeds 3

A problem is four digits and `?`; its answer has the next digit for each (9 is followed by 1). The
base policy learns from examples to answer `?` with four digits at random, and to repeat what stands
between `?` and `=`. So it never knew the rule, and the teacher, whose prompt is
`{problem}{answer}=`, knows every answer. The command can be repeated after an interruption;
finished runs are used again. `--picture FILE.png` draws the held-out accuracy over the steps.
"""

import json
import pathlib
import random
import statistics

import bench

DIGITS, PROBLEMS, HELDOUT, EXAMPLES = 4, 3000, 200, 12_800
PRESETS = "dapo", "sdft", "opsd", "sdpo", "rlsd"
AVERAGED = "sdft", "sdpo"  # their teacher is a mean of the policy, of rate `--average`
TOLD = "{problem}{answer}="
STEPS = 100


def digits(rng: random.Random) -> str:
    return "".join(rng.choices("123456789", k=DIGITS))


def next_digits(text: str) -> str:
    return "".join(str(int(digit) % 9 + 1) for digit in text)


def write_rows(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_data(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Write examples for the base policy, and disjoint problems to train and to hold out."""
    rng = random.Random(0)
    problems = list(dict.fromkeys(digits(rng) for _ in range(2 * PROBLEMS)))[: PROBLEMS + HELDOUT]
    rows = [{"problem": f"{text}?", "answer": next_digits(text)} for text in problems]
    examples = []
    for index in range(EXAMPLES):
        told, answer = index % 2, digits(rng)
        shown = f"{answer}=" if told else ""
        examples.append({"problem": f"{digits(rng)}?{shown}", "solution": f"#### {answer}"})
    parts = {"base": examples, "train": rows[HELDOUT:], "heldout": rows[:HELDOUT]}
    return {name: write_rows(folder / f"{name}.jsonl", part) for name, part in parts.items()}


def settings(preset: str, average: float, base: pathlib.Path, data: dict[str, pathlib.Path]) -> str:
    own = "" if preset == "dapo" else f" extras.teacher.folder= extras.teacher.prompt={TOLD}"
    if preset in AVERAGED:
        own += f" extras.teacher.average={average}"
    return (
        f"model.folder={base} total_steps={STEPS} data.source={data['train']}"
        f" data.heldout_source={data['heldout']} data.heldout_problems={HELDOUT}"
        " rollout.prompts_per_step=16 rollout.samples_per_prompt=8 rollout.updates_per_rollout=1"
        " rollout.max_sample_rounds=2 sampler.max_response_tokens=12 packing.row_tokens=64"
        " optimizer.learning_rate=1e-3 evaluation.every_steps=10 evaluation.samples_per_problem=2"
        f"{own}"
    )


def draw(picture: str, curves: dict[str, list[list[dict]]]) -> None:
    """Draw the held-out accuracy of each preset: the mean over seeds, and every seed."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for index, (preset, runs) in enumerate(curves.items()):
        measured = [[row for row in rows if "heldout_accuracy" in row] for rows in runs]
        steps = [row["step"] for row in measured[0]]
        scores = [[row["heldout_accuracy"] for row in rows] for rows in measured]
        for each in scores:
            axes.plot(steps, each, color=f"C{index}", alpha=0.25, linewidth=1)
        means = [statistics.mean(values) for values in zip(*scores, strict=True)]
        axes.plot(steps, means, color=f"C{index}", label=preset)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(-0.03, 1.03))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)


def main() -> None:
    args = bench.read_arguments(
        __doc__, folder="runs/told", seeds=1, presets=list(PRESETS), average=0.05, picture=""
    )
    root = pathlib.Path(args.folder)
    root.mkdir(parents=True, exist_ok=True)
    data = write_data(root)
    examples = f"data.source={data['base']} start=dapo_jax:arithmetic_base data.passes=3"
    examples += " examples_per_step=64 packing.row_tokens=64 optimizer.learning_rate=1e-3"
    base = bench.sft(root / "policy", *bench.flags(examples))
    bench.print_table(["preset", "held-out before", "after (seeds)", "all-wrong groups, step 1"])
    curves = {}
    for preset in args.presets:
        runs = curves[preset] = []
        for seed in range(args.seeds):
            flags = bench.flags(f"seed={seed} {settings(preset, args.average, base, data)}")
            runs.append(bench.train(root / f"{preset}_{seed}", preset, *flags))
        after = [rows[-1]["heldout_accuracy"] for rows in runs]
        cells = ", ".join(f"{score:.3f}" for score in after)
        first = statistics.mean(rows[0]["heldout_accuracy"] for rows in runs)
        wrong = statistics.mean(rows[1]["all_wrong_fraction"] for rows in runs)
        bench.print_row(
            [f"`{preset}`", f"{first:.3f}", f"{statistics.mean(after):.3f} ({cells})", wrong]
        )
    if args.picture:
        draw(args.picture, curves)


if __name__ == "__main__":
    main()
