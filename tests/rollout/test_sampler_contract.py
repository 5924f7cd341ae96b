"""The contract of `contracts.Sampler`: one suite for every implementation."""

import contextlib

import jax
import numpy as np
import pytest
from conftest import TINY, make_prompt
from fake_vllm import FakeVllm, vllm_sampler
from remote_samplers import remote_scheduler
from samplers import END, TOKENIZER, finish, make_engine, tokens_of
from scripted_sampler import ScriptedSampler
from small_runs import make_quick_config, step_on

from dapo_jax.config.experiment import Compute, Mesh, Packing, Sampler
from dapo_jax.extras.exact import ExactSampler
from dapo_jax.extras.samplers.remote_sampler import RemoteSampler
from dapo_jax.extras.vllm.vllm_sampler import VllmSampler
from dapo_jax.learner.minibatches import make_minibatches
from dapo_jax.learner.packing import tree_index
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.build import build
from dapo_jax.run.loop import first_state
from dapo_jax.types.structs import RolloutKey, SamplingRule, Stop

PROMPTS = [make_prompt(i, [i] * (3 + i % 4)) for i in range(2, 9)]
SAMPLES = 3
KEY = RolloutKey(0, 2, policy_step=2)
IN_OTHER_PROCESSES = RemoteSampler, VllmSampler


def make_schedulers(mesh, slots) -> list[Scheduler]:
    """Return one of the trainer, and one of another process."""
    return [Scheduler(make_engine(mesh, slots), TOKENIZER, seed=5) for _ in range(2)]


# Each makes a sampler of `slots` slots on a mesh.
SAMPLERS = {
    "scheduler": lambda mesh, slots: Scheduler(make_engine(mesh, slots), TOKENIZER, seed=5),
    "scheduler with pages": lambda mesh, slots: Scheduler(
        make_engine(mesh, slots, cache="paged", page_tokens=4), TOKENIZER, seed=5
    ),
    "scheduler that speculates": lambda mesh, slots: Scheduler(
        make_engine(mesh, slots, speculate=3), TOKENIZER, seed=5
    ),
    "own server": lambda mesh, slots: remote_scheduler(make_schedulers(mesh, slots)),
    "vllm": lambda mesh, slots: vllm_sampler(
        [FakeVllm(END, TINY.vocab, seconds=0.01) for _ in range(2)], slots
    ),
    "scripted": lambda mesh, slots: ScriptedSampler(lambda index: 2 + index % 5, slots),
    "exact": lambda mesh, slots: ExactSampler(
        TINY, mesh, (4, 48), chunk_tokens=64, end_ids=(END,), slots=slots, limit=20, seed=5
    ),
}


# Of the exact one a run is trained, too.
MARKED = [pytest.param(name, marks=[pytest.mark.slow] * (name == "exact")) for name in SAMPLERS]


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


def start(sampler, params, key=KEY, rule=SamplingRule()):  # noqa: B008
    sampler.begin(params, key, rule)
    return sampler


@pytest.fixture
def begin(open_sampler, tiny_params):
    return lambda slots=4, **options: start(open_sampler(slots), tiny_params, **options)


@pytest.fixture(scope="module")
def expected(open_sampler, tiny_params) -> dict[int, tuple]:
    """Return the groups of all prompts."""
    return finish_groups(start(open_sampler(), tiny_params))


def submit(sampler, prompts=PROMPTS, samples=SAMPLES) -> list:
    return [sampler.submit(prompt, samples) for prompt in prompts]


def finish_groups(sampler, prompts=PROMPTS) -> dict[int, tuple]:
    submit(sampler, prompts)
    return finish(sampler)


def assert_same(groups, others):
    assert groups.keys() == others.keys()
    for index, group in groups.items():
        for a, b in zip(group, others[index], strict=True):
            assert (a.sample, a.truncated) == (b.sample, b.truncated)
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, atol=1e-4)


