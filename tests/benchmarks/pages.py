"""How many responses decode at once in a given memory, and how long that takes.

    python tests/benchmarks/pages.py --gib=71.6 --slots 128 192 244 320
    python tests/benchmarks/pages.py --chip v5p --replicas 16 --responses 16384 --slots 244
    python tests/benchmarks/pages.py --chip v6e --replicas 32 --responses 16384 --slots 135 \\
        --gib 19.55 --tensor 8

Lengths are log-normal, cut off at the limit. Every cache serves the same responses, in groups, with
the sampler's own schedule and page table; no model runs. Attention reads slots whole or, with a
kernel for it, as far as they are filled ('ragged'); it reads pages as far as they are filled.
Prints a JSON line per cache. The default sizes are those of Qwen2.5-32B.
"""

import argparse
import json
from typing import Any

import bench
import jax.numpy as jnp

from dapo_jax.commands.plan.simulate import Costs, Simulation, named_mesh
from dapo_jax.commands.plan.workload import AssumedWorkload
from dapo_jax.config.experiment import Config, Data, Mesh, Rollout, Sampler
from dapo_jax.model.decoder import DecoderConfig

GIB = 2**30
BANDWIDTHS = {"v5p": 2.5e12, "v6e": 1.5e12}  # bytes a second that programs reach (assumed)
PARAMETERS = 32.76e9
TOKEN_BYTES = 64 * 2 * 8 * 128 * 2  # of all heads
OVERHEAD_SECONDS = 1.5e-3  # of a decode step
GROUP, PAGE_TOKENS = 16, 128
SHAPE = DecoderConfig(  # only the cache's shape counts
    vocab=2, layers=1, embed=128, heads=8, kv_heads=8, head_dim=128, mlp=1, dtype=jnp.bfloat16
)


def rule_of_thumb(args: argparse.Namespace) -> Costs:
    """Return costs of decoding from a chip's speed.

    Only memory counts: a decode step reads the weights (2 bytes each) and then the cache.
    """
    bandwidth = BANDWIDTHS[args.chip]
    load = 2 * PARAMETERS / args.tensor / bandwidth
    read = TOKEN_BYTES / args.tensor / bandwidth
    return Costs(load=load, decode_step=OVERHEAD_SECONDS + load, read_token=read)


def serve(args: argparse.Namespace, slots: int, pages: int, reads: str) -> dict[str, Any]:
    """Sample all responses with a cache of `slots` and `pages` per replica; no pages: slots."""
    config = Config(
        data=Data(max_prompt_tokens=args.max_prompt),
        rollout=Rollout(samples_per_prompt=GROUP),
        sampler=Sampler(
            slots=slots * args.replicas,
            burst_tokens=64,
            max_response_tokens=args.max_response,
            first_window_tokens=args.max_prompt + args.max_response,
            cache="paged" if pages else "slots",
            pages=pages * args.replicas,
            page_tokens=PAGE_TOKENS,
        ),
    )
    law = AssumedWorkload(
        args.median,
        0.9,
        args.max_response,
        prompt_median_tokens=150.0,
        max_prompt_tokens=args.max_prompt,
    )
    chips = args.replicas * args.tensor
    mesh = named_mesh(Mesh(fsdp=args.replicas, tensor=args.tensor), "tpu", chips)
    simulation = Simulation(config, SHAPE, mesh, law, rule_of_thumb(args), reads=reads)
    step = simulation.sample(args.responses // GROUP)
    return {
        "side_by_side_mean": round(step.sampled.occupancy * slots, 1),
        "side_by_side_most": max(burst.running for burst in step.bursts) // args.replicas,
        "decode_steps": int(step.counts["decode_step"]),
        "redrawn_share": round(step.sampled.put_back_tokens / step.sampled.tokens, 4),
        "seconds": round(step.rollout_seconds),
        "tail_seconds": round(step.tail_seconds),
        "utilisation": round(step.utilisation, 3),
        "mean_tokens": round(step.sampled.tokens / step.sampled.responses),
    }


def main() -> None:
    args = bench.read_arguments(
        __doc__,
        gib=71.6,  # of a chip for the cache
        chip="v5p",
        tensor=4,  # chips of a replica
        replicas=1,
        slots=[128, 192, 244, 320],
        responses=2048,  # of all replicas
        median=2900.0,
        max_prompt=2048,
        max_response=20_480,
    )
    tokens = int(args.gib * GIB * args.tensor // TOKEN_BYTES)
    whole = tokens // (args.max_prompt + args.max_response)
    caches = [("slots", whole, 0, "window"), ("ragged", whole, 0, "existing")]
    caches += [("paged", slots, tokens // PAGE_TOKENS, "auto") for slots in args.slots]
    for name, slots, pages, reads in caches:
        line = {"cache": name, "slots": slots, "pages": pages}
        print(json.dumps(line | serve(args, slots, pages, reads)), flush=True)


if __name__ == "__main__":
    main()
