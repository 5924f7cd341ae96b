"""Samplers of a decoder with frozen layers."""

import samplers
from conftest import make_prompt

from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import SamplingRule

RULE = SamplingRule()
PROMPTS = [make_prompt(i, [2 + i, 7, 9]) for i in range(3)]


def make_sampler(config, mesh, frozen=None) -> Scheduler:
    sizes = {"burst": 4, "response": 24, "width": 4, "first_window_tokens": 16}
    engine = samplers.make_engine(mesh, config=config, frozen=frozen, **sizes)
    return Scheduler(engine, samplers.TOKENIZER, seed=0)


def sample(sampler, params, rule=RULE):
    done = samplers.sample(sampler, params, PROMPTS, 4, rule)
    return [completion for index in sorted(done) for completion in done[index]]
