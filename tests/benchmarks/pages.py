"""How many responses decode side by side in a given memory, and how long that takes.

    python tests/benchmarks/pages.py --gib=71.6 --slots 128 192 244 320
    python tests/benchmarks/pages.py --chip v5p --replicas 16 --responses 16384 --slots 244
    python tests/benchmarks/pages.py --chip v6e --replicas 32 --responses 16384 --slots 135 \\
        --gib 19.55 --tensor 8

Lengths follow a long-tailed law (log-normal, cut off at the limit). Every cache serves the same
responses, in groups, by the sampler's own schedule and book of pages; no model runs. A cache of
slots is read whole or, were there a kernel for it, as far as it is filled ('ragged'); pages are
read as far as they are filled. Prints a JSON line per cache; the default sizes are Qwen2.5-32B's.
"""

import argparse
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
from rule_of_thumb import Speed, rule_of_thumb

from dapo_jax.commands.plan.simulate import Simulation
from dapo_jax.commands.plan.simulated_engine import named_mesh
from dapo_jax.commands.plan.workload import AssumedWorkload
from dapo_jax.config.experiment import Config, Data, Mesh, Rollout, Sampler
from dapo_jax.model.decoder import DecoderConfig

GIB = 2**30
# Terabytes a second, as far as programs reach them (assumed).
BANDWIDTHS = {"v5p": 2.5, "v6e": 1.5}
SHAPE = DecoderConfig(  # what the cache's shape depends on
    vocab=2, layers=1, embed=128, heads=8, kv_heads=8, head_dim=128, mlp=1, dtype=jnp.bfloat16
)


def serve(args: argparse.Namespace, law: AssumedWorkload, **cache: Any) -> dict[str, Any]:
    """All responses, through a cache of `slots` and `pages` a replica."""
    replicas, slots, limit = args.replicas, cache["slots"], args.max_prompt + args.max_response
    config = Config(
        data=Data(max_prompt_tokens=args.max_prompt),
        rollout=Rollout(samples_per_prompt=args.group),
        sampler=Sampler(
            slots=slots * replicas,
            burst_tokens=args.burst,
            max_response_tokens=args.max_response,
            first_window_tokens=limit,
            cache=cache["kind"],
            pages=cache.get("pages", 0) * replicas,
            page_tokens=args.page_tokens,
        ),
    )
    costs = rule_of_thumb(
        Speed(
            BANDWIDTHS[args.chip] * 1e12, args.teraflops * 1e12, step_seconds=args.overhead / 1e3
        ),
        parameters=args.parameters * 1e9,
        token_bytes=args.token_bytes,
        chips=replicas * args.tensor,
        replicas=replicas,
        slots=slots,
    )
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=71.6, help="a device has for the cache")
    parser.add_argument("--chip", choices=BANDWIDTHS, default="v5p")
    parser.add_argument("--overhead", type=float, default=1.5, help="of a decode step, in ms")
    parser.add_argument(
        "--teraflops", type=float, default=np.inf, help="of a chip; inf: memory alone counts"
    )
    parser.add_argument("--parameters", type=float, default=32.76, help="billions, in bfloat16")
    parser.add_argument("--token_bytes", type=int, default=64 * 2 * 8 * 128 * 2, help="all heads")
    parser.add_argument("--tensor", type=int, default=4, help="devices of a replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--page_tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 192, 244, 320])
    parser.add_argument("--burst", type=int, default=64)
    parser.add_argument("--responses", type=int, default=2048, help="of all replicas")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--median", type=float, default=2900.0)
    parser.add_argument("--spread", type=float, default=0.9)
    parser.add_argument("--prompt_median", type=float, default=150.0)
    parser.add_argument("--max_prompt", type=int, default=2048)
    parser.add_argument("--max_response", type=int, default=20_480)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    law = AssumedWorkload(
        args.median,
        args.spread,
        args.max_response,
        prompt_median_tokens=args.prompt_median,
        max_prompt_tokens=args.max_prompt,
        seed=args.seed,
    )
    room = int(args.gib * GIB * args.tensor // args.token_bytes)
    whole = room // (args.max_prompt + args.max_response)
    caches = [
        {"cache": name, "kind": "slots", "slots": whole, "reads": reads}
        for name, reads in (("slots", "window"), ("ragged", "existing"))
    ]
    caches += [
        {"cache": "paged", "kind": "paged", "slots": n, "reads": "auto"}
        | {"pages": room // args.page_tokens}
        for n in args.slots
    ]
    for cache in caches:
        told = {name: cache[name] for name in ("cache", "slots", "pages") if name in cache}
        print(json.dumps(told | serve(args, law, **cache)), flush=True)


if __name__ == "__main__":
    main()
