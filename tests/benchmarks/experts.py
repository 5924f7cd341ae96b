"""Measure the probability ratios of a small mixture of experts, with and without router replay.

    python tests/benchmarks/experts.py --folder runs/experts

The base policy (8 experts, 2 per token) is trained on the embedded task if it is missing. A row has
the fraction of tokens of a step for which trainer and sampler differ by more than 1 %, with the
trainer's experts and with the sampler's. What replay changes in training: `family.py --base
runs/experts/base --vary algorithm.router_replay=none,sampler`.
"""

import functools
import itertools
import pathlib

import bench
import jax
import numpy as np

from dapo_jax.commands import checks
from dapo_jax.config.experiment import Config
from dapo_jax.config.files import read_config
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.model import save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.model.experts import REPLACED
from dapo_jax.model.logprobs import hidden_states
from dapo_jax.run.components import build
from dapo_jax.runtime.sharding import unbox

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
MAX_DIFFERENCE = 0.01


def base_policy(root: pathlib.Path, steps: int, unroll: int) -> pathlib.Path:
    """Return the folder of a policy with experts; train it if it is missing and has steps."""
    start = root / "random"
    if not start.exists():
        params = unbox(init_params(SHAPE, jax.random.key(0)))
        save_huggingface.save_folder(start, params, SHAPE, TOKENIZER.end_ids)
        TOKENIZER.backend.save(str(start / "tokenizer.json"))
    if not steps:
        return start
    given = f"start={start} total_steps={steps} optimizer.warmup_steps={min(50, steps // 2)} "
    given += f"compute.scan_unroll={unroll} "
    given += "architecture.rope_theta=10000"  # unused: the folder has its own
    return bench.sft(root / "base", f"--config={bench.BASE}", *bench.flags(given))


def compare_ratios(config: Config, prompts: int) -> dict[str, float]:
    """Return the fractions of tokens with a wrong ratio, without and with the sampler's routes.

    `replaced` is the fraction of the sampler's experts that the trainer would not choose.
    """
    config.algorithm.router_replay = "sampler"
    checks.check(config)
    components = build(config)
    learner = components.learners.policy
    params = components.first_params()
    asked = itertools.islice(components.prompts, prompts)
    samples = config.rollout.samples_per_prompt
    groups = bench.sample(components.sampler, params, asked, samples)
    pairs = [(prompt, done) for prompt, group in groups for done in group]
    segments = [Segment(prompt, done, i) for i, (prompt, done) in enumerate(pairs)]
    components.close()
    rows, used = pack(segments, config.packing.row_tokens, config.packing.rows_per_microbatch)
    drawn, figures = rows.response_index >= 0, {}
    for name, taken in (("without", rows.replace(routes=None)), ("with", rows)):
        logprobs = np.asarray(learner.score(params, taken, used).values)
        off = np.abs(np.expm1(logprobs - rows.sampler_logprobs))[drawn]
        figures[name] = float((off > MAX_DIFFERENCE).mean())
        figures[f"{name}_mean"] = float(off.mean())
    states = jax.jit(functools.partial(hidden_states, config=components.decoder, record=[REPLACED]))
    replaced = []
    for m in range(used):
        part = jax.tree.map(lambda x, m=m: x[m], rows)
        _, records = states(params, rows=part.inputs._replace(routes=part.routes))
        replaced.append(np.asarray(records.replaced).mean(axis=0)[part.response_index >= 0])
    return figures | {"replaced": float(np.concatenate(replaced).mean())}


def main() -> None:
    options = bench.read_arguments(
        __doc__,
        folder=pathlib.Path("runs/experts"),
        prompts=32,
        base_steps=800,
        unroll=3,
        arithmetic=list(ARITHMETIC),
    )
    base = base_policy(options.folder, options.base_steps, options.unroll)
    heads = "arithmetic", "experts replaced", "tokens off", "with replay", "mean", "with replay"
    bench.print_table(heads)
    for name in options.arithmetic:
        config = read_config(Config, bench.RL)
        config.compute.dtype, config.sampler.weights_dtype = ARITHMETIC[name]
        config.compute.scan_unroll = options.unroll
        config.model.folder = str(base)
        figures = compare_ratios(config, options.prompts)
        shares = [f"{100 * figures[key]:.2f} %" for key in ("replaced", "without", "with")]
        means = [f"{figures[key]:.5f}" for key in ("without_mean", "with_mean")]
        bench.print_row([name, *shares, *means])


if __name__ == "__main__":
    main()
