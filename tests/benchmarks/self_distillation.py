"""Train where every response is wrong at first, with the presets whose teacher is told more.

    python tests/benchmarks/self_distillation.py --folder runs/told --seeds 3

A problem is four digits and `?`; its answer has the next digit for each (9 is followed by 1). The
base policy learns from examples to answer `?` with four digits at random, and to repeat what stands
between `?` and `=`. So it never knew the rule, and the teacher, whose prompt is
`{problem}{answer}=`, knows every answer. The command can be repeated after an interruption;
finished runs are used again.
"""

import json
import pathlib
import random
import statistics

import bench

DIGITS, PROBLEMS, HELDOUT, EXAMPLES = 4, 3000, 200, 12_800
PRESETS = "dapo", "sdft", "opsd", "sdpo", "rlsd"
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


def settings(preset: str, seed: int, base: pathlib.Path, data: dict[str, pathlib.Path]) -> str:
    own = "" if preset == "dapo" else f" extras.teacher.folder= extras.teacher.prompt={TOLD}"
    if preset in ("sdft", "sdpo"):
        own += " extras.teacher.average=0.05"
    return (
        f"seed={seed} model.folder={base} total_steps={STEPS} data.source={data['train']}"
        f" data.heldout_source={data['heldout']} data.heldout_problems={HELDOUT}"
        " rollout.prompts_per_step=16 rollout.samples_per_prompt=8 rollout.updates_per_rollout=1"
        " rollout.max_sample_rounds=2 sampler.max_response_tokens=12 packing.row_tokens=64"
        " optimizer.learning_rate=1e-3 evaluation.every_steps=10 evaluation.samples_per_problem=2"
        f"{own}"
    )


def main() -> None:
    args = bench.read_arguments(__doc__, folder="runs/told", seeds=1, presets=list(PRESETS))
    root = pathlib.Path(args.folder)
    root.mkdir(parents=True, exist_ok=True)
    data = write_data(root)
    examples = f"data.source={data['base']} start=dapo_jax:arithmetic_base data.passes=3"
    examples += " examples_per_step=64 packing.row_tokens=64 optimizer.learning_rate=1e-3"
    base = bench.sft(root / "policy", *bench.flags(examples))
    bench.print_table(["preset", "held-out before", "after (seeds)", "all-wrong groups, step 1"])
    for preset in args.presets:
        runs = []
        for seed in range(args.seeds):
            flags = bench.flags(settings(preset, seed, base, data))
            runs.append(bench.train(root / f"{preset}_{seed}", preset, *flags))
        after = [rows[-1]["heldout_accuracy"] for rows in runs]
        cells = ", ".join(f"{score:.3f}" for score in after)
        first = statistics.mean(rows[0]["heldout_accuracy"] for rows in runs)
        wrong = statistics.mean(rows[1]["all_wrong_fraction"] for rows in runs)
        bench.print_row(
            [f"`{preset}`", f"{first:.3f}", f"{statistics.mean(after):.3f} ({cells})", wrong]
        )


if __name__ == "__main__":
    main()
