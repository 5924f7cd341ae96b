"""The contract of `contracts.Sampler`: one suite for every implementation."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from conftest import TINY, make_prompt
from fake_vllm import FakeVllm, save_digest, serving
from remote_samplers import remote_scheduler
from samplers import END, TOKENIZER, make_engine
from small_runs import equal, make_quick_config
from toy_sampler import ScriptedSampler, ToySampler

from dapo_jax.extras.samplers.remote_sampler import RemoteSampler
from dapo_jax.extras.vllm import VllmSampler, VllmServer
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.components import build
from dapo_jax.run.run import first_state
from dapo_jax.step import train_step
from dapo_jax.types.structs import SamplingRule

PROMPTS = [make_prompt(i, [i] * (3 + i % 4)) for i in range(2, 9)]
SAMPLES = 3
IN_OTHER_PROCESSES = RemoteSampler, VllmSampler


def make_schedulers(mesh, slots) -> list[Scheduler]:
    """Return one of the trainer, and one of another process."""
    return [Scheduler(make_engine(mesh, slots), TOKENIZER, seed=5) for _ in range(2)]


@contextlib.contextmanager
def vllm_sampler(slots):
    with serving(FakeVllm(END, TINY.vocab, seconds=0.01)) as url:
        yield VllmSampler(VllmServer(url, (END,), 20, slots), save_digest, seed=5)


# Each makes a sampler of `slots` slots on a mesh.
SAMPLERS = {
    "scheduler": lambda mesh, slots: Scheduler(make_engine(mesh, slots), TOKENIZER, seed=5),
    "scheduler with pages": lambda mesh, slots: Scheduler(
        make_engine(mesh, slots, cache="paged", page_tokens=4), TOKENIZER, seed=5
    ),
    "own server": lambda mesh, slots: remote_scheduler(make_schedulers(mesh, slots)),
    "vllm": lambda mesh, slots: vllm_sampler(slots),
    "scripted": lambda mesh, slots: ScriptedSampler(lambda index: 2 + index % 5, slots),
    "toy": lambda mesh, slots: ToySampler(TINY, (END,), seed=5, rows=slots),
}


# Of the toy, which is an example, one run is trained.
MARKED = [pytest.param(name, marks=[pytest.mark.slow] * (name == "toy")) for name in SAMPLERS]


@pytest.fixture(scope="module", params=MARKED)
def open_sampler(request, one_device):
    made = {}  # each once: its programs are compiled once

    with contextlib.ExitStack() as stack:

        def open_cached(slots=4):
            if slots not in made:
                opened = SAMPLERS[request.param](one_device, slots)
                is_context = isinstance(opened, contextlib.AbstractContextManager)
                made[slots] = stack.enter_context(opened) if is_context else opened
            return made[slots]

        yield open_cached


@pytest.fixture
def begin(open_sampler, tiny_params):
    def begin(slots=4, step=2, **options):
        sampler = open_sampler(slots)
        sampler.begin(tiny_params, purpose=0, step=step, rule=SamplingRule(), **options)
        return sampler

    return begin


def finish(sampler) -> dict[int, tuple]:
    groups = {}
    while not sampler.idle:
        for prompt, done in sampler.decode_burst():
            groups[prompt.index] = (*groups.get(prompt.index, ()), *done)
    return groups


def finish_groups(sampler, prompts=PROMPTS) -> dict[int, tuple]:
    for prompt in prompts:
        sampler.submit(prompt, SAMPLES)
    return finish(sampler)


def assert_same(groups, others):
    assert groups.keys() == others.keys()
    for index, group in groups.items():
        for a, b in zip(group, others[index], strict=True):
            assert (a.sample, a.truncated) == (b.sample, b.truncated)
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, atol=1e-4)


def test_groups_are_returned_whole_and_in_order_of_samples(begin):
    sampler = begin()
    groups = finish_groups(sampler)
    assert groups.keys() == {prompt.index for prompt in PROMPTS}
    for group in groups.values():
        assert [done.sample for done in group] == list(range(SAMPLES))
        for done in group:
            assert 0 < len(done.tokens) == len(done.sampler_logprobs)
            assert done.sampler_logprobs.dtype == np.float32
            assert done.truncated == (done.tokens[-1] != END)
    assert sampler.counts.tokens == sum(len(done) for group in groups.values() for done in group)
    assert sampler.counts.bursts > 1 and sampler.counts.abandoned_tokens == 0


def test_single_responses_are_returned_one_by_one_and_equal_those_of_the_group(begin):
    groups = finish_groups(begin())
    sampler = begin()
    for prompt in PROMPTS:
        sampler.submit_each(prompt, [0, 2])
    returned = {}
    while not sampler.idle:
        for prompt, (done,) in sampler.decode_burst():
            returned.setdefault(prompt.index, {})[done.sample] = done
    singles = {i: (done[0], done[2]) for i, done in returned.items()}
    assert_same(singles, {i: (group[0], group[2]) for i, group in groups.items()})


def test_responses_depend_neither_on_order_nor_on_slots(begin):
    expected = finish_groups(begin())
    assert_same(finish_groups(begin(), PROMPTS[::-1]), expected)
    assert_same(finish_groups(begin(slots=12)), expected)
    assert_same(finish_groups(begin(), PROMPTS[3:4]), {PROMPTS[3].index: expected[5]})


def test_begin_forgets_earlier_requests_and_starts_new_counts(begin):
    expected = finish_groups(begin())
    sampler = begin(step=9)
    sampler.submit(PROMPTS[0], SAMPLES)
    sampler.decode_burst()
    sampler = begin()
    assert sampler.idle and sampler.counts.bursts == sampler.counts.tokens == 0
    assert_same(finish_groups(sampler, PROMPTS[2:]), {i: expected[i] for i in range(4, 9)})


def test_the_step_of_the_policy_is_recorded(begin):
    for options, expected in (({}, 2), ({"policy_step": 1}, 1)):
        groups = finish_groups(begin(**options), PROMPTS[:1])
        assert [done.policy_step for done in groups[2]] == [expected] * SAMPLES


def test_prepared_weights_are_those_of_the_next_session_alone(
    begin, open_sampler, tiny_params, request
):
    if request.node.callspec.params["open_sampler"] in ("scripted", "vllm"):
        return  # it loads nothing onto devices
    sampler = open_sampler()
    expected = finish_groups(begin())
    sampler.prepare(tiny_params, 7)
    zeros = jax.tree.map(np.zeros_like, tiny_params)
    groups = []
    for policy_step in (7, 8):
        sampler.begin(zeros, purpose=0, step=2, rule=SamplingRule(), policy_step=policy_step)
        groups.append(finish_groups(sampler))
    assert_same(groups[0], expected)
    assert not equal(groups[1][2][0].tokens, expected[2][0].tokens)


def test_suspended_groups_resume_with_the_same_tokens(begin):
    expected = finish_groups(begin())
    sampler = begin()
    for prompt in PROMPTS:
        sampler.submit(prompt, SAMPLES)
    groups = {}
    for _ in range(3):
        groups |= {prompt.index: done for prompt, done in sampler.decode_burst()}
    partial = sampler.suspend()
    assert sampler.idle
    indices = [part.prompt.index for part in partial]
    assert indices == sorted(indices) and {*indices, *groups} == expected.keys()
    # Samplers in other processes return whole groups.
    assert any(part.tokens for part in partial) or isinstance(sampler, IN_OTHER_PROCESSES)
    sampler = begin()
    for part in partial:
        sampler.submit(part.prompt, SAMPLES, part)
    assert_same(groups | finish(sampler), expected)


def test_abandoned_work_is_counted_and_leaves_no_trace(begin):
    sampler = begin()
    for prompt in PROMPTS:
        sampler.submit(prompt, SAMPLES)
    sampler.decode_burst()
    sampler.abandon()
    assert sampler.idle
    counts = sampler.counts
    assert counts.abandoned_responses > 0
    # Samplers in other processes count the tokens themselves.
    assert counts.abandoned_tokens > 0 or isinstance(sampler, IN_OTHER_PROCESSES)
    assert_same(finish_groups(sampler), finish_groups(begin()))


def test_a_released_sampler_begins_again(begin):
    expected = finish_groups(begin())
    sampler = begin()
    sampler.submit(PROMPTS[0], SAMPLES)
    sampler.decode_burst()
    sampler.release()
    assert sampler.idle
    sampler.resident()
    assert_same(finish_groups(begin()), expected)


def test_a_weight_update_leaves_nothing_of_the_earlier_policy(begin, tiny_params, request):
    """No cache of prompts, no waiting request, no token; and back again."""
    first = finish_groups(begin())
    sampler = begin()
    sampler.submit(PROMPTS[0], SAMPLES)
    sampler.decode_burst()
    other = jax.tree.map(lambda x: x * 0.9, tiny_params)
    keyed = {"purpose": 0, "step": 2, "rule": SamplingRule()}
    sampler.begin(other, policy_step=7, **keyed)
    assert sampler.idle
    updated = finish_groups(sampler)
    steps = {done.policy_step for group in updated.values() for done in group}
    assert steps == {7}
    if request.node.callspec.params["open_sampler"] != "scripted":
        tokens = [
            [done.tokens.tolist() for group in groups.values() for done in group]
            for groups in (first, updated)
        ]
        assert tokens[0] != tokens[1]
    again = finish_groups(begin())
    assert_same(again, first)


def test_room_counts_the_responses_that_could_start(begin):
    sampler = begin()
    assert sampler.idle and sampler.room == 4
    sampler.submit(PROMPTS[0], SAMPLES)
    assert not sampler.idle and sampler.room == 4 - SAMPLES
    sampler.submit(PROMPTS[1], SAMPLES)
    assert sampler.room == 4 - 2 * SAMPLES
    finish(sampler)
    assert sampler.idle and sampler.room == 4


def test_an_empty_prompt_is_rejected(begin):
    sampler = begin()
    for submit, samples in ((sampler.submit, 2), (sampler.submit_each, [0])):
        with pytest.raises(ValueError, match="prompt .* has no tokens"):
            submit(make_prompt(3, []), samples)
    assert sampler.idle


def test_host_work_runs_exactly_once_per_burst(begin):
    sampler, calls = begin(), []
    sampler.submit(PROMPTS[0], SAMPLES)
    for bursts in range(1, 4):
        sampler.decode_burst(lambda: calls.append(None))
        assert len(calls) == bursts
    finish(sampler)
    sampler.decode_burst(lambda: calls.append(None))  # nothing is running
    assert len(calls) == 4


# --- training with another sampler ------------------------------------------------------------


def test_the_toy_sampler_trains_what_the_scheduler_trains(base, tmp_path, alone):
    """The keys are the same, so the tokens are; only the log-probs round differently."""
    config = make_quick_config(base, tmp_path / "run")
    components = build(config)
    decoder, end_ids = components.decoder, components.tokenizer.end_ids
    limit = config.sampler.max_response_tokens
    toy = ToySampler(decoder, end_ids, config.seed, limit=limit, rows=16)
    records = {}
    for name, sampler in (("scheduler", components.sampler), ("toy", toy)):
        trainer = dataclasses.replace(components, sampler=sampler).trainer()
        state, records[name] = first_state(components), []
        before = jax.device_get(state.learners.policy.params)
        for _ in range(config.total_steps):
            state, record = train_step(trainer, state)
            records[name].append(record)
        assert not equal(before, jax.device_get(state.learners.policy.params))
    components.close()
    for expected, actual in zip(records["scheduler"], records["toy"], strict=True):
        assert np.isfinite([group.rewards for group in actual.rollouts.groups]).all()
        for group, other in zip(expected.rollouts.groups, actual.rollouts.groups, strict=True):
            assert group.prompt.index == other.prompt.index
            np.testing.assert_array_equal(group.rewards, other.rewards)
            for a, b in zip(group.completions, other.completions, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
