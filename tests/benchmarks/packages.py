"""Packages of verifiers, unmodified: a small policy before and after training by their rewards.

    python tests/benchmarks/packages.py --package FOLDER/reverse_text
    python tests/benchmarks/packages.py --package FOLDER/alphabet_sort

An installed package needs no FOLDER/. Both packages load a data set from the hub; here folders of
the same names have generated rows: digits to reverse, and names to sort, one in each of two turns.
A supervised start comes first, on other tasks; half of its answers are in the reverse order.
Needs `pip install verifiers datasets`.
"""

import json
import os
import pathlib
import random
from typing import Any

import bench
import judged
from tokenizers import Regex, pre_tokenizers

from dapo_jax.extras.environments.verifiers_tasks import read_tasks

FIRST = "Anna Bob Carl Dora Eve Fred"
LAST = "Green Hill Irwin Jones King Lee"
# A digit, a tag and either half of a name are a token; so is any text between these.
PIECES = r"\d|\n|, |</?[a-z_]+>|[A-Z][a-z]+(?=[A-Z])|(?<=[a-z])[A-Z][a-z]+"
DATA = {
    "reverse_text": "PrimeIntellect/Reverse-Text-RL",
    "alphabet_sort": "kalomaze/alphabetic-arxiv-authors-it1",
}
SETTINGS = {
    "alphabet_sort": '?{"taskset": {"min_turns": 2, "max_turns": 2, "max_names_per_turn": 1}}'
}
MISTAKES = 0.5  # share of the examples' answers in the reverse of the right order
SFT = (
    "examples_per_step=32 data.passes=1 data.heldout_examples=16 packing.row_tokens=256 "
    "packing.rows_per_microbatch=8 optimizer.learning_rate=5e-3 optimizer.schedule=linear"
)
TRAIN = (
    "data.template=chat data.train_problems=800 data.heldout_problems=128 "
    "data.max_prompt_tokens=64 environment.max_turns=3 environment.max_observation_tokens=64 "
    "environment.step_seconds=60 environment.workers=1 reward.parts=environment=1 "
    "reward.correct=threshold reward.threshold=1 rollout.prompts_per_step=16 "
    "rollout.samples_per_prompt=8 rollout.max_sample_rounds=2 rollout.updates_per_rollout=4 "
    "sampler.slots=128 sampler.max_response_tokens=128 algorithm.overlong_punishment=false "
    "optimizer.learning_rate=4e-4 packing.row_tokens=256 evaluation.samples_per_problem=2 "
    "checkpoint.every_steps=0 log.report=false"
)


def make_row(index: int) -> dict[str, Any]:
    """Return a row with the columns of both data sets."""
    rng = random.Random(index)
    names = [rng.choice(FIRST.split()) + rng.choice(LAST.split()) for _ in range(6)]
    return {"prompt": "".join(rng.choices("0123456789", k=rng.randint(3, 6))), "names": names}


def solve(task: dict[str, Any]) -> list[dict[str, str]]:
    """Return a conversation of a task, in which some answers are wrong."""
    users, answers = [task["prompt"]], [("reversed_text", "", [*task.get("answer", "")])]
    if "info" in task:
        users, (first, second) = task["info"]["user_turns"], task["info"]["ground_truths"]
        answers = [("alphabetical_sorted", "\n", first)]
        answers += [("combined_alphabetical_sorted", "\n", second)]
    system = task["system_prompt"]
    messages = [{"role": "system", "content": system}] if system else []
    for user, (tag, between, items) in zip(users, answers, strict=True):
        if random.random() < MISTAKES:
            items.reverse()
        content = between.join([f"<{tag}>", *items, f"</{tag}>"])
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": content}]
    return messages


def main() -> None:
    options, extra = bench.read_arguments(
        __doc__,
        others=True,
        package="reverse_text",
        folder=pathlib.Path("runs/packages"),
        examples=24000,
        steps=32,
    )
    random.seed(0)
    *folder, package = options.package.rsplit("/", 1)
    root = options.folder.absolute() / package
    source = "/".join([*map(os.path.abspath, folder), package]) + SETTINGS.get(package, "")
    name = f"verifiers:{source}"
    tasks = {"solved": range(options.examples), "tasks": range(1000, 0, -1)}
    for part, rows in tasks.items():
        file = root / part / DATA[package] / "train.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(make_row(index)) + "\n" for index in rows))
    read = {}
    for part in tasks:
        os.chdir(root / part)  # where the library looks for the data set
        read[part] = read_tasks("package", name, len(tasks[part]))
    # The rows of tasks are among those of the start, and other rows may be equal: none is solved.
    trained = {task.text for task in read["tasks"]}
    solved = [json.loads(task.metadata) for task in read["solved"] if task.text not in trained]
    rows = [{"messages": solve(task)} for task in solved]
    examples = root / "solved.jsonl"
    examples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pieces = pre_tokenizers.Split(Regex(PIECES), "isolated")
    judged.write_start(root / "start", rows, pieces)
    given = bench.flags(f"start={root / 'start'} data.source={examples} {SFT}")
    base = bench.sft(root / "base", *given)
    often = f"total_steps={options.steps} evaluation.every_steps={-(-options.steps // 2)}"
    given = bench.flags(f"{TRAIN} {often} run_dir={root / 'run'} model.folder={base}")
    given += [f"--config.{field}={name}" for field in ("data.source", "environment.name")]
    bench.command("train", "arithmetic", *given, *extra)
    bench.print_table(["step", "fully right", "95 %", "mean reward", "95 %"])
    for line in (root / "run/metrics.jsonl").read_text().splitlines():
        row, cells = json.loads(line), []
        for kind in ("accuracy", "reward"):
            names = (f"heldout_{kind}{end}" for end in ("", "_low", "_high"))
            mean, low, high = (f"{row.get(name, 0):.3f}" for name in names)
            cells += [mean, f"{low} to {high}"]
        if "heldout_accuracy" in row:
            bench.print_row([row["step"], *cells])


if __name__ == "__main__":
    main()
