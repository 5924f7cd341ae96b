"""Compare ways to learn from a larger teacher at the same number of sampled tokens.

    python tests/benchmarks/distil.py --folder runs/distil

On the embedded task: a teacher of 2.2 M parameters learns from worked examples without mistakes, a
student of the base policy's shape from few examples with mistakes. The student then trains with
DAPO, on-policy distillation, both at once, and on samples of the teacher. Finished runs are used
again. Other arguments go to the trainer. `--smoke` only shows, in seconds, that everything runs.
"""

import itertools
import json
import pathlib

import bench

import dapo_jax
from dapo_jax.data.arithmetic import make_problem

TEACHER = (
    "total_steps=1200 architecture.layers=5 architecture.embed=192 architecture.heads=6 "
    "architecture.mlp=576 examples.errors=false max_response_tokens=64 seed=1"
)
STUDENT = "total_steps=250 seed=2"
STEPS, EVALUATIONS, MEAN_TOKENS = 60, 12, 24
BOTH = "algorithm.distillation=reverse algorithm.distillation_coefficient=0.2"
ARMS = {"dapo": ("dapo", ""), "distilled": ("on_policy_distillation", ""), "both": ("dapo", BOTH)}
SMOKE_EXAMPLES = (
    "examples_per_step=4 compute.scan_unroll=1 optimizer.warmup_steps=1 "
    "packing.rows_per_microbatch=4"
)
SMOKE_MODEL = SMOKE_EXAMPLES + (
    " total_steps=1 architecture.layers=1 architecture.embed=16 architecture.heads=2 "
    "architecture.kv_heads=1 architecture.head_dim=8 architecture.mlp=16"
)
SMOKE_SCORES = "data.heldout_problems=2 evaluation.samples_per_problem=1 "
SMOKE = SMOKE_SCORES + (
    "evaluation.every_steps=1 compute.scan_unroll=1 optimizer.warmup_steps=1 total_steps=1 "
    "packing.rows_per_microbatch=4 rollout.prompts_per_step=2 rollout.samples_per_prompt=4 "
    "rollout.updates_per_rollout=1 rollout.max_sample_rounds=1 sampler.slots=8"
)


def reinforced(root: pathlib.Path, arm: str, settings: str, extra: list[str]) -> list[dict]:
    """Return the rows of an arm's run, each with all tokens sampled so far."""
    preset, own = ARMS[arm]
    models = f"model.folder={root}/student "
    models += f"teacher.folder={root}/teacher " if arm != "dapo" else ""
    rows = bench.train(root / arm, preset, *bench.flags(f"{models} {own} {settings}"), *extra)
    speeds = (row.get("sampled_tokens_per_second", 0) for row in rows)
    drawn = (speed * row.get("seconds_rollout", 0) for speed, row in zip(speeds, rows, strict=True))
    return [row | {"tokens": n} for row, n in zip(rows, itertools.accumulate(drawn), strict=True)]


def write_samples(path: pathlib.Path, teacher: pathlib.Path, budget: float) -> None:
    """Write responses of the teacher up to a number of tokens."""
    prompts = [make_problem("train", 3, i, 3, 8).text for i in range(int(budget / MEAN_TOKENS) + 1)]
    answers = dapo_jax.sample(str(teacher), prompts, max_prompt_tokens=16, max_response_tokens=64)
    lines, tokens = [], 0
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        tokens += len(answer)
        if tokens > budget:
            break
        if answer.text and not answer.truncated:
            lines.append(json.dumps({"prompt": prompt, "response": answer.text}))
    path.write_text("\n".join(lines) + "\n")


def imitated(root: pathlib.Path, budget: float, few: str) -> pathlib.Path:
    """Return the student after supervised training on samples of the teacher."""
    samples = root / "samples.jsonl"
    if not samples.exists():
        write_samples(samples, root / "teacher", budget)
    given = f"start={root}/student data.source={samples} data.passes=2.0 seed=4 "
    given += f"examples_per_step=64 optimizer.learning_rate=5e-4 packing.row_tokens=160 {few}"
    return bench.sft(root / "imitated", *bench.flags(given))


def main() -> None:
    options, extra = bench.read_arguments(
        __doc__, others=True, folder=pathlib.Path("runs/distil"), smoke=False
    )
    root = options.folder
    settings = f"total_steps={STEPS} evaluation.every_steps={STEPS // EVALUATIONS}"
    settings = SMOKE if options.smoke else settings
    tiny = SMOKE_MODEL if options.smoke else ""
    few = SMOKE_EXAMPLES if options.smoke else ""
    scored = SMOKE_SCORES if options.smoke else ""
    root.mkdir(parents=True, exist_ok=True)
    for name, shape in (("teacher", TEACHER), ("student", STUDENT)):
        bench.sft(root / name, f"--config={bench.BASE}", *bench.flags(f"{shape} {tiny}"))
    runs = {arm: reinforced(root, arm, settings, extra) for arm in ARMS}
    budget = min(rows[-1]["tokens"] for rows in runs.values())

    def accuracy(folder: pathlib.Path) -> float:
        scores = root / f"{folder.name}_scores"
        metrics = bench.evaluate(scores, f"--model={folder}", *bench.flags(scored))
        return metrics["heldout_accuracy"]

    print(f"{budget:,.0f} sampled tokens\n")
    bench.print_table(["arm", "held-out accuracy"])
    for name in ("teacher", "student"):
        bench.print_row([f"{name}, before", f"{accuracy(root / name):.3f}"])
    for arm, rows in runs.items():
        within = [row for row in rows if "heldout_accuracy" in row and row["tokens"] <= budget]
        bench.print_row([arm, f"{within[-1]['heldout_accuracy']:.3f}"])
    bench.print_row(["imitated", f"{accuracy(imitated(root, budget, few)):.3f}"])


if __name__ == "__main__":
    main()
