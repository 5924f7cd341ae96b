"""What the sampler's schedule and packing make of lengths, simulated: no model runs.

    python tests/benchmarks/schedules.py pages --gib=71.6 --slots 128 192 244 320
    python tests/benchmarks/schedules.py pages --replicas 16 --responses 16384 --slots 244
    python tests/benchmarks/schedules.py price --prompts 512 --samples 16 --slots 4096 --steps 4
    python tests/benchmarks/schedules.py fill

- pages: how many responses decode at once in a given memory, and how long that takes; a JSON line
  per cache. Every cache serves the same responses, of log-normal lengths cut off at the limit, in
  groups, with the sampler's own schedule and page table. Attention reads slots whole or, with a
  kernel for it, as far as they are filled ('ragged'); it reads pages as far as they are filled.
  The default sizes are those of Qwen2.5-32B.
- price: sampled tokens per trained token with dynamic sampling. Accuracy is Beta-distributed.
  `ideal` samples only the groups up to the last used one of the run without carry-over. `rounds`
  samples whole rounds of three batches until one is full as DAPO's released recipe does. Its ratio
  is to the ideal for its own groups.
- fill: fill of packed rows, fixed and with `packing.row_tokens=auto`, of 1,024 responses of at most
  512 tokens to prompts of 32, eight updates of 128, on eight devices; fixed rows have 544 tokens.
"""

import argparse
import json
import sys
from typing import Any, NamedTuple

import bench
import jax.numpy as jnp
import numpy as np
from named_meshes import named_mesh

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Data, Mesh, Packing, Rollout, Sampler
from dapo_jax.extras.plan.simulate import Costs, Simulation, Step
from dapo_jax.extras.plan.workload import AssumedWorkload, beta_from_kept
from dapo_jax.learner.packing import Segment, choose_rows, fill, pack_updates, row_shapes
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.types.structs import Completion, Prompt

SHAPE = DecoderConfig(  # only the cache's shape counts
    vocab=2, layers=1, embed=128, heads=8, kv_heads=8, head_dim=128, mlp=1, dtype=jnp.bfloat16
)
# --- pages ---
GIB = 2**30
BANDWIDTHS = {"v5p": 2.5e12, "v6e": 1.5e12}  # bytes a second that programs reach (assumed)
PARAMETERS = 32.76e9
TOKEN_BYTES = 64 * 2 * 8 * 128 * 2  # of all heads
OVERHEAD_SECONDS = 1.5e-3  # of a decode step
GROUP, PAGE_TOKENS = 16, 128
# --- price ---
ROUND = 3  # batches; 1,536 prompts for 512
FIRST_STEPS = 4  # until the estimate of the kept fraction has settled
LENGTHS = 30.0, 0.7, 256  # median, spread of the logarithm, limit
KINDS = ("none", "unfinished", "all")
# --- fill ---
LIMIT, PROMPT_TOKENS, RESPONSES, UPDATES, DEVICES = 512, 32, 1024, 8, 8
SET = Packing(row_tokens=LIMIT + PROMPT_TOKENS, rows_per_microbatch=16, share_prompts=False)
ATTENTION_TOKENS = 7_000.0  # row length at which attention takes half of the time: Qwen2.5-0.5B


