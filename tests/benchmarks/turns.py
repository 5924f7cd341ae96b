"""Time rollouts of several turns with slow environments and with kept caches.

    python tests/benchmarks/turns.py
    python tests/benchmarks/turns.py --seconds 0 0.1 --workers 16 --wait 1 8

The embedded policy solves three problems in turn. Rows differ in the seconds of an environment's
step, in the bursts of decoding before the sampler waits for the environment, and in keeping caches
between turns. The settings alternate, and the median of the rounds counts. Busy slots are counted
while responses wait for a slot, and over the whole rollout.
The defaults take five minutes of one core.
"""

import argparse
import contextlib
import itertools
import os
import time

import bench
from talk import SECONDS, TURNS

from dapo_jax.commands import checks
from dapo_jax.config.experiment import Config, Data, Environment, Log, Model, Rollout, Sampler
from dapo_jax.environments.sessions import Environments
from dapo_jax.run.components import build
from dapo_jax.types.structs import Prompt, SamplerCounts

HEADS = "a step,bursts,caches,busy while work waits,whole,waited,again,rollout".split(",")


def make_config(args: argparse.Namespace, wait: int, keep: bool) -> Config:
    return Config(
        model=Model(folder="dapo_jax:arithmetic_base"),
        data=Data(max_prompt_tokens=16, heldout_problems=0),
        rollout=Rollout(args.prompts, args.samples, updates_per_rollout=1),
        environment=Environment(
            name="talk:Talk",
            max_turns=TURNS,
            max_observation_tokens=16,
            workers=args.workers,
            wait_bursts=wait,
        ),
        sampler=Sampler(slots=args.slots, burst_tokens=4, max_response_tokens=192, keep_turns=keep),
        log=Log(console=False),
    )


def start_workers(environments: Environments, prompt: Prompt) -> None:
    """Start all processes of environments: seeds spread the steps over them."""
    seeds = range(8 * environments.settings.workers)
    environments.steps([environments.submit(prompt, seed, ["1"], []) for seed in seeds])


def rollout(config: Config, step_seconds: float) -> tuple[float, SamplerCounts]:
    os.environ[SECONDS] = str(step_seconds)
    checks.check(config)
    with contextlib.ExitStack() as stack:
        components = build(config)
        stack.callback(components.close)
        sampler, params = components.sampler, components.first_params()
        drawn = itertools.islice(components.prompts, config.rollout.prompts_per_step)
        prompts = [prompt for prompt in drawn if prompt is not None]
        assert components.environments is not None
        start_workers(components.environments, prompts[0])
        began = time.perf_counter()
        bench.sample(sampler, params, prompts, config.rollout.samples_per_prompt)
        return time.perf_counter() - began, sampler.counts


def main() -> None:
    args = bench.read_arguments(
        __doc__,
        seconds=[0.0, 0.1],  # of a step of the environment
        wait=[1, 8],  # bursts
        workers=8,
        prompts=8,
        samples=16,
        slots=32,
        rounds=3,
    )
    rows = list(itertools.product(args.seconds, args.wait, (False, True)))
    results = {row: [] for row in rows}
    for _ in range(args.rounds + 1):  # the first compiles
        for seconds, wait, keep in rows:
            results[seconds, wait, keep].append(rollout(make_config(args, wait, keep), seconds))
    bench.print_table(HEADS)
    for (seconds, wait, keep), (_, *runs) in results.items():
        taken, counts = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
        turns = counts.turns
        assert turns is not None
        whole = counts.tokens / (counts.decode_steps * args.slots)
        again = turns.prefilled_again_tokens / counts.responses
        setting = f"{seconds:g} s", wait, "kept" if keep else "prefilled"
        shares = f"{counts.occupancy:.2f}", f"{whole:.2f}", f"{turns.wait_seconds:.1f} s"
        bench.print_row([*setting, *shares, f"{again:.0f} tokens each", f"{taken:.1f} s"])


if __name__ == "__main__":
    main()
