"""Trajectories of the scheduler: turns, observations, limits, and the silent environment."""

import dataclasses

import numpy as np
import pytest
from samplers import PROMPTS, finish, make_engine, sample

from dapo_jax.config.experiment import Environment
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.extras.arithmetic import arithmetic_tokenizer
from dapo_jax.rollout.environments.sessions import TokenizedReply
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.types.structs import RolloutKey, SamplingRule, with_texts

# One that ends often, so that a tiny policy has many turns.
TOKENIZER = Tokenizer(arithmetic_tokenizer().backend, end_ids=(1, 2, 3, 4), pad_id=0)
RULE = SamplingRule(temperature=3.0)
WINDOW = {"first_window_tokens": 128}  # compiled once
OBSERVED = TOKENIZER.encode("7+2=9,")


@dataclasses.dataclass
class Scripted:
    """Environment of a function from what a trajectory has said to a step; asked at once."""

    reply: object
    settings: Environment = dataclasses.field(default_factory=lambda: Environment(name="x:Y"))
    asked: list = dataclasses.field(default_factory=list)

    def submit(self, prompt, seed, said, failed):
        self.asked.append((prompt.index, seed, tuple(said), tuple(failed)))
        return self.reply(prompt, list(said))

    def steps(self, asked):
        return asked


def talks(prompt, said):
    """Two observations, the second one longer, then the end."""
    if len(said) > 2:
        return TokenizedReply([], "", reward=3.0)
    return TokenizedReply(OBSERVED * len(said), "7+2=9," * len(said), reward=float(len(said)))


def play(
    mesh, params, environment, slots=4, burst=3, response=60, samples=3, prompts=PROMPTS, **more
):
    engine = make_engine(mesh, slots, burst, response, tokenizer=TOKENIZER, **WINDOW | more)
    sampler = Scheduler(engine, TOKENIZER, 5, environment)
    groups = sample(sampler, params, prompts, samples, RULE)
    texts = {index: with_texts(group, TOKENIZER.decode_all) for index, group in groups.items()}
    return texts, sampler.counts


def same(one, other, atol=0.0):
    assert one.keys() == other.keys()
    for index, group in one.items():
        for a, b in zip(group, other[index], strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            # Another number of slots is another shape of the products.
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, atol=atol)
            if a.supports is not None:
                assert np.isneginf(a.supports[~a.is_sampled, 1]).all()  # observations are whole
                np.testing.assert_allclose(a.supports, b.supports, atol=atol)
            left, right = (dataclasses.asdict(c) for c in (a, b))
            for name in ("text", "truncated", "sample", "turns", "policy_step", "earlier"):
                assert left[name] == right[name]


# Whole runs that are silent, in pages too, stand in test_runs.py.


@pytest.mark.parametrize("cache", [pytest.param("slots", marks=pytest.mark.slow), "paged"])
def test_what_is_drawn_depends_on_the_trajectory_alone(cache, tiny_params, one_device):
    more = {"cache": cache, "page_tokens": 8} if cache == "paged" else {}
    more["prefill_prompts"] = 1
    found = [
        play(one_device, tiny_params, Scripted(talks), slots=slots, burst=burst, **more)[0]
        for slots, burst in ((4, 2), (16, 5))
    ]
    same(*found, 1e-5)


KEPT = {
    "slots": {"keep_turns": True},
    "pages": {"keep_turns": True, "cache": "paged", "page_tokens": 8},
}
SEPARATE = {"keep_turns": False, "speculate": 0}
KEPT["speculating"] = KEPT["pages"] | {"speculate": 3, "top_p": 0.9}


@pytest.mark.parametrize(
    "setting", ["slots", pytest.param("pages", marks=pytest.mark.slow), "speculating"]
)
def test_kept_trajectories_are_those_that_are_prefilled_again(setting, tiny_params, one_device):
    keep = KEPT[setting] | {"prefill_prompts": 1}
    again, counts = play(one_device, tiny_params, Scripted(talks), **keep | SEPARATE)
    kept, kept_counts = play(one_device, tiny_params, Scripted(talks), **keep)
    assert counts.turns.prefilled_again_tokens > 0 == kept_counts.turns.prefilled_again_tokens
    assert kept_counts.prefills == len(PROMPTS)
    same(again, kept, 1e-5)