def test_groups_are_returned_whole_and_in_order_of_samples(begin):
    sampler = begin(key=KEY._replace(policy_step=1))
    groups = finish_groups(sampler)
    assert groups.keys() == {prompt.index for prompt in PROMPTS}
    for group in groups.values():
        assert [done.sample for done in group] == list(range(SAMPLES))
        for done in group:
            assert 0 < len(done.tokens) == len(done.sampler_logprobs)
            assert done.sampler_logprobs.dtype == np.float32 and done.policy_step == 1
            assert done.truncated == (done.tokens[-1] != END)
    assert sampler.counts.tokens == sum(len(done) for group in groups.values() for done in group)
    assert sampler.counts.bursts > 1 and sampler.counts.abandoned_tokens == 0


def test_single_responses_are_returned_one_by_one_and_equal_those_of_the_group(begin, expected):
    sampler = begin()
    submit(sampler, samples=[0, 2])
    returned = {}
    while not sampler.idle:
        for request, (done,) in sampler.step():
            returned.setdefault(request.prompt.index, {})[done.sample] = done
    singles = {i: (done[0], done[2]) for i, done in returned.items()}
    assert_same(singles, {i: (group[0], group[2]) for i, group in expected.items()})


def test_responses_depend_neither_on_order_nor_on_slots(begin, expected):
    assert_same(finish_groups(begin(), PROMPTS[::-1]), expected)
    assert_same(finish_groups(begin(slots=12)), expected)
    assert_same(finish_groups(begin(), PROMPTS[3:4]), {PROMPTS[3].index: expected[5]})


def test_work_that_was_left_leaves_no_trace(begin, expected):
    """Whether it was stopped, or the sampler closed, or another rollout begun."""
    sampler = begin(key=RolloutKey(0, 9))
    for leave in (lambda: sampler.stop(keep=False), sampler.close, begin):
        submit(sampler)
        sampler.step()
        left = leave()
        assert sampler.idle
        if isinstance(left, list):
            counts = sampler.counts
            assert left == [] and counts.abandoned_responses > 0
            # Samplers in other processes count the tokens themselves.
            assert counts.abandoned_tokens > 0 or isinstance(sampler, IN_OTHER_PROCESSES)
        assert (sampler.key is None) == (left is None)
        begin()
        assert sampler.key == KEY and sampler.counts.bursts == sampler.counts.tokens == 0
        assert_same(finish_groups(sampler, PROMPTS[2:]), {i: expected[i] for i in range(4, 9)})


def test_stopped_groups_resume_with_the_same_tokens(begin, expected):
    sampler = begin()
    submit(sampler)
    groups = {}
    for _ in range(3):
        groups |= {request.prompt.index: done for request, done in sampler.step()}
    partial = sampler.stop(keep=True)
    assert sampler.idle
    indices = [part.prompt.index for part in partial]
    assert indices == sorted(indices) and {*indices, *groups} == expected.keys()
    # Samplers in other processes return whole groups.
    assert any(part.tokens for part in partial) or isinstance(sampler, IN_OTHER_PROCESSES)
    sampler = begin()
    for part in partial:
        sampler.submit(part.prompt, SAMPLES, carried=part)
    assert_same(groups | finish(sampler), expected)


def test_a_cancelled_request_leaves_room_and_no_trace(begin, expected):
    sampler = begin()
    first, second, third = submit(sampler, PROMPTS[:3])
    sampler.step()
    sampler.cancel(first)  # it runs; the third waits
    sampler.cancel(third)
    assert sampler.room == 4 - SAMPLES or isinstance(sampler, IN_OTHER_PROCESSES)
    groups = finish_groups(sampler, PROMPTS[3:])
    sampler.cancel(second)  # it has ended
    assert_same(groups, {i: group for i, group in expected.items() if i not in (2, 4)})
    assert sampler.counts.abandoned_responses > 0 or isinstance(sampler, RemoteSampler)


