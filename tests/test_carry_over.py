"""rollout.carry_over: what a step has drawn and not used is gone on with in the next one."""

import numpy as np
import pytest
from conftest import TINY, make_prompt

from dapo_jax.experiment.config import Sampler
from dapo_jax.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.sampler.engine import PolicyEngine
from dapo_jax.sampler.rollout import RolloutSampler
from dapo_jax.sampler.sampling import SamplingRule

TOKENIZER = arithmetic_tokenizer()
PROMPTS = [make_prompt(i, [2 + (7 * i + j) % 20 for j in range(3 + i % 5)]) for i in range(8)]


def make_sampler(mesh, response=40, **settings) -> RolloutSampler:
    engine = PolicyEngine(
        TINY,
        mesh,
        slots=24,
        burst_tokens=4,
        max_prompt_tokens=8,
        max_response_tokens=response,
        first_window_tokens=8,
        insert_width=3,
        tokenizer=TOKENIZER,
        settings=Sampler(**settings),
    )
    return RolloutSampler(engine, TOKENIZER, seed=5)


def draw(sampler, params, *, stop_after=()):
    """All groups of three; the step ends after so many bursts, and again, and the next goes on."""
    groups, carried, step = {}, {prompt.index: None for prompt in PROMPTS}, 2
    for bursts in (*stop_after, 1000):
        sampler.begin(params, purpose=0, step=step, rule=SamplingRule())
        for index, one in carried.items():
            sampler.submit(PROMPTS[index], 3, one)
        for _ in range(bursts):
            groups |= {prompt.index: done for prompt, done in sampler.decode_burst()}
            if sampler.idle:
                break
        carried = {one.prompt.index: one for one in sampler.suspend()}
        # What no slot had begun is drawn anew, by the next step's keys: not in this comparison.
        carried = {i: one for i, one in carried.items() if one.tokens}
        step += 1
    return groups


PAGED = {"cache": "paged", "page_tokens": 4, "pages": 150, "prefill_chunk_tokens": 4}


@pytest.mark.parametrize("settings", [{}, PAGED], ids=["slots", "paged"])
def test_a_response_that_goes_on_is_the_one_that_nothing_interrupted(
    settings, tiny_params, one_device
):
    """In tokens, and in log-probs but for rounding: its cache comes from a prefill instead."""
    sampler = make_sampler(one_device, **settings)
    whole, parts = (draw(sampler, tiny_params, stop_after=stops) for stops in ((), (3, 2, 4)))
    assert len(parts) == len(whole) == 8
    mixed = 0
    for index, group in parts.items():
        for one, other in zip(group, whole[index], strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.sampler_logprobs, other.sampler_logprobs, atol=1e-4)
            assert (one.truncated, one.text, one.sample) == (
                other.truncated, other.text, other.sample,
            )  # fmt: skip
            assert sum(tokens for _, tokens in one.drawn_by) == len(one)
            steps = [step for step, _ in one.drawn_by]
            assert steps == sorted(set(steps)) and set(steps) <= {2, 3, 4, 5}
            mixed += len(steps) > 1
    assert mixed > 3
