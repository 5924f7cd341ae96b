"""What must be equal: methods that coincide, and one batch however it is packed and split."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, make_prompt

from dapo_jax import algorithms
from dapo_jax.algorithms import PRESETS, dapo
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner.advantages import ESTIMATORS, estimate, gather_feedback
from dapo_jax.learner.batches import ScoredBatch
from dapo_jax.learner.critic import critic_learner, scalar_config
from dapo_jax.learner.losses import k2, k3, policy_loss, response_weights
from dapo_jax.learner.minibatches import make_batch, trained_tokens
from dapo_jax.learner.packing import Segment, pack, place_tokens
from dapo_jax.learner.policy import PolicySettings, policy_learner, policy_objective
from dapo_jax.model.decoder import init_params
from dapo_jax.structs import Completion

BUDGET = 14
LENGTHS = [5, 1, 0, 14, 7, 9, 3, 12, 2, 6]
CORRECT = [True, False, False, True, True, False, False, True, True, False]


def make_segments():
    """Groups of two; response 3 is truncated."""
    rng, segments = np.random.default_rng(1), []
    for i, n in enumerate(LENGTHS):
        prompt = make_prompt(i // 2, rng.integers(2, 32, 2 + i % 4).tolist())
        tokens = rng.integers(2, 32, n).astype(np.int32)
        sampler = rng.normal(-3, 0.5, n).astype(np.float32)
        done = Completion(tokens, sampler, i == 3, 0, "")
        segments.append(Segment(prompt, done, i, CORRECT[i]))
    return segments


SEGMENTS = make_segments()


def noise(seed, scale):
    return [np.random.default_rng([seed, i]).normal(0, scale, n) for i, n in enumerate(LENGTHS)]


def make_update(algorithm, shape=(1, 16, 20), old=None, spread_of_old=0.3):
    """A whole minibatch [M, R, T]: feedback, advantages, weights. Returns it and the used M.

    Args:
        old: log-probs per response, near which old and reference ones lie; None: the sampler's.
        spread_of_old: how far the old log-probs are from those.
    """
    rollouts, used = pack(SEGMENTS, shape[2], shape[1], shape[0])
    index = rollouts.response_index
    centre = [s.completion.sampler_logprobs for s in SEGMENTS] if old is None else old

    def near(seed, scale):
        parts = noise(seed, scale)
        return place_tokens([a + b for a, b in zip(centre, parts, strict=True)], index)

    olds, references = near(1, spread_of_old), near(2, 0.5)
    values = place_tokens(noise(3, 1.0), index) if algorithm.critic else None
    penalties = 0.1 * (olds - references) if algorithm.kl == "reward" else None
    feedback = gather_feedback(
        index,
        np.random.default_rng(4).normal(size=len(SEGMENTS)),
        penalties=penalties,
        log_ratios=olds - references,
        groups=np.array([s.prompt.index for s in SEGMENTS]),
        correct=np.array([s.correct for s in SEGMENTS]),
        reward_parts=np.random.default_rng(5).normal(size=(2, len(SEGMENTS))),
        part_weights=np.array([1.0, -0.5]),
        trained=place_tokens(trained_tokens(SEGMENTS, algorithm), index) > 0,
        values=values,
    )
    estimates = estimate(algorithm, feedback)
    reference = np.float32(references) if algorithm.reference else None
    values = None if values is None else np.float32(values)
    scored = ScoredBatch(rollouts, np.float32(olds), reference, values)
    return make_batch(scored, SEGMENTS, estimates, algorithm, BUDGET), used


def first_rows(batch):
    return jax.tree.map(lambda array: array[0], batch)


def objective_gradient(algorithm, batch, logprobs):
    """By the log-probs, in float64; the entropy is 1 everywhere."""
    with jax.enable_x64(True):
        return jax.grad(lambda x: policy_objective(algorithm, batch, x, jnp.ones_like(x))[0])(
            np.float64(logprobs)
        )


# --- methods that coincide -------------------------------------------------------------------

PLAIN = {"dynamic_sampling": False, "overlong_punishment": False}


def test_dapo_with_its_changes_off_is_grpo_with_beta_zero():
    off = dataclasses.replace(
        dapo(), clip_high=0.2, aggregate="sequence_mean", dual_clip=0.0, **PLAIN
    )
    beta_zero = dataclasses.replace(algorithms.grpo(), kl_coefficient=0.0)
    assert off == dataclasses.replace(beta_zero, kl="none", reference=False)
    batches = [first_rows(make_update(algorithm)[0]) for algorithm in (off, beta_zero)]
    logprobs = batches[0].scored.rollouts.sampler_logprobs
    found, expected = (
        objective_gradient(algorithm, batch, logprobs)
        for algorithm, batch in zip((off, beta_zero), batches, strict=True)
    )
    np.testing.assert_array_equal(found, expected)
    full = objective_gradient(dapo(), first_rows(make_update(dapo())[0]), logprobs)
    assert np.abs(full - found).max() > 1e-3 and found.any()


def feedback_of(rewards, groups, lengths, **known):
    index = np.repeat(np.arange(len(lengths)), lengths)[None, None]
    rewards = np.float64(rewards)
    known |= {"correct": rewards > 0, "groups": np.array(groups)}
    return gather_feedback(index, rewards, **known)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_leave_one_out_is_centred_times_g_over_g_minus_one(size):
    rewards = np.random.default_rng(0).normal(size=3 * size)
    known = feedback_of(rewards, np.arange(3 * size) % 3, [2] * 3 * size)
    left_out, centred = (
        ESTIMATORS[name](dapo(), known) for name in ("leave_one_out", "group_centre")
    )
    np.testing.assert_allclose(left_out, centred * size / (size - 1), rtol=1e-12, atol=1e-12)


def test_a_zscore_is_the_centred_reward_up_to_a_factor_per_group():
    """With rewards 0 and 1 the factor is 1 / sqrt(p (1 - p) G / (G - 1))."""
    rewards = [1, 0, 0, 0, 1, 1, 0, 0]
    known = feedback_of(rewards, [0, 0, 0, 0, 1, 1, 1, 1], [1] * 8)
    scored, centred = (ESTIMATORS[name](dapo(), known) for name in ("group_zscore", "group_centre"))
    stds = np.repeat(np.sqrt(np.array([3 / 16, 1 / 4]) * 4 / 3), 4)
    np.testing.assert_allclose(scored[0, 0], centred[0, 0] / (stds + 1e-6), rtol=1e-12)


def test_gae_with_both_at_one_is_return_minus_value():
    lengths = [4, 1, 6]
    values, penalties = (np.random.default_rng(i).normal(size=(1, 1, 11)) for i in range(2))
    known = feedback_of([1.0, -1.0, 0.5], [0, 0, 0], lengths, values=values, penalties=penalties)
    algorithm = dataclasses.replace(algorithms.ppo(), lambda_policy=1.0, lambda_value=1.0)
    to_go = ESTIMATORS["reward_to_go"](algorithm, known)
    np.testing.assert_allclose(
        ESTIMATORS["gae"](algorithm, known), to_go - values, rtol=1e-12, atol=1e-12
    )
    returns = estimate(algorithm, known)[1]
    np.testing.assert_allclose(returns, to_go, rtol=1e-6)


def test_without_values_and_discount_reward_to_go_is_the_response_reward():
    known = feedback_of([1.0, -1.0, 0.5], [0, 0, 0], [4, 1, 6])
    found = [ESTIMATORS[name](dapo(), known) for name in ("reward_to_go", "reward")]
    np.testing.assert_array_equal(*found)


def test_one_token_answers_make_gspos_ratio_grpos():
    rng = np.random.default_rng(0)
    # Rows of a prompt token and an answer token; the last row has an answer without loss.
    segments = np.repeat(np.arange(1, 5), 2)[None].repeat(3, 0)
    mask = np.tile([0.0, 1.0], 4)[None].repeat(3, 0)
    mask[2, 7] = 0
    old, advantages = rng.normal(-2, 1, mask.shape), rng.normal(size=mask.shape)
    logprobs = old + rng.normal(0, 0.3, mask.shape)
    token = dapo()
    sequence = dataclasses.replace(token, ratio="sequence")

    def total(x, algorithm):
        return (policy_loss(algorithm, x, old, advantages, mask, segments)[0] * mask).sum()

    with jax.enable_x64(True):
        found = [jax.value_and_grad(total)(logprobs, a) for a in (sequence, token)]
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-12)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-12, atol=1e-15)
    assert np.count_nonzero(found[1][1]) > 5


@pytest.mark.parametrize("name", [n for n in PRESETS if PRESETS[n]().distillation == "none"])
def test_on_policy_the_policy_term_has_gradient_minus_weights_times_advantages(name):
    algorithm = dataclasses.replace(PRESETS[name](), pass_k=1)  # of groups of two
    batch = first_rows(make_update(algorithm)[0])
    rollouts, weights = batch.scored.rollouts, np.float64(batch.loss_weights)
    old = np.float64(rollouts.sampler_logprobs)

    def total(x):
        losses, seen = policy_loss(
            algorithm, x, old, np.float64(batch.advantages), weights, rollouts.segment_ids
        )
        return (weights * losses).sum(), {name: seen[name] for name in seen if name != "ratio"}

    with jax.enable_x64(True):
        found, clipped = jax.grad(total, has_aux=True)(old)
    np.testing.assert_allclose(found, -weights * batch.advantages, rtol=1e-9, atol=1e-15)
    assert np.any(found) and not any(np.any(side) for side in clipped.values())


def test_on_policy_a_clip_of_zero_still_passes_the_gradient():
    algorithm = dataclasses.replace(dapo(), clip_low=0.0, clip_high=0.0)
    old, advantages = np.random.default_rng(0).normal(size=(2, 3, 4))
    ones = np.ones((3, 4))
    found = jax.grad(lambda x: policy_loss(algorithm, x, old, advantages, ones, ones > 0)[0].sum())(
        old.astype(np.float32)
    )
    np.testing.assert_allclose(found, -advantages, rtol=1e-5)


def test_responses_of_one_length_make_all_means_over_tokens_equal():
    tokens, groups, correct = np.full(6, 7), np.repeat([0, 1, 2], 2), np.ones(6, bool)
    names = ("token_mean", "token_mean_per_group", "sequence_mean", "token_sum_over_budget")
    weights = [
        response_weights(dataclasses.replace(dapo(), aggregate=name), tokens, groups, correct, 7)
        for name in names
    ]
    np.testing.assert_allclose(weights, np.full((4, 6), 1 / 42))


def test_rft_on_policy_descends_the_nll_of_right_responses():
    batch = first_rows(make_update(algorithms.rft())[0])
    right = np.isin(batch.scored.rollouts.response_index, np.flatnonzero(CORRECT))
    logprobs = batch.scored.rollouts.sampler_logprobs
    found = objective_gradient(algorithms.rft(), batch, logprobs)
    np.testing.assert_allclose(found, -1.0 * right / right.sum(), rtol=1e-6)


def test_dpo_on_policy_descends_the_mean_loss_over_pairs():
    """The gradient of the mean of -log sigmoid(beta margin), by JAX itself."""
    algorithm = algorithms.dpo()
    batch = first_rows(make_update(algorithm)[0])
    index, old = batch.scored.rollouts.response_index, np.float64(batch.scored.old_logprobs)
    reference = np.float64(batch.scored.reference_logprobs)
    pairs = [(0, 1), (4, 5), (7, 6), (8, 9)]  # of the second group, one response is empty

    def loss(logprobs):
        ratios = [jnp.where(index == i, logprobs - reference, 0.0).sum() for i in range(10)]
        margins = jnp.stack([ratios[right] - ratios[wrong] for right, wrong in pairs])
        return -jax.nn.log_sigmoid(algorithm.preference_beta * margins).mean()

    with jax.enable_x64(True):
        expected = jax.grad(loss)(old)
    found = objective_gradient(algorithm, batch, old)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)  # advantages are float32


def test_near_the_reference_k2_and_k3_are_one():
    logprobs = np.random.default_rng(0).normal(-2, 1, 50)
    reference = logprobs + np.random.default_rng(1).normal(0, 1e-3, 50)
    with jax.enable_x64(True):
        slopes = [jax.grad(lambda x, f=f: f(x, reference).sum())(logprobs) for f in (k2, k3)]
    np.testing.assert_allclose(*slopes, rtol=5e-3)


# --- packing, microbatches, devices ----------------------------------------------------------

# Terms only add up: what breaks one of them shows in the sum.
DIFFERENT = {
    "sequence ratio": algorithms.gspo(),
    "positive NLL, KL in the loss, entropy, importance": dataclasses.replace(
        algorithms.vapo(),
        reference=True,
        kl="loss",
        kl_coefficient=0.04,
        entropy_coefficient=0.01,
        importance_cap=2.0,
    ),
    "pairs": algorithms.dpo(),
}


def assert_close(left, right, tolerance):
    """Every array within `tolerance` of the other, relative to its largest entry."""

    def check(a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(b).max() > 0
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()

    jax.tree.map(check, left, right)


def place(params, learner):
    return jax.device_put(params, learner.shardings.params)


def make_learner(algorithm, mesh):
    return policy_learner(
        PolicySettings(algorithm, Compute()), Optimizer(learning_rate=1e-3), TINY, mesh
    )


@pytest.mark.parametrize("name", PRESETS)
def test_no_packing_changes_what_a_response_is_told(name):
    """Its tokens' advantages, returns and weights of every kind."""
    found = []
    for shape in ((1, 16, 20), (12, 1, 40), (4, 4, 20)):
        batch, _ = make_update(PRESETS[name](), shape)
        index = batch.scored.rollouts.response_index
        told = dataclasses.replace(batch, scored=batch.scored.values)
        found.append([array[index == i] for array in jax.tree.leaves(told) for i in range(10)])
    for other in found[1:]:
        for left, right in zip(other, found[0], strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def scores(tiny_params, one_device):
    """What the policy says of each response: old log-probs near it are hardly clipped."""
    learner = make_learner(dapo(), one_device)
    rollouts, used = pack(SEGMENTS, 20, 16, 1)
    found = np.asarray(learner.score(place(tiny_params, learner), rollouts, used).values)
    return [found[rollouts.response_index == i] for i in range(len(LENGTHS))]


def gradients(make, params, algorithm, meshes, **options):
    """Of the batch in one piece on one device; of pieces, in shorter rows, on eight devices."""
    found = []
    for shape, mesh in zip(((1, 8, 40), (4, 4, 20)), meshes, strict=True):
        learner = make(algorithm, mesh)
        batch, used = make_update(algorithm, shape, **options)
        assert (used == 1) == (shape[0] == 1)
        found.append(jax.device_get(learner.gradient(place(params, learner), batch, used)))
    return found


@pytest.mark.parametrize("algorithm", DIFFERENT.values(), ids=DIFFERENT)
def test_no_split_packing_or_device_count_changes_the_gradient(
    algorithm, scores, tiny_params, one_device, eight_devices
):
    # Near enough for GSPO's narrow clip to pass some responses and cut others.
    near = {"old": scores, "spread_of_old": 1e-3 if algorithm.ratio == "sequence" else 0.3}
    meshes = (one_device, eight_devices)
    whole, parts = gradients(make_learner, tiny_params, algorithm, meshes, **near)
    assert_close(parts, whole, 1e-5)


def test_no_split_packing_or_device_count_changes_the_critics_gradient(one_device, eight_devices):
    config = scalar_config(TINY)
    params = nn.unbox(init_params(config, jax.random.key(0)))
    params |= {"score": jax.random.normal(jax.random.key(1), params["score"].shape)}

    def make(algorithm, mesh):
        return critic_learner(algorithm, Optimizer(learning_rate=1e-3), config, mesh)

    whole, parts = gradients(make, params, algorithms.ppo(), (one_device, eight_devices))
    assert_close(parts, whole, 1e-5)
