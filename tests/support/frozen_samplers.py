"""Samplers of a decoder with frozen layers."""

from conftest import make_prompt

from dapo_jax.config.experiment import Sampler
from dapo_jax.data.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.structs import SamplingRule

DRAWN = SamplingRule()


def make_sampler(config, mesh, frozen=None):
    tokenizer = arithmetic_tokenizer()
    engine = PolicyEngine(
        config,
        mesh,
        Sampler(slots=4, burst_tokens=4, max_response_tokens=24, first_window_tokens=16),
        max_prompt_tokens=8,
        tokenizer=tokenizer,
        frozen=frozen,
        insert_width=4,
    )
    return Scheduler(engine, tokenizer, seed=0)


def sample(sampler, params, rule=DRAWN):
    """Four responses to each of three prompts."""
    sampler.begin(params, purpose=0, step=0, rule=rule)
    for i in range(3):
        sampler.submit(make_prompt(i, [2 + i, 7, 9]), 4)
    done = {}
    while not sampler.idle:
        done |= {prompt.index: group for prompt, group in sampler.decode_burst()}
    return [completion for index in sorted(done) for completion in done[index]]
