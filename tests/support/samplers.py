"""Small samplers, their prompts, and greedy decoding by the whole forward pass."""

import functools

import jax
import jax.numpy as jnp
from conftest import TINY, make_prompt

from dapo_jax.config.experiment import Sampler
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.model.decoder import Decoder, abstract_params
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.runtime import sharding
from dapo_jax.types.structs import RolloutKey, SamplingRule

END = 1
TOKENIZER = arithmetic_tokenizer()
PROMPTS = [make_prompt(i, [2 + (7 * i + j) % 20 for j in range(3 + i % 5)]) for i in range(12)]
GREEDY = SamplingRule(temperature=0)


def make_engine(
    mesh,
    slots=4,
    burst=3,
    response=20,
    width=8,
    tokenizer=TOKENIZER,
    config=TINY,
    prompt=8,
    frozen=None,
    **settings,
) -> PolicyEngine:
    """Return an engine; `settings` are other fields of `Sampler`."""
    sizes = {"slots": slots, "burst_tokens": burst, "max_response_tokens": response}
    sampler = Sampler(**{"first_window_tokens": 8} | sizes | settings)
    named = {"end_ids": tokenizer.end_ids, "insert_width": width, "frozen": frozen}
    return PolicyEngine(config, mesh, sampler, max_prompt_tokens=prompt, **named)


def make_sampler(mesh, *sizes, **settings) -> Scheduler:
    return Scheduler(make_engine(mesh, *sizes, **settings), TOKENIZER, seed=5)


def tokens_of(groups) -> dict[int, list[list[int]]]:
    return {index: [done.tokens.tolist() for done in group] for index, group in groups.items()}


def sample(sampler, params, prompts=PROMPTS, samples=3, rule=SamplingRule()):  # noqa: B008
    sampler.begin(params, RolloutKey(0, 2), rule)
    for prompt in prompts:
        sampler.submit(prompt, samples)
    return finish(sampler)


def finish(sampler) -> dict[int, tuple]:
    """Return the responses that are left by prompt, those that come one by one together."""
    groups = {}
    while not sampler.idle:
        for request, done in sampler.step():
            groups[request.prompt.index] = (*groups.get(request.prompt.index, ()), *done)
    return groups


@functools.partial(jax.jit, static_argnames="config")
def forward(params, *row, config):
    """The final hidden states [1, T, E] of one row."""
    return Decoder(config).apply({"params": params}, *row)


def greedy_loop(params, prompt: list[int], limit: int, config=TINY, end: int = END) -> list[int]:
    """Return the argmax of a full forward pass per token."""
    tokens, drawn = list(prompt), []
    while len(drawn) < limit and (not drawn or drawn[-1] != end):
        row = jnp.array([tokens + [0] * (48 - len(tokens))])
        segments = (jnp.arange(48) < len(tokens)).astype(jnp.int32)[None]
        hidden = forward(params, row, segments, jnp.arange(48)[None], config=config)
        logits = hidden[0, len(tokens) - 1] @ params.get("head", params["embedding"].T)
        drawn.append(int(jnp.argmax(logits)))
        tokens.append(drawn[-1])
    return drawn


def place(params, config, mesh):
    return jax.device_put(params, sharding.tree_shardings(mesh, abstract_params(config)))
