"""What dynamic sampling draws per trained token, simulated: ours, the ideal, rounds of one size.

    python tests/benchmarks/price.py
    python tests/benchmarks/price.py --prompts 512 --samples 16 --slots 4096 --steps 4

No model: the run's own schedule under an assumed law of lengths (log-normal) and of right answers
(a Beta by which so many groups are kept). `ideal` draws nothing but the groups up to the last one
used; `rounds` draws whole rounds of three batches until one is full, as DAPO's released recipe.
"""

import argparse
import json

from pages import SHAPE

from dapo_jax import algorithms
from dapo_jax.experiment.config import Config, Data, Mesh, Rollout, Sampler
from dapo_jax.plan.costs import Costs
from dapo_jax.plan.laws import Assumed, right_from_kept
from dapo_jax.plan.rooms import describe_mesh
from dapo_jax.plan.simulate import Simulation

ROUND = 3  # batches; 1,536 prompts for 512
FIRST_STEPS = 4  # until the estimate of the kept fraction has settled
KINDS = ("none", "unfinished", "all")


def fixed_rounds(law: Assumed, prompts: int, samples: int, steps: int) -> tuple[float, float]:
    """Tokens drawn per trained one: by the ideal, and by rounds of one size."""
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
    return used / trained, drawn / trained


def ours(law: Assumed, options: argparse.Namespace, kind: str) -> tuple[float, float]:
    """Tokens drawn per trained one, and decode steps a step."""
    budget = options.max_response
    config = Config(
        algorithm=algorithms.dapo(),
        data=Data(max_prompt_tokens=law.max_prompt_tokens),
        rollout=Rollout(options.prompts, options.samples, carry_over=kind),
        sampler=Sampler(
            slots=options.slots, burst_tokens=options.burst, max_response_tokens=budget
        ),
    )
    mesh = describe_mesh(Mesh(fsdp=1), "cpu", 1)
    simulation = Simulation(config, SHAPE, mesh, law, Costs())
    steps = [simulation.step() for _ in range(FIRST_STEPS + options.steps)][FIRST_STEPS:]
    drawn = sum(step.drawn_tokens for step in steps) / sum(step.kept_tokens for step in steps)
    return drawn, sum(step.counts["decode_step"] for step in steps) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32, help="groups of a step")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--burst", type=int, default=8)
    parser.add_argument("--median", type=float, default=30.0)
    parser.add_argument("--spread", type=float, default=0.7)
    parser.add_argument("--max_response", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kept", type=float, nargs="*", default=(0.2, 0.3, 0.4, 0.5))
    options = parser.parse_args()
    print("| kept | ideal | rounds | " + " | ".join(KINDS) + " |\n|---" + "|---" * 5 + "|")
    for kept in options.kept:
        law = Assumed(
            options.median,
            options.spread,
            options.max_response,
            prompt_median_tokens=10,
            max_prompt_tokens=32,
            right=right_from_kept(0.8, kept, options.samples),
        )
        ideal, rounds = fixed_rounds(law, options.prompts, options.samples, options.steps)
        found = {kind: ours(law, options, kind) for kind in KINDS}
        cells = [f"{drawn:.2f} ({drawn / ideal:.2f})" for drawn, _ in found.values()]
        cells.insert(0, f"{rounds:.2f} ({rounds / ideal:.2f})")
        print(f"| {kept} | {ideal:.2f} | " + " | ".join(cells) + " |")
        print(json.dumps({"kept": kept} | {f"{k} steps": round(v[1]) for k, v in found.items()}))


if __name__ == "__main__":
    main()
