"""Samples until an accuracy, with and without a choice of problems by difficulty.

    python tests/benchmarks/difficulty.py
    python tests/benchmarks/difficulty.py --task calculator --steps 30

Few problems, so that they repeat. In the embedded task a third have two terms, which the base
mostly fails; the other is the config `calculator`. Arms: every problem; problems of a measured
difficulty; dynamic sampling; pools with dynamic sampling; all three. Finished runs are used again.
"""

import json
import pathlib

import bench

from dapo_jax.data.arithmetic import make_problem, make_sum

TERMS = (2, 5, 8)
STEP = "outcomes/right", "outcomes/wrong", "outcomes/no_answer"
SETTINGS = (
    "data.heldout_problems=-1 rollout.prompts_per_step=8 rollout.samples_per_prompt=8 "
    "rollout.updates_per_rollout=1 evaluation.samples_per_problem=2 data.max_terms=8 "
    "sampler.slots=64 checkpoint.every_steps=0 log.report=false"
)
CALCULATOR = (
    "environment.name=calculator environment.max_turns=3 environment.max_observation_tokens=8 "
    "sampler.burst_tokens=4 sampler.max_response_tokens=48"
)
DYNAMIC, POOLS = "algorithm.dynamic_sampling=true", "rollout.curriculum=pools"


def write_rows(path: pathlib.Path, task: str, split: str, count: int) -> pathlib.Path:
    """Write a file of multi-digit sums, or of problems with 2, 5 and 8 terms in turn."""
    rows = {}
    for index in range(count):
        terms = TERMS[index % len(TERMS)]
        if task == "calculator":
            problem = make_sum(split, index, index)
        else:
            problem = make_problem(split, index, index, min_terms=terms, max_terms=terms)
        rows[problem.text] = {"problem": problem.text, "answer": problem.answer}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return path


def main() -> None:
    options, extra = bench.read_arguments(
        __doc__,
        others=True,
        folder=pathlib.Path("runs/difficulty"),
        task="arithmetic",
        seeds=1,
        steps=12,
        target=0.6,
        arms=["none", "offline range", "dynamic sampling", "pools", "range and pools"],
    )
    root = options.folder / options.task
    root.mkdir(parents=True, exist_ok=True)
    training = write_rows(root / "training.jsonl", options.task, "train", 96)
    heldout = write_rows(root / "heldout.jsonl", options.task, "heldout", 96)
    settings, rates = SETTINGS, root / "rates.jsonl"
    base: str | pathlib.Path = "dapo_jax:arithmetic_base"
    if options.task == "calculator":
        base = bench.sft(root / "base", "--config=configs/calculator_base.py")
        settings = f"{SETTINGS} {CALCULATOR} model.folder={base}"
    scored = bench.flags(f"{settings} data.heldout_source={training}")
    scored += [f"--model={base}", "--k=8", f"--write_difficulty={rates}"]
    bench.evaluate(root / "rates", *scored, *extra)
    rated = f"data.difficulty=0.05..0.95 data.difficulty_file={rates}"
    arms = {
        "none": "algorithm.dynamic_sampling=false",
        "offline range": f"algorithm.dynamic_sampling=false {rated}",
        "dynamic sampling": DYNAMIC,
        "pools": f"{DYNAMIC} {POOLS}",
        "range and pools": f"{DYNAMIC} {POOLS} {rated}",
    }
    data = f"data.source={training} data.heldout_source={heldout}"
    bench.print_table(["arm", "seed", "before", "after", "samples", f"until {options.target}"])
    for seed in range(options.seeds):
        often = f"seed={seed} total_steps={options.steps} evaluation.every_steps=2"
        for arm in options.arms:
            folder = root / f"{arm.replace(' ', '_')}_{seed}"
            given = bench.flags(f"{settings} {data} {often} {arms[arm]}")
            before, *rows = bench.train(folder, "grpo", *given, *extra)
            drawn, reached = 0.0, "not reached"
            for row in rows:
                drawn += sum(row[name] for name in STEP)
                if row.get("heldout_accuracy", 0) >= options.target and reached == "not reached":
                    reached = f"{drawn:.0f}"
            scores = (f"{row['heldout_accuracy']:.3f}" for row in (before, rows[-1]))
            bench.print_row([arm, seed, *scores, f"{drawn:.0f}", reached])


if __name__ == "__main__":
    main()
