"""Samplers of a decoder with frozen layers."""

import samplers
from conftest import make_prompt

from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.structs import SamplingRule

RULE = SamplingRule()


def make_sampler(config, mesh, frozen=None) -> Scheduler:
    sizes = {"burst": 4, "response": 24, "width": 4, "first_window_tokens": 16}
    engine = samplers.make_engine(mesh, config=config, frozen=frozen, **sizes)
    return Scheduler(engine, samplers.TOKENIZER, seed=0)


def sample(sampler, params, rule=RULE):
    """Four responses to each of three prompts."""
    sampler.begin(params, purpose=0, step=0, rule=rule)
    for i in range(3):
        sampler.submit(make_prompt(i, [2 + i, 7, 9]), 4)
    done = {}
    while not sampler.idle:
        done |= {prompt.index: group for prompt, group in sampler.decode_burst()}
    return [completion for index in sorted(done) for completion in done[index]]
