"""A step of DAPO on a pod, simulated: what filter, tail, lag and carry-over cost or save.

    python tests/benchmarks/pod_step.py
    python tests/benchmarks/pod_step.py --chip v6e --chips 256 --tensor 8 --slots 135 --pages 5000

Assumed: a log-normal law of lengths, a Beta law of right answers that keeps `--kept` of the groups
at the start, effective bandwidths, `--mfu` of a chip's peak in training, scoring and prefill. The
schedule is the run's own. With a lag, rollouts and updates share all devices (each then waits for
the other, and nothing is hidden), or some sample and the others learn (`mesh.sampler_share`). At
least two `--steps`.
Prints a table and a JSON line per simulation; the default sizes are Qwen2.5-32B's on v5p:4x4x4.
"""

import argparse
import json
import statistics

from calibrate import step_figures
from pages import BANDWIDTHS, SHAPE
from rule_of_thumb import Speed, rule_of_thumb

from dapo_jax.commands.plan.simulate import Simulation, Step
from dapo_jax.commands.plan.simulated_engine import named_mesh
from dapo_jax.commands.plan.workload import AssumedWorkload, beta_from_kept
from dapo_jax.config.experiment import Config, Data, Mesh, Packing, Rollout, Sampler

PEAKS = {"v5p": 459e12, "v6e": 918e12}  # operations a second in bfloat16, as published
ROW = 22_528
PARTS = ("decode_step", "read_token", "prefill_token", "load", "score_token", "update_token")
SHOWN = ("utilisation", "seconds_tail", "asked", "judged", "surplus", "rounds", "decode_steps")
SHOWN += ("abandoned_tokens", "sampled_to_kept_tokens", "rows", "fill")


def simulate(
    args: argparse.Namespace, chips: int, learners: int, carry_over: str = "none"
) -> list[Step]:
    """Steps that have so many devices for the rollout and so many for the update."""
    replicas, response = chips // args.tensor, args.max_response
    config = Config(
        data=Data(max_prompt_tokens=ROW - 20_480),
        rollout=Rollout(
            args.prompts, args.samples, updates_per_rollout=args.updates, carry_over=carry_over
        ),
        sampler=Sampler(
            slots=args.slots * replicas,
            burst_tokens=args.burst,
            max_response_tokens=response,
            cache="paged",
            pages=args.pages * replicas,
            prefill_prompts=replicas,
        ),
        packing=Packing(row_tokens=ROW, rows_per_microbatch=learners),
    )
    law = AssumedWorkload(
        args.median,
        args.spread,
        response,
        beta=beta_from_kept(args.accuracy, args.kept, args.samples),
    )
    costs = rule_of_thumb(
        Speed(BANDWIDTHS[args.chip] * 1e12, PEAKS[args.chip], args.mfu),
        parameters=32.76e9,
        token_bytes=64 * 2 * 8 * 128 * 2,
        chips=chips,
        replicas=replicas,
        slots=args.slots,
        learners=learners,
    )
    mesh = named_mesh(Mesh(fsdp=replicas, tensor=args.tensor), "tpu", chips)
    simulation = Simulation(config, SHAPE, mesh, law, costs)
    return [simulation.step() for _ in range(args.steps)]


def describe(name: str, steps: list[Step]) -> None:
    """Means over the steps, as a JSON line."""
    records = [step_figures(step) for step in steps]
    names = ("seconds_rollout", "seconds_learning", *(f"seconds_{p}" for p in PARTS), *SHOWN)
    means = {name: round(statistics.mean(r[name] for r in records), 3) for name in names}
    print(json.dumps({"simulation": name} | means), flush=True)


def step_seconds(steps: list[Step], overlapped: bool) -> float:
    """Of a step amid others: where they overlap, the longer of an update and the next rollout."""
    if not overlapped:
        return statistics.mean(s.rollout_seconds + s.update_seconds for s in steps)
    pairs = zip(steps, steps[1:], strict=False)
    return statistics.mean(max(s.update_seconds, after.rollout_seconds) for s, after in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=BANDWIDTHS, default="v5p")
    parser.add_argument("--chips", type=int, default=64)
    parser.add_argument("--samplers", type=int, default=32, help="chips, where they are apart")
    parser.add_argument("--tensor", type=int, default=4, help="devices of a decoding replica")
    parser.add_argument("--slots", type=int, default=244, help="of a replica")
    parser.add_argument("--pages", type=int, default=9160, help="of a replica")
    parser.add_argument("--burst", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=512, help="groups of a step")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--mfu", type=float, default=0.4)
    parser.add_argument("--median", type=float, default=2900.0)
    parser.add_argument("--spread", type=float, default=0.9)
    parser.add_argument("--max_response", type=int, default=20_480)
    parser.add_argument("--accuracy", type=float, default=0.5, help="of responses within the limit")
    parser.add_argument("--kept", type=float, default=0.5, help="share of groups with signal")
    parser.add_argument("--carry_over", action="store_true", help="two more simulations")
    args = parser.parse_args()
    learners = args.chips - args.samplers
    whole = simulate(args, args.chips, args.chips)
    describe("all devices", whole)
    apart = simulate(args, args.samplers, learners)
    describe(f"{args.samplers} sample, {learners} learn", apart)
    rows = [("the same", 0, whole), ("the same", 1, whole)]
    rows += [(f"{args.samplers} and {learners}", lag, apart) for lag in (0, 1)]
    for kept in ("unfinished", "all") if args.carry_over else ():
        carried = simulate(args, args.chips, args.chips, kept)
        describe(f"all devices, rollout.carry_over={kept}", carried)
        rows.append((f"the same, rollout.carry_over={kept}", 0, carried))
    print("| devices | lag | seconds a step |\n|---|---|---|")
    for devices, lag, steps in rows:
        seconds = step_seconds(steps, overlapped=lag and steps is apart)
        print(f"| {devices} | {lag} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