@pytest.mark.slow
def test_a_kept_trajectory_whose_pages_others_needed_is_drawn_on_bit_for_bit(
    tiny_params, one_device
):
    keep = KEPT["pages"] | {"prefill_prompts": 1}
    roomy, _ = play(one_device, tiny_params, Scripted(talks), slots=8, **keep)
    tight, counts = play(one_device, tiny_params, Scripted(talks), slots=8, pages=14, **keep)
    assert counts.turns.prefilled_again_tokens > 0 and counts.put_back_tokens > 0
    same(roomy, tight)
    more, _ = play(one_device, tiny_params, Scripted(talks), slots=16, burst=5, **keep)
    same(roomy, more, 1e-5)


def test_observations_stand_between_the_turns_and_nothing_is_drawn_there(tiny_params, one_device):
    environment = Scripted(talks)
    groups, counts = play(one_device, tiny_params, environment)
    several = 0
    for group in groups.values():
        for done in group:
            tokens, drawn = done.tokens, done.is_sampled
            assert len(tokens) <= 60 and len(done) == drawn.sum() == len(done.sampled_tokens)
            assert (done.sampler_logprobs[~drawn] == 0).all()
            if not done.turns:
                continue
            several += 1
            assert sum(turn.tokens for turn in done.turns) == len(tokens)
            place = 0
            for number, turn in enumerate(done.turns):
                part = tokens[place : place + turn.tokens]
                assert turn.is_sampled == (number % 2 == 0)
                if turn.is_sampled and number + 1 < len(done.turns):
                    ends = np.isin(part, TOKENIZER.end_ids)
                    assert ends[-1] and not ends[:-1].any()
                assert turn.text == TOKENIZER.decode(part.tolist())
                if not turn.is_sampled:
                    assert part.tolist() == OBSERVED * ((number + 1) // 2)
                place += turn.tokens
            assert done.text == done.turns[-1].text
            assert done.rewards == (1.0, 2.0, 3.0)[: len(done.rewards)]
    assert several > 5
    observed = sum((~done.is_sampled).sum() for group in groups.values() for done in group)
    assert counts.turns.observation_tokens == observed
    assert counts.tokens == sum(len(done) for group in groups.values() for done in group)
    seeds = {(index, said[0], len(said)): seed for index, seed, said, _ in environment.asked}
    assert len({seed for _, seed, _, _ in environment.asked}) >= len(PROMPTS)
    assert seeds


def test_limits_end_trajectories_as_truncated(tiny_params, one_device):
    def for_ever(prompt, said):
        return TokenizedReply(OBSERVED, "7+2=9,")

    turns = Scripted(for_ever, Environment(name="x:Y", max_turns=2))
    groups, counts = play(one_device, tiny_params, turns)
    ended = [c for group in groups.values() for c in group if c.rewards]
    assert counts.turns.ended_by_turns > 0
    for done in ended:
        assert done.truncated and sum(turn.is_sampled for turn in done.turns) <= 2
    few = Scripted(for_ever, Environment(name="x:Y", max_sampled_tokens=9))
    groups, counts = play(one_device, tiny_params, few)
    lengths = [len(c) for group in groups.values() for c in group]
    assert max(lengths) == 9 and min(lengths) > 5
    assert all(c.truncated for group in groups.values() for c in group)
    assert counts.turns.ended_by_tokens < len(lengths)


@pytest.mark.parametrize("keep_turns", [False, True])
def test_a_suspended_trajectory_goes_on_as_if_it_had_not_been(keep_turns, tiny_params, one_device):
    more = WINDOW | {"prefill_prompts": 1, "keep_turns": keep_turns}
    whole, _ = play(one_device, tiny_params, Scripted(talks), **more)
    engine = make_engine(one_device, 4, 3, 60, tokenizer=TOKENIZER, **more)
    sampler = Scheduler(engine, TOKENIZER, 5, Scripted(talks))
    sampler.begin(tiny_params, RolloutKey(0, 2), RULE)
    for prompt in PROMPTS:
        sampler.submit(prompt, 3)
    groups = {}
    for _ in range(9):
        groups.update({request.prompt.index: done for request, done in sampler.step()})
    parts = sampler.stop(keep=True)
    assert any(c.turns and not c.turns[-1].is_sampled for p in parts for c in p.begun)
    sampler.begin(tiny_params, RolloutKey(0, 2), RULE)
    for part in parts:
        sampler.submit(part.prompt, 3, carried=part)
    groups |= finish(sampler)
    for index, group in whole.items():
        for a, b in zip(group, groups[index], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and a.turns == b.turns
            assert a.rewards == b.rewards
