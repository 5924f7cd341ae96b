"""Sampled tokens per trained token with dynamic sampling, simulated.

    python tests/benchmarks/price.py
    python tests/benchmarks/price.py --prompts 512 --samples 16 --slots 4096 --steps 4

No model runs: the run's own schedule serves responses of log-normal length, with Beta-distributed
accuracy. `ideal` samples only the groups up to the last used one of the run without carry-over.
`rounds` samples whole rounds of three batches until one is full as DAPO's released recipe does. Its
ratio is to the ideal for its own groups.
"""

import argparse
import json
from typing import NamedTuple

import bench
from pages import SHAPE

from dapo_jax import algorithms
from dapo_jax.commands.plan.simulate import Costs, Simulation, named_mesh
from dapo_jax.commands.plan.workload import AssumedWorkload, beta_from_kept
from dapo_jax.config.experiment import Config, Data, Mesh, Rollout, Sampler

ROUND = 3  # batches; 1,536 prompts for 512
FIRST_STEPS = 4  # until the estimate of the kept fraction has settled
LENGTHS = 30.0, 0.7, 256  # median, spread of the logarithm, limit
KINDS = ("none", "unfinished", "all")


def fixed_rounds(
    law: AssumedWorkload, prompts: int, samples: int, steps: int
) -> tuple[float, float]:
    """Return tokens sampled in whole rounds per trained token, and per token of the ideal."""
    place = drawn = used = trained = 0
    for step in range(steps):
        kept = 0
        while kept < prompts:
            for _ in range(ROUND * prompts):
                group = law.draw(step, place, samples)
                place += 1
                tokens = int(group.tokens.sum())
                drawn += tokens
                if kept < prompts:
                    used += tokens
                    signal = 0 < group.correct.sum() < samples
                    kept, trained = kept + signal, trained + signal * tokens
    return drawn / trained, drawn / used


class Cost(NamedTuple):
    """Sampled tokens per trained token, of the run and of the ideal; decode steps per step."""

    drawn: float
    ideal: float
    decode_steps: float


def ours(law: AssumedWorkload, options: argparse.Namespace, kind: str) -> Cost:
    samples = options.samples
    config = Config(
        algorithm=algorithms.dapo(),
        data=Data(max_prompt_tokens=law.max_prompt_tokens),
        rollout=Rollout(options.prompts, samples, carry_over=kind),
        sampler=Sampler(slots=options.slots, burst_tokens=8, max_response_tokens=LENGTHS[2]),
    )
    mesh = named_mesh(Mesh(fsdp=1), "cpu", 1)
    simulation = Simulation(config, SHAPE, mesh, law, Costs())
    drawn = used = trained = decoded = 0
    for number in range(FIRST_STEPS + options.steps):
        start, step = simulation.position, simulation.step()
        if number >= FIRST_STEPS:
            places = range(start, simulation.position)
            used += sum(int(law.draw(number, i, samples).tokens.sum()) for i in places)
            drawn, trained = drawn + step.drawn_tokens, trained + step.kept_tokens
            decoded += step.counts["decode_step"]
    return Cost(drawn / trained, used / trained, decoded / options.steps)


def main() -> None:
    options = bench.read_arguments(
        __doc__,
        prompts=32,  # groups of a step
        samples=16,
        slots=256,
        steps=48,
        kept=[0.2, 0.3, 0.4, 0.5],
    )
    bench.print_table(["kept", "ideal", "rounds", *KINDS])
    for kept in options.kept:
        law = AssumedWorkload(
            *LENGTHS,
            prompt_median_tokens=10,
            max_prompt_tokens=32,
            beta=beta_from_kept(0.8, kept, options.samples),
        )
        rounds, against_ideal = fixed_rounds(law, options.prompts, options.samples, options.steps)
        costs = {kind: ours(law, options, kind) for kind in KINDS}
        ideal = costs["none"].ideal
        cells = [f"{rounds:.2f} ({against_ideal:.2f})"]
        cells += [f"{cost.drawn:.2f} ({cost.drawn / ideal:.2f})" for cost in costs.values()]
        bench.print_row([kept, f"{ideal:.2f}", *cells])
        steps = {f"{kind} steps": round(cost.decode_steps) for kind, cost in costs.items()}
        print(json.dumps({"kept": kept} | steps))


if __name__ == "__main__":
    main()
