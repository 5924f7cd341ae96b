"""Prompts packed once for several responses: the same loss, gradient and scores, fewer tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DELTA, MOE, TINY, make_prompt
from learners import BUDGET, assert_close

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Config, Optimizer, Packing
from dapo_jax.learner.advantages import Estimates, broadcast_to_tokens
from dapo_jax.learner.batches import NOT_SCORED, ScoredBatch
from dapo_jax.learner.minibatches import make_batch, row_choice
from dapo_jax.learner.packing import Segment, choose_rows, pack, pack_updates, take_tokens
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model import blockwise_attention, splash_attention
from dapo_jax.model.decoder import init_params
from dapo_jax.model.layers import Adapters
from dapo_jax.model.training_attention import shares_prompts
from dapo_jax.runtime.sharding import make_mesh, unbox
from dapo_jax.types.structs import Completion

RNG = np.random.default_rng(3)
ROW_TOKENS = 128
ALONE = ([5], [11, 7])  # prompts of one token, and a group with one response
PROMPTS = [RNG.integers(2, 32, n).tolist() for n in (40, 23, 2, 31)]


def make_segments(routes: bool = False) -> list[Segment]:
    """Groups of four with long prompts; some cannot share, one response is empty."""
    groups = [(prompt, (9, 1, 17, 30)) for prompt in PROMPTS]
    groups += [(ALONE[0], (6, 3, 8, 0)), (ALONE[1], (12,))]
    segments = []
    for number, (prompt, lengths) in enumerate(groups):
        of_prompt = RNG.integers(0, MOE.experts, (len(prompt), MOE.layers, 2)).astype(np.int8)
        for length in lengths:
            tokens = RNG.integers(2, 32, length).astype(np.int32)
            logprobs = RNG.normal(-3, 0.5, length).astype(np.float32)
            completion = Completion(tokens, logprobs, False, 0, "")
            if routes:
                own = RNG.integers(0, MOE.experts, (length, MOE.layers, 2)).astype(np.int8)
                both = np.concatenate([of_prompt, own])
                completion = dataclasses.replace(completion, routes=both)
            segments.append(Segment(make_prompt(number, prompt), completion, len(segments)))
    return segments


SEGMENTS = make_segments()


def make_batches(algorithm, segments, microbatches: int = 1):
    """Return the batches of separate and of shared prompts; the second has fewer tokens."""
    advantages = np.random.default_rng(1).normal(size=len(segments))
    batches = []
    for share in (False, True):
        rows = (64 if microbatches == 1 else 4, microbatches)
        rollouts, used = pack(segments, ROW_TOKENS, *rows, share)
        values = np.where(rollouts.response_index >= 0, 0.5, 0.0).astype(np.float32)
        critic = {"critic": values} if algorithm.critic else {}
        old = rollouts.sampler_logprobs if algorithm.old_logprobs == "recompute" else None
        scored = ScoredBatch(rollouts, old, critic)
        placed = broadcast_to_tokens(advantages, rollouts.response_index)
        estimates = Estimates(placed, placed if algorithm.critic else None)
        batches.append((make_batch(scored, segments, estimates, algorithm, BUDGET), used))
    return batches


def assert_same(learner, params, algorithm, segments=SEGMENTS, microbatches=1, tolerance=1e-5):
    """Compare scores of responses, loss and gradient, with and without shared prompts."""
    params = jax.device_put(params, learner.shardings.params)
    outcomes = []
    for batch, used in make_batches(algorithm, segments, microbatches):
        rollouts = batch.scored.rollouts
        scores = np.asarray(learner.score(params, rollouts, used).values)
        responses = take_tokens(scores, rollouts.response_index)
        gradient, (means, _) = learner.differentiate(params, batch, used)
        outcomes.append(jax.device_get((np.concatenate(responses), means["loss"], gradient)))
    separate, shared = outcomes
    assert np.abs(separate[0]).max() > 0.1
    assert_close(shared, separate, tolerance)


def make_policy(mesh, config, algorithm):
    return policy_learner(PolicySettings(algorithm, Compute()), Optimizer(), config, mesh)


def make_params(config, seed=0):
    params = unbox(jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed)))
    noise = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: x + noise.normal(0, 0.02, x.shape).astype(np.float32), params)
    return params | {"embedding": params["embedding"] * 20}


CONFIGS = {
    "plain": TINY,
    "blocked": dataclasses.replace(TINY, attention="blocked"),
    "splash": dataclasses.replace(TINY, attention="splash"),
    "splash-sinks": dataclasses.replace(TINY, attention="splash", sinks=True),
    "window": dataclasses.replace(TINY, window=7, sliding=(True, False)),
    "window-blocked": dataclasses.replace(TINY, attention="blocked", window=7, sinks=True),
    "adapters": dataclasses.replace(TINY, adapters=Adapters(4, 8.0, ("query", "down"))),
    "experts": MOE,
}


# Configuration, algorithm, and (fsdp, tensor, context) of four devices with eight microbatches.
CASES = [(name, "dapo", None) for name in CONFIGS]
CASES += [("plain", name, None) for name in ("gspo", "gmpo", "cispo")]  # ratios of responses
CASES += [("blocked", "dapo", (2, 2, 1)), ("window-blocked", "dapo", (1, 2, 2))]
IN_CI = ("window-blocked", "dapo", None)  # which masks and cuts most


@pytest.mark.parametrize(
    ("name", "preset", "sizes"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case != IN_CI)) for case in CASES],
)
def test_loss_gradient_and_scores_are_those_of_separate_prompts(
    name, preset, sizes, one_device, monkeypatch
):
    monkeypatch.setattr(blockwise_attention, "BLOCK", 32)
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    config, algorithm, mesh, microbatches = CONFIGS[name], algorithms.preset(preset), one_device, 1
    if config.experts:
        algorithm.router_balance_coefficient = 0.1
    if sizes:
        fsdp, tensor, context = sizes
        mesh = make_mesh(1, fsdp, tensor, jax.devices()[:4], context=context)
        microbatches = 8
    policy = make_policy(mesh, config, algorithm)
    assert_same(policy, make_params(config), algorithm, SEGMENTS, microbatches)


def test_a_prompt_is_packed_once_and_every_response_once():
    rollouts, _ = pack(SEGMENTS, ROW_TOKENS, 64, share_prompts=True)
    separate, _ = pack(SEGMENTS, ROW_TOKENS, 64)
    taken, expected = (
        take_tokens(packed.tokens, packed.response_index) for packed in (rollouts, separate)
    )
    for shared, alone in zip(taken, expected, strict=True):
        np.testing.assert_array_equal(shared, alone)
    used = int((rollouts.segment_ids > 0).sum())
    assert used < 0.75 * int((separate.segment_ids > 0).sum())
    # 40 + 4 x 1 + 57 tokens, and so on: a group that fits into a row repeats nothing.
    first = np.flatnonzero(rollouts.tokens[0, :, 0] == PROMPTS[0][0])
    assert len(first) >= 1
    own = rollouts.prompt_ids == rollouts.segment_ids
    assert ((rollouts.prompt_ids > 0) == (rollouts.segment_ids > 0)).all()
    assert (rollouts.response_index[own & (rollouts.positions < 2)] < 0).sum() > 0


def test_a_group_larger_than_a_row_is_split_and_fills_it():
    segments = [
        Segment(make_prompt(0, list(range(2, 22))), Completion(np.full(30, 3, np.int32),
        np.zeros(30, np.float32), False, 0, ""), i) for i in range(9)
    ]  # fmt: skip
    rollouts, _ = pack(segments, 120, 8, share_prompts=True)
    filled = (rollouts.segment_ids[0] > 0).sum(axis=1)
    assert filled[filled > 0].tolist() == [19 + 3 * 31] * 3
    separate, _ = pack(segments, 120, 8)
    assert ((separate.segment_ids[0] > 0).sum(axis=1) > 0).sum() == 5


def test_prompts_are_shared_if_that_is_less_work_and_attention_supports_it():
    config = Config(packing=Packing(ROW_TOKENS, 4))

    def choose_packing(config, decoder, *updates):
        return choose_rows(updates, *row_choice(config, decoder, 1))

    long = [s for s in SEGMENTS if len(s.prompt.tokens) > 20]
    short = [s for s in SEGMENTS if s.prompt.index == 4]
    assert choose_packing(config, TINY, long).share_prompts
    assert not choose_packing(config, DELTA, long).share_prompts  # a state does not branch
    assert not choose_packing(config, TINY, short).share_prompts
    off = dataclasses.replace(config, packing=Packing(ROW_TOKENS, 4, False))
    assert not choose_packing(off, TINY, long).share_prompts
    for kernel in ("splash", "cudnn"):
        sliding = dataclasses.replace(TINY, attention=kernel, window=7)
        assert not choose_packing(config, sliding, long).share_prompts
    fused = dataclasses.replace(TINY, attention="cudnn")
    assert not choose_packing(config, fused, long).share_prompts
    assert splash_attention.shared_cost(64) == 1 and splash_attention.shared_cost(128) == 1.5
    assert shares_prompts("blocked", True) and shares_prompts("splash", False)
    rollouts, used = pack_updates([long, short], choose_packing(config, TINY, long, short))
    assert rollouts.prompt_ids is not None and rollouts.prompt_ids.shape == rollouts.tokens.shape
    assert jnp.asarray(used).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_an_update_that_scores_its_old_policy_itself_has_the_same_gradient(name, one_device):
    algorithm = dataclasses.replace(algorithms.PRESETS[name](), importance_cap=2.0)
    learner = make_policy(one_device, TINY, algorithm)
    params = jax.device_put(make_params(TINY), learner.shardings.params)
    batch, used = make_batches(algorithm, SEGMENTS)[1]
    old = np.asarray(learner.score(params, batch.scored.rollouts, used).values)
    scored, own = (
        batch.replace(scored=batch.scored.replace(old_logprobs=values))
        for values in (old, np.full_like(old, NOT_SCORED))
    )
    (expected, before), (actual, after) = (
        jax.device_get(learner.differentiate(params, b, used)) for b in (scored, own)
    )
    assert_close((actual, after.means["loss"]), (expected, before.means["loss"]), 1e-5)


def test_only_what_is_read_before_the_first_update_is_scored_before_it():
    dapo = algorithms.dapo()
    assert dapo.scored_minibatches(4) == range(1, 4) and not dapo.scored_minibatches(1)
    for change in ({"kl": "reward"}, {"trained_responses": "pairs"}, {"distillation": "reverse"}):
        assert dataclasses.replace(dapo, **change).scored_minibatches(4) == range(4)
    assert not dataclasses.replace(dapo, old_logprobs="sampler").scored_minibatches(4)
