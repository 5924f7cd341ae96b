"""A policy over bytes that learns to write programs, by their tests alone.

    python tests/benchmarks/programs.py --folder runs/programs

A supervised run on worked programs, of which half have a wrong number, then reinforcement by
`reward.verifier=code`, whose sandbox needs bubblewrap. Held-out programs are in neither.
"""

import dataclasses
import itertools
import json
import pathlib
import random

import bench

from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import init_params

NUMBERS = range(10)
INPUTS = 0, 1, 7
TRAIN = (
    "data.template=none data.max_prompt_tokens=8 data.heldout_problems=-1 reward.verifier=code "
    "sampler.max_response_tokens=44 sampler.slots=64 rollout.prompts_per_step=8 "
    "rollout.samples_per_prompt=8 rollout.updates_per_rollout=1 optimizer.learning_rate=1e-3 "
    "optimizer.warmup_steps=1 evaluation.samples_per_problem=4 packing.row_tokens=128 "
    "checkpoint.every_steps=0 log.report=false compute.scan_unroll=2"
)
SFT = (
    "data.heldout_examples=16 examples_per_step=32 packing.row_tokens=128 "
    "optimizer.learning_rate=3e-3 optimizer.schedule=linear optimizer.warmup_steps=10 "
    "packing.rows_per_microbatch=16"
)


def program(factor: int, added: int) -> str:
    return f"```\ndef f(x): return {factor}*x+{added}\n```"


def write(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> None:
    import served

    options, extra = bench.read_arguments(
        __doc__, others=True, folder=pathlib.Path("runs/programs"), sft_steps=200, steps=24
    )
    root = options.folder
    root.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    pairs = list(itertools.product(NUMBERS, NUMBERS))
    random.shuffle(pairs)
    rows = []
    for factor, added in pairs:
        outputs = [factor * x + added for x in INPUTS]
        tests = {"fn_name": "f", "inputs": [[x] for x in INPUTS], "outputs": outputs}
        rows.append({"problem": f"{factor},{added}\n", "tests": tests})
    training, heldout = (
        write(root / "train.jsonl", rows[40:]),
        write(root / "test.jsonl", rows[:40]),
    )
    examples = []
    for factor, added in random.choices(pairs[40:], k=32 * options.sft_steps):
        written = random.choice([added, random.choice(NUMBERS)])
        examples.append({"prompt": f"{factor},{added}\n", "response": program(factor, written)})
    start = root / "start"
    if not start.exists():
        decoder = dataclasses.replace(served.BYTES_DECODER, embed=64, mlp=128, head_dim=16)
        params = served.nn.unbox(init_params(decoder, served.jax.random.key(0)))
        save_huggingface.save_folder(start, params, decoder, served.TOKENIZER.end_ids)
        served.TOKENIZER.backend.save(str(start / "tokenizer.json"))
    source = f"start={start} data.source={write(root / 'examples.jsonl', examples)}"
    settings = bench.flags(f"{source} {SFT} total_steps={options.sft_steps}")
    base = bench.sft(root / "base", *settings)
    data = f"model.folder={base} data.source={training} data.heldout_source={heldout}"
    often = f"total_steps={options.steps} evaluation.every_steps={options.steps // 2}"
    given = bench.flags(f"{data} {TRAIN} {often}")
    bench.print_table(["step", "held-out programs that pass", "95 %"])
    for row in bench.train(root / "run", "dapo", *given, *extra):
        if "heldout_accuracy" in row:
            ends = (f"{row[f'heldout_accuracy_{end}']:.3f}" for end in ("low", "high"))
            bench.print_row([row["step"], f"{row['heldout_accuracy']:.3f}", " to ".join(ends)])


if __name__ == "__main__":
    main()