def serve(args: argparse.Namespace, slots: int, pages: int, platform: str) -> dict[str, Any]:
    """Sample all responses with a cache of `slots` and `pages` per replica; no pages: slots.

    Only memory's speed counts: a decode step reads the weights (2 bytes each) and then the cache.
    """
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
    prompts = {"prompt_median_tokens": 150.0, "max_prompt_tokens": args.max_prompt}
    law = AssumedWorkload(args.median, 0.9, args.max_response, **prompts)
    bandwidth = BANDWIDTHS[args.chip] * args.tensor
    load, read = 2 * PARAMETERS / bandwidth, TOKEN_BYTES / bandwidth
    costs = Costs(load=load, decode_step=OVERHEAD_SECONDS + load, read_token=read)
    chips = args.replicas * args.tensor
    mesh = named_mesh(Mesh(fsdp=args.replicas, tensor=args.tensor), platform, chips)
    simulation = Simulation(config, SHAPE, mesh, law, costs)
    step = simulation.sample(args.responses // GROUP)
    return {
        "side_by_side_mean": round(step.sampled.occupancy * slots, 1),
        "side_by_side_most": max(burst.running for burst in step.bursts) // args.replicas,
        "decode_steps": int(step.counts["decode_step"]),
        "redrawn_share": round(step.sampled.put_back_tokens / step.sampled.tokens, 4),
        "seconds": round(step.rollout_seconds),
        "tail_seconds": round(tail_seconds(step)),
        "utilisation": round(step.utilisation, 3),
        "mean_tokens": round(step.sampled.tokens / step.sampled.responses),
    }


def tail_seconds(step: Step) -> float:
    """Seconds of bursts with fewer than half of the slots busy, on average."""
    half = step.slots / 2
    return sum(b.seconds for b in step.bursts if b.busy_slot_steps < half * b.steps)


def show_pages() -> None:
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
    caches = [("slots", whole, 0, "tpu"), ("ragged", whole, 0, "cuda")]  # a GPU has a kernel for it
    caches += [("paged", slots, tokens // PAGE_TOKENS, "tpu") for slots in args.slots]
    for name, slots, pages, platform in caches:
        line = {"cache": name, "slots": slots, "pages": pages}
        print(json.dumps(line | serve(args, slots, pages, platform)), flush=True)


def fixed_rounds(law: AssumedWorkload, args: argparse.Namespace) -> tuple[float, float]:
    """Return tokens sampled in whole rounds per trained token, and per token of the ideal."""
    place = drawn = used = trained = 0
    for step in range(args.steps):
        kept = 0
        while kept < args.prompts:
            for _ in range(ROUND * args.prompts):
                group = law.draw(step, place, args.samples)
                place += 1
                tokens = int(group.tokens.sum())
                drawn += tokens
                if kept < args.prompts:
                    used += tokens
                    signal = 0 < group.correct.sum() < args.samples
                    kept, trained = kept + signal, trained + signal * tokens
    return drawn / trained, drawn / used


class Cost(NamedTuple):
    """Sampled tokens per trained token, of the run and of the ideal; decode steps per step."""

    drawn: float
    ideal: float
    decode_steps: float


def our_cost(law: AssumedWorkload, args: argparse.Namespace, kind: str) -> Cost:
    config = Config(
        algorithm=algorithms.dapo(),
        data=Data(max_prompt_tokens=law.max_prompt_tokens),
        rollout=Rollout(args.prompts, args.samples, carry_over=kind),
        sampler=Sampler(slots=args.slots, burst_tokens=8, max_response_tokens=LENGTHS[2]),
    )
    mesh = named_mesh(Mesh(fsdp=1), "cpu", 1)
    simulation = Simulation(config, SHAPE, mesh, law, Costs())
    drawn = used = trained = decoded = 0
    for number in range(FIRST_STEPS + args.steps):
        start, step = simulation.position, simulation.step()
        if number >= FIRST_STEPS:
            places = range(start, simulation.position)
            used += sum(int(law.draw(number, i, args.samples).tokens.sum()) for i in places)
            drawn, trained = drawn + step.drawn_tokens, trained + step.kept_tokens
            decoded += step.counts["decode_step"]
    return Cost(drawn / trained, used / trained, decoded / args.steps)


def show_price() -> None:
    args = bench.read_arguments(
        __doc__,
        prompts=32,  # groups of a step
        samples=16,
        slots=256,
        steps=48,
        kept=[0.2, 0.3, 0.4, 0.5],
    )
    bench.print_table(["kept", "ideal", "rounds", *KINDS])
    for kept in args.kept:
        prompts = {"prompt_median_tokens": 10, "max_prompt_tokens": 32}
        law = AssumedWorkload(*LENGTHS, **prompts, beta=beta_from_kept(0.8, kept, args.samples))
        rounds, against_ideal = fixed_rounds(law, args)
        costs = {kind: our_cost(law, args, kind) for kind in KINDS}
        ideal = costs["none"].ideal
        cells = [f"{rounds:.2f} ({against_ideal:.2f})"]
        cells += [f"{cost.drawn:.2f} ({cost.drawn / ideal:.2f})" for cost in costs.values()]
        bench.print_row([kept, f"{ideal:.2f}", *cells])
        steps = {f"{kind} steps": round(cost.decode_steps) for kind, cost in costs.items()}
        print(json.dumps({"kept": kept} | steps))


def split(lengths: np.ndarray) -> list[list[Segment]]:
    """Return the segments of each update."""
    prompt = Prompt(0, "0", "", np.ones(PROMPT_TOKENS, np.int32), "", "")
    segments = []
    for i, count in enumerate(np.clip(lengths, 1, LIMIT).astype(int)):
        tokens, logprobs = np.ones(count, np.int32), np.zeros(count, np.float32)
        segments.append(Segment(prompt, Completion(tokens, logprobs, False, 0, ""), i))
    size = RESPONSES // UPDATES
    return [segments[i : i + size] for i in range(0, RESPONSES, size)]


def show_fill() -> None:
    bench.read_arguments(__doc__)
    rng = np.random.default_rng(0)
    long_tailed = np.ceil(84 * np.exp(rng.normal(size=RESPONSES)))
    laws = {
        "long-tailed, mean a quarter of the limit": long_tailed,
        "any up to the limit": rng.integers(1, LIMIT + 1, RESPONSES),
        "any above half of it": rng.integers(LIMIT // 2, LIMIT + 1, RESPONSES),
        "near 0.6 of it": rng.normal(0.6 * LIMIT, 30, RESPONSES),
        "all at the limit": np.full(RESPONSES, LIMIT),
    }
    bench.print_table(["response lengths", "set", "auto", "its rows, a microbatch"])
    for name, lengths in laws.items():
        updates = split(lengths)
        chosen = choose_rows(updates, row_shapes(SET, DEVICES, 10**6), ATTENTION_TOKENS)
        shares = [fill(*pack_updates(updates, packing)) for packing in (SET, chosen)]
        shape = f"{chosen.rows_per_microbatch} of {chosen.row_tokens:,} tokens"
        bench.print_row([name, *(f"{share:.0%}" for share in shares), shape])


def main() -> None:
    tables = {"pages": show_pages, "price": show_price, "fill": show_fill}
    if not (sys.argv[1:2] and sys.argv[1] in tables):
        raise SystemExit(f"usage: schedules.py {'|'.join(tables)} [--help]")
    tables[sys.argv.pop(1)]()


if __name__ == "__main__":
    main()