def test_a_request_has_its_own_budget_and_stop_tokens(begin, expected):
    if isinstance(sampler := begin(), RemoteSampler):
        with pytest.raises(ValueError, match="budget and stop are those of the run"):
            sampler.submit(PROMPTS[0], 1, budget=2)
        return
    for samples in (SAMPLES, list(range(SAMPLES))):
        sampler = begin()
        token = int(expected[2][0].tokens[0])
        sampler.submit(PROMPTS[0], samples, stop=Stop(ids=(token,)))
        sampler.submit(PROMPTS[1], samples, budget=2)
        sampler.submit(PROMPTS[2], samples, budget=1000)
        groups = {i: sorted(group, key=lambda c: c.sample) for i, group in finish(sampler).items()}
        for actual, whole in zip(groups[2], expected[2], strict=True):
            ids = whole.tokens.tolist()
            assert actual.tokens.tolist() == ids[: (ids + [token]).index(token) + 1]
            assert actual.truncated == (actual.tokens[-1] not in (token, END))
        for actual, whole in zip(groups[3], expected[3], strict=True):
            assert actual.tokens.tolist() == whole.tokens[:2].tolist()
            assert actual.truncated == (END not in actual.tokens)
        assert_same({4: groups[4]}, {4: expected[4]})
    with pytest.raises(ValueError, match="budget = 0: must be above 0"):
        sampler.submit(PROMPTS[0], 1, budget=0)


def test_a_request_has_its_own_rule_and_stop_texts_or_is_rejected(begin, expected, request):
    """Beside requests with the rollout's rule; its responses are those of a rollout by its rule."""
    name = request.node.callspec.params["open_sampler"]
    hot, five = SamplingRule(temperature=2.0, top_k=9), TOKENIZER.encode("5")[0]
    heated = finish_groups(begin(rule=hot), PROMPTS[:4])
    sampler = begin()
    sampler.submit(PROMPTS[0], SAMPLES)
    if name.startswith("scheduler") or name == "vllm":
        sampler.submit(PROMPTS[1], SAMPLES, hot)
        sampler.submit(PROMPTS[2], list(range(SAMPLES)), hot, 3)
    else:
        with pytest.raises(ValueError, match="rule"):
            sampler.submit(PROMPTS[1], SAMPLES, hot)
    if name.startswith("scheduler"):
        sampler.submit(PROMPTS[3], SAMPLES, stop=Stop(("5",)))
    else:
        with pytest.raises(ValueError, match="stop"):
            sampler.submit(PROMPTS[3], SAMPLES, stop=Stop(("5",)))
    groups = {i: sorted(group, key=lambda c: c.sample) for i, group in finish(sampler).items()}
    tokens, plain, heated = map(tokens_of, (groups, expected, heated))
    assert tokens[2] == plain[2]
    if 3 in groups:
        assert tokens[3] == heated[3] != plain[3]
        assert tokens[4] == [ids[:3] for ids in heated[4]]
    if 5 in groups:
        assert tokens[5] == [ids[: [*ids, five].index(five) + 1] for ids in plain[5]]
        assert [done.truncated for done in groups[5]] == [
            ids[-1] not in (five, END) for ids in tokens[5]
        ]


def test_a_weight_update_leaves_nothing_of_the_earlier_policy(
    begin, expected, tiny_params, request
):
    """No cache of prompts, no waiting request, no token; and back again."""
    sampler = begin()
    submit(sampler, PROMPTS[:1])
    sampler.step()
    other = jax.tree.map(lambda x: x * 0.9, tiny_params)
    sampler.begin(other, KEY._replace(policy_step=7), SamplingRule())
    assert sampler.idle
    updated = finish_groups(sampler)
    steps = {done.policy_step for group in updated.values() for done in group}
    assert steps == {7}
    if request.node.callspec.params["open_sampler"] != "scripted":
        assert tokens_of(updated) != tokens_of(expected)
    assert_same(finish_groups(begin()), expected)


