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

import family
from arguments import read_arguments
from family import BASE, RL

TEACHER = {
    "total_steps": 1200,
    "architecture.layers": 5,
    "architecture.embed": 192,
    "architecture.heads": 6,
    "architecture.mlp": 576,
    "examples.errors": False,
    "max_response_tokens": 64,
    "seed": 1,
}
STUDENT = {"total_steps": 250, "seed": 2}
STEPS, EVALUATIONS, MEAN_TOKENS = 60, 12, 24
BOTH = {"algorithm.distillation": "reverse", "algorithm.distillation_coefficient": 0.2}
SMOKE = {
    "compute.scan_unroll": 1,
    "rollout.prompts_per_step": 2,
    "rollout.samples_per_prompt": 4,
    "rollout.updates_per_rollout": 1,
    "rollout.max_sample_rounds": 1,
    "data.heldout_problems": 2,
    "evaluation.samples_per_problem": 1,
    "evaluation.every_steps": 1,
    "sampler.slots": 8,
    "packing.rows_per_microbatch": 4,
    "optimizer.warmup_steps": 1,
    "log.report": False,
    "log.tensorboard": False,
    "total_steps": 1,
}
SMOKE_EXAMPLES = {
    "examples_per_step": 4,
    "compute.scan_unroll": 1,
    "optimizer.warmup_steps": 1,
    "packing.rows_per_microbatch": 4,
}
SMOKE_MODEL = SMOKE_EXAMPLES | {
    "total_steps": 1,
    "architecture.layers": 1,
    "architecture.embed": 16,
    "architecture.heads": 2,
    "architecture.kv_heads": 1,
    "architecture.head_dim": 8,
    "architecture.mlp": 16,
}
ARMS = {"dapo": ("dapo", {}), "distilled": ("on_policy_distillation", {}), "both": ("dapo", BOTH)}


def flags(settings: dict) -> list[str]:
    """Return settings as command-line arguments."""
    return [f"--config.{name}={str(value).lower()}" for name, value in settings.items()]


def made(folder: pathlib.Path, settings: dict, *given: str) -> pathlib.Path:
    """Return a model folder of supervised training; train it if it is missing."""
    if not folder.exists():
        given = given or (f"--config={BASE}",)
        family.python("sft", *given, f"--config.out={folder}", *flags(settings))
    return folder


def reinforced(root: pathlib.Path, arm: str, settings: dict, extra: list[str]) -> list[dict]:
    """Return the rows of an arm's run, each with all tokens sampled so far."""
    preset, own = ARMS[arm]
    folder, models = root / arm, {"model.folder": root / "student"}
    if arm != "dapo":
        models["teacher.folder"] = root / "teacher"
    if not (folder / "summary.json").exists():
        given = models | own | settings | {"run_dir": folder}
        family.python("train", f"--config={RL}:{preset}", *flags(given), *extra)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = (row.get("sampled_tokens_per_second", 0) for row in rows)
    drawn = (speed * row.get("seconds_rollout", 0) for speed, row in zip(speeds, rows, strict=True))
    return [row | {"tokens": n} for row, n in zip(rows, itertools.accumulate(drawn), strict=True)]


def at_budget(rows: list[dict], budget: float) -> dict:
    """Return the last evaluated row within a number of sampled tokens."""
    return [row for row in rows if "heldout_accuracy" in row and row["tokens"] <= budget][-1]


def write_samples(path: pathlib.Path, teacher: pathlib.Path, budget: float) -> int:
    """Write responses of the teacher up to a number of tokens; return the number written."""
    import dapo_jax
    from dapo_jax.data.arithmetic import make_problem

    count = max(1, int(budget / MEAN_TOKENS))
    prompts = [make_problem("train", 3, i, 3, 8).text for i in range(count)]
    answers = dapo_jax.sample(str(teacher), prompts, max_prompt_tokens=16, max_response_tokens=64)
    lines, tokens = [], 0
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        tokens += len(answer)
        if tokens > budget:
            break
        if answer.text and not answer.truncated:
            lines.append(json.dumps({"prompt": prompt, "response": answer.text}))
    path.write_text("\n".join(lines) + "\n")
    return tokens


def imitated(root: pathlib.Path, budget: float, settings: dict, few: dict) -> float:
    """Return the held-out accuracy after supervised training on samples of the teacher."""
    samples = root / "samples.jsonl"
    if not samples.exists():
        write_samples(samples, root / "teacher", budget)
    given = {"start": root / "student", "data.source": samples, "data.passes": 2.0}
    given |= {"optimizer.learning_rate": 5e-4, "packing.row_tokens": 160, "examples_per_step": 64}
    folder = made(root / "imitated", given | few, "--config.seed=4")
    return evaluated(folder, root / "imitated_scores", settings)


def evaluated(folder: pathlib.Path, scores: pathlib.Path, settings: dict) -> float:
    """Return the held-out accuracy of a model folder."""
    kept = scores.with_suffix(".json")
    if not kept.exists():
        wanted = {name: v for name, v in settings.items() if name.startswith(("data.", "eval"))}
        given = f"--config={RL}", f"--model={folder}", *flags({"run_dir": scores} | wanted)
        kept.write_text(family.python("evaluate", *given).splitlines()[-1])
    return json.loads(kept.read_text())["heldout_accuracy"]


def main() -> None:
    options, extra = read_arguments(
        __doc__, others=True, folder=pathlib.Path("runs/distil"), smoke=False
    )
    root = options.folder
    settings = {"total_steps": STEPS, "evaluation.every_steps": STEPS // EVALUATIONS}
    model, examples = {}, {}
    if options.smoke:
        settings, model, examples = SMOKE, SMOKE_MODEL, SMOKE_EXAMPLES
        family.python = family.here
    root.mkdir(parents=True, exist_ok=True)
    made(root / "teacher", TEACHER | model)
    made(root / "student", STUDENT | model)
    runs = {arm: reinforced(root, arm, settings, extra) for arm in ARMS}
    budget = min(rows[-1]["tokens"] for rows in runs.values())
    print(f"{budget:,.0f} sampled tokens\n\n| arm | held-out accuracy |\n|---|---|")
    for name in ("teacher", "student"):
        accuracy = evaluated(root / name, root / f"{name}_scores", settings)
        print(f"| {name}, as it is | {accuracy:.3f} |")
    for arm, rows in runs.items():
        print(f"| {arm} | {at_budget(rows, budget)['heldout_accuracy']:.3f} |")
    print(f"| imitated | {imitated(root, budget, settings, examples):.3f} |")


if __name__ == "__main__":
    main()
