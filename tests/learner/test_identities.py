"""What must be equal: methods that coincide, and one batch however it is packed and split."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from conftest import TINY
from learners import BUDGET, LENGTHS, assert_close, make_learner, place
from policy_loops import bounded_exp, cut, mean, pushes_out
from row_files import read_table

from dapo_jax import algorithms
from dapo_jax.config.algorithm import OWN_FUNCTIONS
from dapo_jax.config.algorithms import PRESETS, dapo
from dapo_jax.config.experiment import Optimizer
from dapo_jax.learner.advantages import ESTIMATORS, Estimates, estimate, gather_feedback
from dapo_jax.learner.batches import OBSERVED, ScoredBatch
from dapo_jax.learner.critic import critic_learner, scalar_config
from dapo_jax.learner.losses import (
    KL_ESTIMATORS,
    LOSS_WEIGHTS,
    RATIOS,
    REGIONS,
    WEIGHTS,
    policy_loss,
)
from dapo_jax.learner.minibatches import entropy_bonus, make_batch, trained_tokens
from dapo_jax.learner.packing import pack, place_tokens
from dapo_jax.learner.policy import policy_objective
from dapo_jax.model.decoder import Decoder, head_kernel
from dapo_jax.types.structs import Turn

# Groups of two; response 3 is truncated.
CORRECT = [True, False, False, True, True, False, False, True, True, False]
SEGMENTS = [
    segment._replace(correct=right)
    for segment, right in zip(learners.SEGMENTS, CORRECT, strict=True)
]


def noise(seed, scale):
    return [np.random.default_rng([seed, i]).normal(0, scale, n) for i, n in enumerate(LENGTHS)]


def make_update(algorithm, shape=(1, 16, 20), near=None, spread_of_old=0.3, seed=0):
    """A whole minibatch [M, R, T]: feedback, advantages, weights. Returns it and the used M.

    Args:
        near: log-probs per response, near which those of the sampler, the old policy and the
            reference lie; None: the sampler's, near which the other two lie.
        spread_of_old: how far the old log-probs are from those.
    """
    rollouts, used = pack(SEGMENTS, shape[2], shape[1], shape[0])
    index = rollouts.response_index
    centre = [s.completion.sampler_logprobs for s in SEGMENTS] if near is None else near

    def add_noise(seed, scale):
        parts = noise(seed, scale)
        added = place_tokens([a + b for a, b in zip(centre, parts, strict=True)], index)
        return np.float64(np.float32(added))

    olds = add_noise(1, spread_of_old)
    references = add_noise(2, 0.5)
    # From near to so far that a ratio would overflow.
    gaps = 3 * np.sinh(place_tokens(noise(9, 2.5), index))
    teachers = np.float64(np.float32(olds + gaps))
    if near is not None:
        sampler_logprobs = np.float32(add_noise(6, 0.2))
        rollouts = dataclasses.replace(rollouts, sampler_logprobs=sampler_logprobs)
    values = place_tokens(noise(3, 1.0), index) if algorithm.critic else None
    feedback = gather_feedback(
        index,
        np.random.default_rng(4).normal(size=len(SEGMENTS)),
        penalties=0.1 * (olds - references) if algorithm.kl == "reward" else None,
        log_ratios=olds - references,
        groups=np.array([s.prompt.index for s in SEGMENTS]),
        correct=np.array(CORRECT),
        reward_parts=np.random.default_rng(5).normal(size=(2, len(SEGMENTS))),
        part_weights=np.array([1.0, -0.5]),
        trained=place_tokens(trained_tokens(SEGMENTS, algorithm), index) > 0,
        values=values,
        energies=place_tokens([np.abs(own) for own in noise(7, 1.0)], index),
        sampler_log_ratios=olds - rollouts.sampler_logprobs,
        teacher_log_ratios=teachers - olds if algorithm.reads_teacher else None,
    )
    estimates = estimate(algorithm, feedback)
    reference = np.float32(references) if algorithm.reference else None
    values = None if values is None else np.float32(values)
    scores = {"reference": reference, "critic": values}
    entropies = np.float32(place_tokens([np.abs(own) for own in noise(8, 1.0)], index))
    if algorithm.reads_teacher:
        scores["teacher"] = np.float32(teachers)
    scored = ScoredBatch(rollouts, np.float32(olds), scores, entropies=entropies)
    return make_batch(scored, SEGMENTS, estimates, algorithm, BUDGET, seed=seed), used


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
NAMED = {
    "advantage": ESTIMATORS,
    "ratio": RATIOS,
    "region": REGIONS,
    "weight": WEIGHTS,
    "kl_estimator": KL_ESTIMATORS,
    "aggregate": LOSS_WEIGHTS,
}


def test_dapo_without_its_changes_is_grpo_with_beta_zero():
    off = dataclasses.replace(
        dapo(), clip_high=0.2, aggregate="sequence_mean", dual_clip=0.0, **PLAIN
    )
    assert off == dataclasses.replace(
        algorithms.grpo(), kl_coefficient=0.0, kl="none", reference=False
    )


def test_functions_of_the_user_have_the_gradient_of_the_named_ones_that_they_copy():
    plain = algorithms.grpo()
    own = dataclasses.replace(plain, **{k: table[getattr(plain, k)] for k, table in NAMED.items()})
    assert all(":" in getattr(own, field) for field in NAMED) and NAMED.keys() == {*OWN_FUNCTIONS}
    batches = [first_rows(make_update(algorithm)[0]) for algorithm in (plain, own)]
    jax.tree.map(np.testing.assert_array_equal, *batches)
    logprobs = batches[0].scored.rollouts.sampler_logprobs
    gradients = [objective_gradient(a, batches[0], logprobs) for a in (plain, own)]
    np.testing.assert_array_equal(*gradients)
    assert np.any(gradients[0])


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("dft", "gkd")])
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
        actual, clipped = jax.grad(total, has_aux=True)(old)
    np.testing.assert_allclose(actual, -weights * batch.advantages, rtol=1e-9, atol=1e-15)
    assert np.any(actual) and not any(np.any(side) for side in clipped.values())


# --- packing, microbatches, devices ----------------------------------------------------------

# Terms only add up: what breaks one of them shows in the sum.
DIFFERENT = {
    name: (dataclasses.replace(PRESETS[preset](), **changes), mark)
    for name, mark, preset, changes in read_table(__file__, "different terms")
}


@pytest.mark.parametrize("name", PRESETS)
def test_packing_does_not_change_the_advantages_and_weights_of_a_response(name):
    actual = []
    for shape in ((1, 16, 20), (12, 1, 40), (4, 4, 20)):
        batch, _ = make_update(PRESETS[name](), shape)
        index = batch.scored.rollouts.response_index
        values = dataclasses.replace(batch, scored=batch.scored.scores["critic"])
        actual.append([array[index == i] for array in jax.tree.leaves(values) for i in range(10)])
    for other in actual[1:]:
        for left, right in zip(other, actual[0], strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def scores(tiny_params, one_device):
    """Log-probs of each response under the policy: old ones near them are hardly clipped."""
    learner = make_learner(one_device)
    rollouts, used = pack(SEGMENTS, 20, 16, 1)
    actual = np.asarray(learner.score(place(tiny_params, learner), rollouts, used).values)
    return [actual[rollouts.response_index == i] for i in range(len(LENGTHS))]


def assert_gradients_are_close(make, params, algorithm, meshes, **options):
    """Compare the whole batch on one device with pieces, in shorter rows, on eight devices."""
    actual = []
    for shape, mesh in zip(((1, 8, 40), (4, 4, 20)), meshes, strict=True):
        learner = make(mesh, algorithm)
        batch, used = make_update(algorithm, shape, **options)
        assert (used == 1) == (shape[0] == 1)
        actual.append(jax.device_get(learner.differentiate(place(params, learner), batch, used)[0]))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(actual[0]))
    assert_close(actual[1], actual[0], 1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(algorithm, id=name, marks=[pytest.mark.slow] * (mark == "slow"))
        for name, (algorithm, mark) in DIFFERENT.items()
    ],
)
def test_no_split_packing_or_device_count_changes_the_gradient(
    algorithm, scores, tiny_params, one_device, eight_devices
):
    # Near enough for GSPO's narrow clip to pass some responses and cut others.
    spread_of_old = 1e-3 if algorithm.ratio == "sequence" else 0.3
    near = {"near": scores, "spread_of_old": spread_of_old}
    meshes = (one_device, eight_devices)
    assert_gradients_are_close(make_learner, tiny_params, algorithm, meshes, **near)


def test_no_split_packing_or_device_count_changes_the_critics_gradient(
    score_params, one_device, eight_devices
):
    def make(mesh, algorithm):
        return critic_learner(algorithm, Optimizer(learning_rate=1e-3), scalar_config(TINY), mesh)

    assert_gradients_are_close(make, score_params, algorithms.ppo(), (one_device, eight_devices))


# --- tokens without a gradient -------------------------------------------------------------------


def places_of(batch):
    """The trained tokens of a minibatch, in any order."""
    return list(zip(*np.nonzero(batch.loss_weights > 0), strict=True))


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_only_the_tokens_of_highest_entropy_keep_their_weight(fraction):
    """2506.01939, equation 5: an indicator; the sum is over the lengths of all."""
    plain = first_rows(make_update(dapo())[0])
    batch = first_rows(make_update(dataclasses.replace(dapo(), top_entropy_fraction=fraction))[0])
    entropies = {spot: float(plain.scored.entropies[spot]) for spot in places_of(plain)}
    threshold = sorted(entropies.values())[-math.ceil(fraction * len(entropies))]
    for spot, entropy in entropies.items():
        expected = plain.loss_weights[spot] if entropy >= threshold else 0.0
        assert batch.loss_weights[spot] == expected
    assert 0 < len(places_of(batch)) < len(entropies)


@pytest.mark.parametrize("limit", [0.01, 0.04])
def test_the_largest_squared_log_ratios_to_the_sampler_are_dropped(limit):
    """2510.01161, algorithm 1: of those that PPO may clip, until their mean is in the limit."""
    algorithm = dataclasses.replace(algorithms.m2po(), second_moment_limit=limit)
    plain, batch = (
        first_rows(make_update(each)[0])
        for each in (dataclasses.replace(algorithm, second_moment_limit=0.0), algorithm)
    )
    old, sampler = plain.scored.old_logprobs, plain.scored.rollouts.sampler_logprobs
    gaps = {p: float(old[p]) - float(sampler[p]) for p in places_of(plain)}
    masked = {p for p, gap in gaps.items() if gap * plain.advantages[p] > 0}
    assert 0 < len(masked) < len(gaps)
    kept = sorted(masked, key=lambda spot: gaps[spot] ** 2)
    while mean([gaps[spot] ** 2 for spot in kept]) > limit:
        kept.pop()
    assert set(places_of(batch)) == gaps.keys() - masked | set(kept) and 0 < len(kept) < len(masked)


def test_real_is_the_gradient_of_its_loss():
    """2602.05630: log(1 + sum+ e^(-s/t)) + log(1 + sum- e^(s/t)) per group, by differences."""
    algorithm, index = algorithms.real(), np.array([[[0, 0, -1, 1, 2, 2, 2, 3, -1, 4, 5, 5]]])
    groups, correct = np.array([7, 7, 7, 7, 9, 9]), np.array([True, True, False, False, True, True])
    ratios = np.random.default_rng(0).normal(0, 0.5, index.shape)
    known = {"groups": groups, "correct": correct, "sampler_log_ratios": ratios}
    advantages = estimate(algorithm, gather_feedback(index, np.zeros(6), **known)).advantages

    def loss(ratios):
        total = []
        for group, size in ((7, 4), (9, 2)):
            for sign in (1, -1):
                own = [i for i in range(6) if groups[i] == group and correct[i] == (sign > 0)]
                means = [mean(ratios[index == i].tolist()) for i in own]
                terms = [math.exp(-sign * s / algorithm.real_temperature) for s in means]
                total.append(size * math.log1p(math.fsum(terms)))
        return math.fsum(total)

    lengths = np.bincount(index[index >= 0])
    for spot in zip(*np.nonzero(index >= 0), strict=True):
        step = np.zeros(index.shape)
        step[spot] = 1e-5
        slope = (loss(ratios + step) - loss(ratios - step)) / 2e-5
        expected = -slope * lengths[index[spot]]
        assert advantages[spot] == pytest.approx(expected, rel=1e-6)


def test_an_old_policy_between_sampler_and_policy_moves_with_age():
    """AReaL: log p_old = log q + a / (a + 1) (log p - log q), a constant, a steps of age."""
    batch = first_rows(make_update(algorithms.grpo())[0])
    sampler = np.float64(batch.scored.rollouts.sampler_logprobs)
    logprobs = sampler + np.random.default_rng(0).normal(0, 0.2, sampler.shape)
    algorithm = algorithms.log_linear()
    for age in (0, 1, 3):
        shares = np.full(sampler.shape, age / (age + 1))
        scored = batch.scored.replace(old_logprobs=None)
        own = batch.replace(scored=scored, interpolation=shares)
        old = sampler + shares * (logprobs - sampler)
        known = batch.replace(scored=batch.scored.replace(old_logprobs=old))
        actual, expected = (objective_gradient(algorithm, each, logprobs) for each in (own, known))
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12)
    segments = [
        s._replace(completion=dataclasses.replace(s.completion, policy_step=4)) for s in SEGMENTS
    ]
    first = segments[0].completion
    mixed = dataclasses.replace(first, earlier=((2, 1), (3, 1)))
    segments[0] = segments[0]._replace(completion=mixed)
    rollouts, _ = pack(segments, 20, 16, 1)
    zeros = Estimates(np.zeros(rollouts.tokens.shape, np.float32))
    made = make_batch(ScoredBatch(rollouts, None), segments, zeros, algorithm, BUDGET, step=5)
    values = made.interpolation[rollouts.response_index == 0].tolist()
    rest = [0.5] * (len(first) - 2)
    assert values == pytest.approx([3 / 4, 2 / 3, *rest]) and len(rest) > 0


def test_what_was_observed_has_the_mean_of_its_negative_log_probs():
    """ECHO: cross-entropy on the tokens between turns, beside GRPO's loss on the drawn ones."""
    turns = (Turn(True, 2, "a"), Turn(False, 3, "b"), Turn(True, 1, "c"))
    done = dataclasses.replace(
        SEGMENTS[0].completion, tokens=np.arange(3, 9), sampler_logprobs=np.zeros(6), turns=turns
    )
    segments = [SEGMENTS[0]._replace(completion=done), *SEGMENTS[1:]]
    algorithm = dataclasses.replace(algorithms.echo(), kl="none", reference=False)
    rollouts, _ = pack(segments, 20, 16, 1)
    zeros = Estimates(np.zeros(rollouts.tokens.shape, np.float32))
    batch = make_batch(ScoredBatch(rollouts, None), segments, zeros, algorithm, BUDGET)
    observed = rollouts.response_index == OBSERVED
    assert observed.sum() == 3
    np.testing.assert_allclose(batch.nll_weights, np.where(observed, 0.1 / 3, 0.0), rtol=1e-6)
    batch = first_rows(batch)
    slopes = objective_gradient(algorithm, batch, np.full(batch.nll_weights.shape, -1.0))
    np.testing.assert_allclose(slopes, -np.float64(batch.nll_weights), rtol=1e-6)


