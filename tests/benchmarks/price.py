"""What dynamic sampling draws per trained token, simulated: ours, the ideal, rounds of one size.

    python tests/benchmarks/price.py
    python tests/benchmarks/price.py --prompts 512 --samples 16 --slots 4096 --steps 4

No model: the run's own schedule under an assumed law of lengths (log-normal) and of right answers
(a Beta by which so many groups are kept). `ideal` draws nothing but the groups up to the last one
used: those of the run without carry-over, and for `rounds`, which draws whole rounds of three
batches until one is full as DAPO's released recipe does, its own.
"""

import argparse
import json
from typing import NamedTuple

from pages import SHAPE

from dapo_jax import algorithms
from dapo_jax.commands.plan.cost_model import Costs
from dapo_jax.commands.plan.simulate import Simulation
from dapo_jax.commands.plan.simulated_engine import named_mesh
from dapo_jax.commands.plan.workload import AssumedWorkload, beta_from_kept
from dapo_jax.config.experiment import Config, Data, Mesh, Rollout, Sampler

ROUND = 3  # batches; 1,536 prompts for 512
FIRST_STEPS = 4  # until the estimate of the kept fraction has settled
KINDS = ("none", "unfinished", "all")


def fixed_rounds(
    law: AssumedWorkload, prompts: int, samples: int, steps: int
) -> tuple[float, float]:
    """By rounds of one size: tokens drawn per trained one, and per one that the ideal draws."""
    place = drawn = used = trained = 0
    for step in range(steps):
        kept = 0
        while kept < prompts:
            for _ in range(ROUND * prompts):
                group, place = law.draw(step, place, samples), place + 1
                tokens = int(group.tokens.sum())
                drawn += tokens
                if kept < prompts:
                    used += tokens
                    signal = 0 < group.correct.sum() < samples
                    kept, trained = kept + signal, trained + signal * tokens
    return drawn / trained, drawn / used


class Cost(NamedTuple):
    """Tokens drawn per trained one, and decode steps a step.

    `ideal`: of the groups between the first and the last place that a step asked for and used.
    """

    drawn: float
    ideal: float
    decode_steps: float


def ours(law: AssumedWorkload, options: argparse.Namespace, kind: str) -> Cost:
    budget, samples = options.max_response, options.samples
    config = Config(
        algorithm=algorithms.dapo(),
        data=Data(max_prompt_tokens=law.max_prompt_tokens),
        rollout=Rollout(options.prompts, samples, carry_over=kind),
        sampler=Sampler(
            slots=options.slots, burst_tokens=options.burst, max_response_tokens=budget
        ),
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32, help="groups of a step")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--burst", type=int, default=8)
    parser.add_argument("--median", type=float, default=30.0)
    parser.add_argument("--spread", type=float, default=0.7)
    parser.add_argument("--max_response", type=int, default=256)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--kept", type=float, nargs="*", default=(0.2, 0.3, 0.4, 0.5))
    options = parser.parse_args()
    print("| kept | ideal | rounds | " + " | ".join(KINDS) + " |\n|---" + "|---" * 5 + "|")
    for kept in options.kept:
        law = AssumedWorkload(
            options.median,
            options.spread,
            options.max_response,
            prompt_median_tokens=10,
            max_prompt_tokens=32,
            beta=beta_from_kept(0.8, kept, options.samples),
        )
        rounds, against_ideal = fixed_rounds(law, options.prompts, options.samples, options.steps)
        found = {kind: ours(law, options, kind) for kind in KINDS}
        ideal = found["none"].ideal
        cells = [f"{cost.drawn:.2f} ({cost.drawn / ideal:.2f})" for cost in found.values()]
        cells.insert(0, f"{rounds:.2f} ({against_ideal:.2f})")
        print(f"| {kept} | {ideal:.2f} | " + " | ".join(cells) + " |")
        steps = {f"{kind} steps": round(cost.decode_steps) for kind, cost in found.items()}
        print(json.dumps({"kept": kept} | steps))


if __name__ == "__main__":
    main()
