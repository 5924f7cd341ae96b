"""Measure router replay with a small mixture of experts on the embedded task.

    python tests/benchmarks/experts.py ratios --folder runs/experts
    python tests/benchmarks/experts.py learn --folder runs/experts --seeds 3

The base policy (8 experts, 2 per token) is trained if it is missing. `ratios` samples a step's
responses and prints the fraction of tokens for which trainer and sampler differ by more than 1 %,
with the trainer's experts and with the sampler's. `learn` trains a policy for each preset,
arithmetic, replay and seed; other arguments go to the commands. Finished runs are used again.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics

import jax
import numpy as np
from family import here, python

from dapo_jax.commands import checks
from dapo_jax.config.experiment import Config
from dapo_jax.config.files import read_config
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.model.experts import REPLACED
from dapo_jax.model.logprobs import hidden_states
from dapo_jax.rollout.sampling import SAMPLE_FOR_TRAINING
from dapo_jax.run.components import build
from dapo_jax.runtime.sharding import unbox
from dapo_jax.structs import SamplingRule

BASE, RL = "configs/arithmetic_base.py", "configs/arithmetic.py"
TOKENIZER = arithmetic_tokenizer()
SHAPE = DecoderConfig(
    vocab=TOKENIZER.padded_vocab,
    layers=3,
    embed=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp=128,
    rope_theta=100.0,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
    experts=8,
    experts_per_token=2,
    normalise_experts=True,
)
ARITHMETIC = {  # of the trainer, and of the sampler's weights
    "float32": ("float32", "auto"),
    "bfloat16": ("bfloat16", "auto"),
    "int8": ("float32", "int8"),
    "bfloat16_int8": ("bfloat16", "int8"),
}
OFF = 0.01


def base_policy(root: pathlib.Path, steps: int) -> pathlib.Path:
    """Return the folder of a trained policy with experts; train it if it is missing."""
    start, folder = root / "random", root / "base"
    if not folder.exists():
        params = unbox(init_params(SHAPE, jax.random.key(0)))
        save_huggingface.save_folder(start, params, SHAPE, TOKENIZER.end_ids)
        TOKENIZER.backend.save(str(start / "tokenizer.json"))
        made = f"--config.start={start}", f"--config.out={folder}", f"--config.total_steps={steps}"
        unused = "--config.architecture.rope_theta=10000"  # since the folder says its own
        warmup = f"--config.optimizer.warmup_steps={min(50, steps // 2)}"
        here("sft", f"--config={BASE}", *made, unused, warmup)
    return folder


def settings_of(arithmetic: str) -> list[str]:
    """Return the command-line settings of an arithmetic."""
    dtype, weights = ARITHMETIC[arithmetic]
    return [f"--config.compute.dtype={dtype}", f"--config.sampler.weights_dtype={weights}"]


def compare_ratios(config: Config, prompts: int) -> dict[str, float]:
    """Return the fractions of tokens with a wrong ratio, without and with the sampler's routes.

    `replaced` is the fraction of the sampler's experts that the trainer would not choose.
    """
    config.algorithm.router_replay = "sampler"
    checks.check(config)
    components = build(config)
    sampler, learner, params = (
        components.sampler,
        components.learners.policy,
        components.first_params(),
    )
    asked = [p for p in itertools.islice(components.prompts, prompts) if p is not None]
    sampler.begin(params, purpose=SAMPLE_FOR_TRAINING, step=0, rule=SamplingRule())
    for prompt in asked:
        sampler.submit(prompt, config.rollout.samples_per_prompt)
    segments = []
    while not sampler.idle:
        for prompt, group in sampler.decode_burst():
            segments += [Segment(prompt, done, len(segments) + i) for i, done in enumerate(group)]
    components.close()
    packing = config.packing
    rows, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
    drawn, found = rows.response_index >= 0, {}
    for name, taken in ("without", rows.replace(routes=None)), ("with", rows):
        logprobs = np.asarray(learner.score(params, taken, used).values)
        off = np.abs(np.expm1(logprobs - rows.sampler_logprobs))[drawn]
        found |= {name: float((off > OFF).mean()), f"{name}_mean": float(off.mean())}
    seen = jax.jit(functools.partial(hidden_states, config=components.decoder, record=[REPLACED]))
    each = []
    for m in range(used):
        one = jax.tree.map(lambda x, m=m: x[m], rows)
        arrays = {"tokens": one.tokens, "segment_ids": one.segment_ids, "positions": one.positions}
        _, records = seen(params, **arrays, routes=one.routes)
        each.append(np.asarray(records.replaced).mean(axis=0)[one.response_index >= 0])
    return found | {"replaced": float(np.concatenate(each).mean()), "tokens": int(drawn.sum())}


def learn(base: pathlib.Path, name: str, seed: int, preset: str, extra: list[str]) -> dict:
    """Return the first and last metrics of a run; run it if it is missing."""
    folder = base.parent / f"{name}_{seed}"
    if not (folder / "summary.json").exists():
        where = f"--config.model.folder={base}", f"--config.run_dir={folder}"
        python("train", f"--config={RL}:{preset}", f"--config.seed={seed}", *where, *extra)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"before": rows[0], "after": rows[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["ratios", "learn"])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/experts"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32, help="for ratios")
    parser.add_argument("--base_steps", type=int, default=800)
    parser.add_argument("--presets", nargs="+", default=["dapo", "gspo"])
    parser.add_argument("--replay", nargs="+", default=["none", "sampler"])
    parser.add_argument("--arithmetic", nargs="+", default=list(ARITHMETIC), choices=ARITHMETIC)
    options, extra = parser.parse_known_args()
    base, seeds = base_policy(options.folder, options.base_steps), range(options.seeds)
    if options.what == "ratios":
        print("| arithmetic | experts replaced | tokens off | with replay | mean | with replay |")
        print("|---|---|---|---|---|---|")
        for name in options.arithmetic:
            config = read_config(Config, RL)
            dtype, weights = ARITHMETIC[name]
            config.compute = dataclasses.replace(config.compute, dtype=dtype)
            config.sampler = dataclasses.replace(config.sampler, weights_dtype=weights)
            config.model.folder = str(base)
            found = compare_ratios(config, options.prompts)
            shares = (f"{100 * found[key]:.2f} %" for key in ("replaced", "without", "with"))
            means = (f"{found[key]:.5f}" for key in ("without_mean", "with_mean"))
            print(f"| {name} |", " | ".join([*shares, *means]), "|", flush=True)
        return
    print("| preset | arithmetic | replay | before | after | kl_sampler_trainer |")
    print("|---|---|---|---|---|---|")
    for preset, name, replay in itertools.product(
        options.presets, options.arithmetic, options.replay
    ):
        changed = [*settings_of(name), f"--config.algorithm.router_replay={replay}", *extra]
        runs = [learn(base, f"{preset}_{name}_{replay}", s, preset, changed) for s in seeds]
        before = statistics.mean(run["before"]["heldout_accuracy"] for run in runs)
        each = [run["after"]["heldout_accuracy"] for run in runs]
        kl = statistics.mean(run["after"]["kl_sampler_trainer"] for run in runs)
        scores = " ".join(f"{score:.3f}" for score in each)
        after = f"**{statistics.mean(each):.3f}** ({scores})"
        print(f"| `{preset}` | {name} | {replay} | {before:.3f} | {after} | {kl:.5f} |", flush=True)


if __name__ == "__main__":
    main()