def test_an_adaptive_bonus_seeks_its_entropy():
    """Skywork-OR1: the weight moves by a step towards the target, and acts up to it."""
    algorithm = dataclasses.replace(dapo(), entropy_target=0.3, entropy_step=0.01)
    index = np.array([[0, 0, -1]])
    feedback = gather_feedback(index, np.ones(1), groups=np.zeros(1, int), correct=np.ones(1, bool))
    weight, used = 0.0, []
    for entropy in (0.1, 0.3, 0.2, 0.5, 0.4, 0.9):
        scored = ScoredBatch(None, None, entropies=np.array([[entropy, entropy, 99.0]]))
        bonus, weight = entropy_bonus(algorithm, weight, scored, feedback)
        used.append((bonus, weight))
    expected = [(0, 0.01), (0.01, 0.01), (0.01, 0.02), (0, 0.01), (0, 0.0), (0, 0.0)]
    np.testing.assert_allclose(used, expected, atol=1e-12)
    batch, _ = make_update(algorithm)
    scored, estimates = batch.scored, Estimates(batch.advantages)
    own = make_batch(scored, SEGMENTS, estimates, algorithm, BUDGET, entropy_weight=0.02)
    np.testing.assert_allclose(own.entropy_weights, 0.02 * own.loss_weights, rtol=1e-6)
    rows = first_rows(own)
    slope = jax.grad(lambda e: policy_objective(algorithm, rows, rows.scored.old_logprobs, e)[0])
    entropies = jnp.zeros(rows.loss_weights.shape)
    np.testing.assert_allclose(-slope(entropies), rows.entropy_weights, rtol=1e-6)


