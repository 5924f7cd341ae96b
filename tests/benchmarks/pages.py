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
import numpy as np

from dapo_jax.commands.plan.cost_model import Costs
from dapo_jax.commands.plan.simulate import Simulation
from dapo_jax.commands.plan.simulated_engine import named_mesh
from dapo_jax.commands.plan.workload import AssumedWorkload
from dapo_jax.config.experiment import Config, Data, Mesh, Rollout, Sampler
from dapo_jax.model.decoder import DecoderConfig

GIB = 2**30
BANDWIDTHS = {"v5p": 2.5e12, "v6e": 1.5e12}  # bytes a second that programs reach (assumed)
TRAINING_EFFICIENCY = 0.4  # fraction of the peak that prefill reaches (assumed)
SHAPE = DecoderConfig(  # only the cache's shape counts
    vocab=2, layers=1, embed=128, heads=8, kv_heads=8, head_dim=128, mlp=1, dtype=jnp.bfloat16
)


def rule_of_thumb(args: argparse.Namespace, slots: int) -> Costs:
    """Return costs of decoding from a chip's speed.

    A decode step reads the weights (2 bytes each), or multiplies all slots by them if that takes
    longer, and then the cache. A prefilled token takes 2 operations per parameter.
    """
    bandwidth, flops = BANDWIDTHS[args.chip], args.teraflops * 1e12
    weights = 2 * args.parameters * 1e9 / args.tensor  # bytes on a chip, operations per token
    return Costs(
        load=weights / bandwidth,
        prefill_token=weights / (TRAINING_EFFICIENCY * flops),
        decode_step=args.overhead / 1e3 + max(weights / bandwidth, slots * weights / flops),
        read_token=args.token_bytes / args.tensor / bandwidth,
    )


def serve(args: argparse.Namespace, law: AssumedWorkload, **cache: Any) -> dict[str, Any]:
    """Sample all responses with a cache of `slots` and `pages` per replica."""
    replicas, slots = args.replicas, cache["slots"]
    config = Config(
        data=Data(max_prompt_tokens=args.max_prompt),
        rollout=Rollout(samples_per_prompt=args.group),
        sampler=Sampler(
            slots=slots * replicas,
            burst_tokens=args.burst,
            max_response_tokens=args.max_response,
            first_window_tokens=args.max_prompt + args.max_response,
            cache="paged" if "pages" in cache else "slots",
            pages=cache.get("pages", 0) * replicas,
            page_tokens=args.page_tokens,
        ),
    )
    costs = rule_of_thumb(args, slots)
    mesh = named_mesh(Mesh(fsdp=replicas, tensor=args.tensor), "tpu", replicas * args.tensor)
    simulation = Simulation(config, SHAPE, mesh, law, costs, reads=cache["reads"])
    step = simulation.sample(args.responses // args.group)
    return {
        "side_by_side_mean": round(step.sampled.occupancy * slots, 1),
        "side_by_side_most": max(burst.running for burst in step.bursts) // replicas,
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
        overhead=1.5,  # of a decode step, in ms
        teraflops=np.inf,  # of a chip; inf: only memory counts
        parameters=32.76,  # billions
        token_bytes=64 * 2 * 8 * 128 * 2,  # of all heads
        tensor=4,  # chips of a replica
        replicas=1,
        page_tokens=128,
        slots=[128, 192, 244, 320],
        burst=64,
        responses=2048,  # of all replicas
        group=16,
        median=2900.0,
        spread=0.9,
        prompt_median=150.0,
        max_prompt=2048,
        max_response=20_480,
        seed=0,
    )
    law = AssumedWorkload(
        args.median,
        args.spread,
        args.max_response,
        prompt_median_tokens=args.prompt_median,
        max_prompt_tokens=args.max_prompt,
        seed=args.seed,
    )
    tokens = int(args.gib * GIB * args.tensor // args.token_bytes)
    whole = tokens // (args.max_prompt + args.max_response)
    caches = [("slots", {"slots": whole}, "window"), ("ragged", {"slots": whole}, "existing")]
    pages = tokens // args.page_tokens
    caches += [("paged", {"slots": n, "pages": pages}, "auto") for n in args.slots]
    for name, sizes, reads in caches:
        print(
            json.dumps({"cache": name} | sizes | serve(args, law, reads=reads, **sizes)), flush=True
        )


if __name__ == "__main__":
    main()