def test_room_counts_the_responses_that_could_start(begin):
    """And a prompt without tokens is rejected."""
    sampler = begin()
    assert sampler.idle and sampler.room == 4
    sampler.submit(PROMPTS[0], SAMPLES)
    assert not sampler.idle and sampler.room == 4 - SAMPLES
    sampler.submit(PROMPTS[1], SAMPLES)
    assert sampler.room == 4 - 2 * SAMPLES
    finish(sampler)
    for samples in (2, [0]):
        with pytest.raises(ValueError, match="prompt .* has no tokens"):
            sampler.submit(make_prompt(3, []), samples)
    assert sampler.idle and sampler.room == 4


def test_host_work_runs_exactly_once_per_burst(begin):
    sampler, calls = begin(), []
    sampler.submit(PROMPTS[0], SAMPLES)
    for bursts in range(1, 4):
        sampler.step(lambda: calls.append(None))
        assert len(calls) == bursts
    finish(sampler)
    sampler.step(lambda: calls.append(None))  # nothing is running
    assert len(calls) == 4


# --- training with truncated sampling ---------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({"top_p": 0.7}, marks=SLOW),
        pytest.param({"top_k": 4}, marks=SLOW),
        {"top_p": 0.7, "top_k": 20},
    ],
)
def test_an_unchanged_policy_has_ratio_1_over_the_tokens_that_were_kept(
    tiny_folder, tmp_path, alone, rule
):
    config = make_quick_config(tiny_folder, tmp_path / "run", preset="prime_rl")
    config.sampler = Sampler(
        slots=16, burst_tokens=8, max_response_tokens=24, temperature=1.5, **rule
    )
    config.log.token_ratios = True
    components = build(config)
    trainer, state = components.trainer(), first_state(components)
    params = state.learners.policy.params
    groups = trainer.source.collect(state.source, params, 0)[1].groups
    batch = make_minibatches(config, groups, trainer.rows)
    rows, used = tree_index(batch.rollouts, 0), batch.microbatches[0]
    scored = np.asarray(trainer.programs.policy.score(params, rows, used).values)
    whole = np.asarray(trainer.programs.policy.score(params, rows.replace(edges=None), used).values)
    _, record = step_on(components, state, groups)
    updated = np.asarray(record.updates[0].token_logprobs)
    sampled = rows.response_index >= 0
    assert (scored[sampled] - whole[sampled]).max() > 0.05  # or nothing was cut
    np.testing.assert_allclose(np.exp(updated[sampled] - scored[sampled]), 1, atol=1e-6)
    np.testing.assert_allclose(rows.sampler_logprobs[sampled], scored[sampled], atol=2e-5)
    components.close()


# --- training with another sampler ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        (Mesh(1, 1, 1), "bfloat16"),
        pytest.param(Mesh(2, 2, 2), "float32", marks=SLOW),
    ],
)
def test_the_exact_sampler_has_the_log_probs_of_the_score_pass_to_the_bit(
    tiny_folder, tmp_path, request, mesh, dtype
):
    """With other numbers of responses in flight than rows of the pass."""
    if mesh.tensor == 1:
        request.getfixturevalue("alone")
    changes = {"preset": "grpo", "mesh": mesh, "compute": Compute(dtype=dtype)}
    config = make_quick_config(tiny_folder, tmp_path / "run", **changes)
    config.sampler.engine, config.sampler.slots = "exact", 12
    config.packing = Packing(row_tokens=40, rows_per_microbatch=8, single_responses=True)
    components = build(config)
    trainer, state = components.trainer(), first_state(components)
    policy, params = trainer.programs.policy, state.learners.policy.params
    groups = trainer.source.collect(state.source, params, 0)[1].groups
    batch = make_minibatches(config, groups, trainer.rows)
    for u, used in enumerate(batch.microbatches):
        rows = tree_index(batch.rollouts, u)
        scored = np.asarray(policy.score(params, rows, used).values)
        sampled = rows.response_index >= 0
        assert sampled.sum() > 50
        np.testing.assert_array_equal(rows.sampler_logprobs[sampled], scored[sampled])
    components.close()