def clipped(a, r):
    return 0.0 if pushes_out(a, r, 0.8, 1.2) else a * r


def evidence(a, d):
    """2604.03128, equations 14 and 15; the evidence has half of the weight."""
    return a * (0.5 + 0.5 * cut(bounded_exp(np.sign(a) * d), 0.8, 1.2))


# Coefficient of a token from A, d = log p_teacher - log p_old, p / p_old and p_old / p_sampler.
TAUGHT = {
    "on_policy_distillation": lambda a, d, r, drift: clipped(d, r),
    "beside whitened rewards": lambda a, d, r, drift: clipped(a + 0.7 * d, r),
    "sdft": lambda a, d, r, drift: d,  # 2601.19897: the sampled reverse KL
    "opsd": lambda a, d, r, drift: d,  # 2601.18734, with a mean over each response's tokens
    "sdpo": lambda a, d, r, drift: d * min(r, 2.0) * min(drift, 2.0),  # 2601.20802
    "rlsd": lambda a, d, r, drift: clipped(evidence(a, d), r),  # equation 16
}
REWARDED = dataclasses.replace(
    algorithms.on_policy_distillation(),
    advantage="group_zscore",
    whiten=True,
    distillation_coefficient=0.7,
)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_taught_policy_has_the_papers_gradient(name):
    algorithm = PRESETS.get(name, lambda: REWARDED)()
    batch = first_rows(make_update(algorithm)[0])
    plain = first_rows(make_update(dataclasses.replace(algorithm, distillation="none"))[0])
    index, sampler = batch.scored.rollouts.response_index, batch.scored.rollouts.sampler_logprobs
    old, teacher = (
        np.float64(x) for x in (batch.scored.old_logprobs, batch.scored.scores["teacher"])
    )
    logprobs = old + np.random.default_rng(0).normal(0, 0.5, old.shape)
    expected = np.zeros(old.shape)
    for p in zip(*np.nonzero(index >= 0), strict=True):
        ratios = np.exp(logprobs[p] - old[p]), np.exp(old[p] - sampler[p])
        gain = TAUGHT[name](float(plain.advantages[p]), teacher[p] - old[p], *ratios)
        count = sum(LENGTHS)
        if name in ("opsd", "rlsd"):  # over the tokens of the response, then over responses
            count = LENGTHS[index[p]] * sum(n > 0 for n in LENGTHS)
        expected[p] = -gain / count
    actual = objective_gradient(algorithm, batch, logprobs)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-9)
    _, metrics = policy_objective(algorithm, batch, logprobs, jnp.zeros_like(logprobs))
    gap = np.mean((old - teacher)[index >= 0])
    assert metrics["teacher_kl"].value() == pytest.approx(gap, rel=1e-4)


