"""How far the log-probs of samplers are from those of the score pass: docs/samplers.md#exact.

python tests/benchmarks/exact.py               # 64 responses of `arithmetic`
python tests/benchmarks/exact.py --products    # products of both programs, compiled for v5e:1x1
"""

import collections
import functools
import sys
import time

import bench
import jax
import numpy as np
from hlo_arrays import ARRAY, LINE

from dapo_jax.config.experiment import Config
from dapo_jax.config.files import read_config
from dapo_jax.config.settings import assign_text
from dapo_jax.extras.exact import next_tokens
from dapo_jax.extras.plan.chips import parse
from dapo_jax.extras.plan.programs import Compiler, lay_out, training_programs
from dapo_jax.learner.minibatches import make_minibatches
from dapo_jax.learner.packing import tree_index
from dapo_jax.model.trainable import join
from dapo_jax.run.build import build
from dapo_jax.run.loop import first_state
from dapo_jax.runtime import sharding
from dapo_jax.types.structs import SamplingRule

SMALL = (
    "rollout.prompts_per_step=8 rollout.samples_per_prompt=8 rollout.updates_per_rollout=1 "
    "algorithm.dynamic_sampling=false sampler.slots=64 sampler.max_response_tokens=40 "
    "packing.row_tokens=64 packing.rows_per_microbatch=64 packing.single_responses=true"
)


def read(name: str, settings: str) -> Config:
    config = read_config(Config, name)
    for name in settings.split():
        assign_text(config, *name.split("=", 1))
    return config


def measure(engine: str, cache: str, dtype: str) -> None:
    """Print shares of equal log-probs and of those in MLPerf's band, and seconds of sampling."""
    settings = f"{SMALL} sampler.engine={engine} sampler.cache={cache} compute.dtype={dtype}"
    components = build(read("arithmetic", settings))
    trainer, state = components.trainer(), first_state(components)
    policy, params = trainer.programs.policy, state.learners.policy.params
    trainer.source.collect(state.source, params, 0)  # compiles
    started = time.perf_counter()
    groups = trainer.source.collect(state.source, params, 1)[1].groups
    seconds = time.perf_counter() - started
    batch = make_minibatches(components.config, groups, trainer.rows)
    rows = tree_index(batch.rollouts, 0)
    of_response = np.asarray(rows.response_index) >= 0
    scored = np.asarray(policy.score(params, rows, batch.microbatches[0]).values)[of_response]
    sampled = np.asarray(rows.sampler_logprobs)[of_response]
    ratios, largest = np.exp(scored - sampled), np.abs(scored - sampled).max()
    band = np.mean((ratios >= 0.999) & (ratios <= 1.002))
    shares = f"{np.mean(scored == sampled):.1%}", f"{band:.1%}", f"{largest:.1e}"
    bench.print_row([engine, cache, dtype, sampled.size, *shares, f"{seconds:.1f}"])
    components.close()


def compare_products() -> None:
    """Print the shapes and counts of matrix products that only one of both programs has."""
    config = read("qwen2p5_0p5b_gsm8k:v5e_1", "packing.single_responses=true")
    layout = lay_out(config, parse("v5e:1x1"))
    rows, policy = config.rows(), layout.learners.policy
    whole = jax.ShapeDtypeStruct((rows.rows_per_microbatch, rows.row_tokens), np.int32)
    each = jax.ShapeDtypeStruct(whole.shape[:1], np.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), each.shape[0]))
    compute = functools.partial(next_tokens, layout.decoder, config.compute.logprob_chunk_tokens)
    with sharding.activate(layout.mesh):
        params = join(policy.frozen, policy.abstract_state.params)
        arrays = params, whole, each, keys, each
        sampler = jax.jit(compute, static_argnames="rule").lower(*arrays, rule=SamplingRule())
    programs = {program.name: program for program in training_programs(layout, 1)}
    counts = []
    for lowered in (programs["score"].lower(), sampler):
        text = Compiler(layout, None).compiled(lowered).as_text() or ""
        lines = [match for line in text.splitlines() if (match := LINE.match(line))]
        found = [ARRAY.match(m[2])[0] for m in lines if m[3] in ("dot", "convolution")]
        counts.append(collections.Counter(found))
    score, own = counts
    print(f"score pass: {dict(score)}\nscore pass alone: {dict(score - own)}")
    print(f"exact sampler alone: {dict(own - score)}")


def main() -> None:
    if bench.read_arguments(__doc__, products=False).products:
        return compare_products()
    bench.print_table(
        ["engine", "cache", "dtype", "tokens", "equal", "in the band", "largest", "s"]
    )
    for dtype in ("float32", "bfloat16"):
        for engine, cache in (("own", "slots"), ("own", "paged"), ("exact", "slots")):
            measure(engine, cache, dtype)


if __name__ == "__main__":
    sys.exit(main())