# --- tokens of high covariance (2505.22617), and energies ----------------------------------------


def make_pair(algorithm, shape=(1, 16, 20)):
    """A minibatch in one microbatch, without and with the choice, and current log-probs."""
    plain = dataclasses.replace(algorithm, covariance="none")
    pair = [first_rows(make_update(each, shape)[0]) for each in (plain, algorithm)]
    old = np.float64(pair[0].scored.old_logprobs)
    return *pair, old + np.random.default_rng(0).normal(0, 0.3, old.shape)


def loop_covariances(batch):
    """(log p - mean) (A - mean) of every trained token, with means over all of them."""
    places = list(zip(*np.nonzero(batch.loss_weights > 0), strict=True))
    logprobs = {place: float(batch.scored.old_logprobs[place]) for place in places}
    advantages = {place: float(batch.advantages[place]) for place in places}
    centres = mean(list(logprobs.values())), mean(list(advantages.values()))
    return {p: (logprobs[p] - centres[0]) * (advantages[p] - centres[1]) for p in places}


@pytest.mark.parametrize("fraction", [2e-4, 0.1, 0.5])
def test_kl_cov_pulls_back_the_tokens_of_largest_covariance(fraction):
    algorithm = dataclasses.replace(algorithms.kl_cov(), covariance_fraction=fraction)
    plain, batch, logprobs = make_pair(algorithm)
    covariances = loop_covariances(plain)
    count = max(1, int(fraction * len(covariances)))
    largest = sorted(covariances, key=lambda place: -covariances[place])[:count]
    expected = np.zeros(logprobs.shape)
    for p in covariances:
        ratio = np.exp(logprobs[p] - np.float64(batch.scored.old_logprobs[p]))
        pull = np.sign(logprobs[p] - np.float64(batch.scored.old_logprobs[p]))
        gain = ratio * np.float64(plain.advantages[p]) - (pull if p in largest else 0.0)
        expected[p] = -np.float64(batch.loss_weights[p]) * gain
    actual = objective_gradient(algorithm, batch, logprobs)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("fraction", [2e-4, 0.1, 1.0])
def test_clip_cov_removes_random_tokens_between_its_bounds(fraction):
    bounds = {"covariance_low": 0.1, "covariance_high": 0.6}
    algorithm = dataclasses.replace(algorithms.clip_cov(), covariance_fraction=fraction, **bounds)
    plain, batch, logprobs = make_pair(algorithm)
    covariances = loop_covariances(plain)
    between = {p for p, value in covariances.items() if 0.1 < value < 0.6}
    count = min(max(1, int(fraction * len(covariances))), len(between))
    before = objective_gradient(algorithm, plain, logprobs)
    after = objective_gradient(algorithm, batch, logprobs)
    chosen = {p for p in covariances if plain.advantages[p] != batch.advantages[p]}
    assert chosen <= between and len(chosen) == count < len(covariances)
    for p in covariances:
        assert after[p] == (0.0 if p in chosen else before[p])


def test_the_random_tokens_differ_between_minibatches_and_not_with_their_packing():
    algorithm = dataclasses.replace(
        algorithms.clip_cov(), covariance_fraction=0.1, covariance_low=0.0, covariance_high=9.0
    )

    def chosen(shape, seed=0):
        batch, _ = make_update(algorithm, shape, seed=seed)
        index = batch.scored.rollouts.response_index
        return [batch.advantages[index == i].tolist() for i in range(len(LENGTHS))]

    assert chosen((1, 16, 20)) == chosen((4, 4, 20)) == chosen((12, 1, 40))
    assert chosen((1, 16, 20)) != chosen((1, 16, 20), seed=1)


def test_an_energy_is_the_squared_gradient_of_the_logprob_by_the_logits(tiny_params, one_device):
    algorithm = algorithms.otb()
    learner = make_learner(one_device, algorithm)
    rollouts, used = pack(SEGMENTS, 20, 16, 1)
    scores = learner.score(place(tiny_params, learner), rollouts, used)
    rows = jax.tree.map(lambda array: array[0], rollouts)
    hidden = jax.jit(Decoder(TINY).apply)({"params": tiny_params}, *rows.inputs)
    logits = np.asarray(hidden) @ np.asarray(head_kernel(tiny_params))
    slope = jax.jit(jax.grad(lambda x, token: jax.nn.log_softmax(x)[token]))
    for row, column in zip(*np.nonzero(rows.response_index >= 0), strict=True):
        expected = np.sum(np.square(slope(logits[row, column - 1], rows.tokens[row, column])))
        np.testing.assert_allclose(scores.energies[0, row, column], expected, rtol=1e-4, atol=1e-6)
