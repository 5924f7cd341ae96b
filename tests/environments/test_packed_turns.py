"""Trajectories in packed rows: observations have no loss, and estimators step over them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_prompt
from learners import ADVANTAGES, logprobs_alone, make_batch, make_learner, place

from dapo_jax import algorithms
from dapo_jax.config.experiment import Config, Environment, Reward
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.packing import Segment, pack, place_tokens, take_tokens
from dapo_jax.learner.policy import policy_objective
from dapo_jax.rewards.group_rewards import reward_group
from dapo_jax.types.structs import Completion, Turn, Verdict

RNG = np.random.default_rng(11)
# Tokens of each trajectory's turns: drawn, observed, drawn, ...
TURNS = [(3, 2, 4), (5,), (1, 4, 1, 1, 2), (2, 1, 2), (6,), (1, 1, 1)]


def trajectory(counts, sample):
    turns = tuple(Turn(i % 2 == 0, count, "") for i, count in enumerate(counts))
    tokens = RNG.integers(2, 20, sum(counts)).astype(np.int32)
    logprobs = RNG.normal(-2, 0.5, len(tokens)).astype(np.float32)
    several = turns if len(turns) > 1 else ()
    return Completion(tokens, logprobs, False, 0, "", sample, turns=several)


SEGMENTS = [
    Segment(make_prompt(i // 2, [3 + i, 4]), trajectory(counts, i % 2), i)
    for i, counts in enumerate(TURNS)
]
DRAWN = [sum(counts[::2]) for counts in TURNS]


def test_a_trajectory_is_one_segment_and_its_observations_are_off_the_response():
    rollouts, _ = pack(SEGMENTS, 20, 2)
    index, rows = rollouts.response_index.reshape(-1, 20), rollouts.tokens.reshape(-1, 20)
    segments = rollouts.segment_ids.reshape(-1, 20)
    positions = rollouts.positions.reshape(-1, 20)
    for i, segment in enumerate(SEGMENTS):
        row = int(np.flatnonzero((index == i).any(axis=1))[0])
        number = segments[row][index[row] == i][0]
        whole = segments[row] == number
        expected = np.concatenate([segment.prompt.tokens, segment.completion.tokens])
        np.testing.assert_array_equal(rows[row][whole], expected)
        np.testing.assert_array_equal(positions[row][whole], np.arange(len(expected)))
        drawn = np.concatenate([np.zeros(2, bool), segment.completion.is_sampled])
        np.testing.assert_array_equal(index[row][whole] == i, drawn)
        assert len(segment.completion) == DRAWN[i]


@pytest.mark.parametrize("preset", ["dapo", "dr_grpo", "gspo", "luspo", "sapo"])
def test_weights_count_drawn_tokens_and_the_gradient_of_an_observation_is_zero(preset):
    algorithm = algorithms.preset(preset)
    batch, _ = make_batch(algorithm, rows=4, microbatches=1, segments=SEGMENTS)
    index = np.asarray(batch.scored.rollouts.response_index)
    weights = np.asarray(batch.loss_weights)
    assert not weights[index < 0].any() and (weights[index >= 0] > 0).all()
    own = [taken.sum() for taken in take_tokens(weights, index)]
    total, count = sum(DRAWN), len(DRAWN)
    if preset == "dapo":
        expected = [n / total for n in DRAWN]
    elif preset in ("dr_grpo", "luspo"):
        expected = [n * own[0] / DRAWN[0] for n in DRAWN]
    else:
        expected = [1 / count] * count
    np.testing.assert_allclose(own, expected, rtol=1e-5)
    one = jax.tree.map(lambda array: jnp.asarray(array[0]), batch)
    noise = jnp.asarray(RNG.normal(0, 0.2, one.loss_weights.shape), jnp.float32)
    where = one.scored.rollouts.response_index < 0
    logprobs = jnp.where(where, jnp.nan, one.scored.old_logprobs + noise)

    def loss(logprobs):
        return policy_objective(algorithm, one, logprobs, jnp.zeros_like(logprobs))[0]

    gradient = np.asarray(jax.grad(loss)(logprobs))
    assert (gradient[np.asarray(where)] == 0).all()
    assert np.isfinite(gradient).all() and gradient.any()


def test_parameters_feel_an_observation_as_context_alone(tiny_params, one_device):
    """The gradient is that of the drawn tokens' log-probs, written out for whole trajectories."""
    learner = make_learner(one_device, algorithms.reinforce())
    batch, used = make_batch(algorithms.reinforce(), segments=SEGMENTS)
    found = learner.differentiate(place(tiny_params, learner), batch, used)[0]

    def loop(params):
        total = 0.0
        for i, segment in enumerate(SEGMENTS):
            tokens = np.concatenate([segment.prompt.tokens, segment.completion.tokens])
            row = np.pad(tokens, (0, 24 - len(tokens)))
            logprobs = logprobs_alone(params, row, len(tokens))[2 : len(tokens)]
            total -= ADVANTAGES[i] * (logprobs * segment.completion.is_sampled).sum()
        return total / len(DRAWN)  # its mean is over responses

    expected = jax.jit(jax.grad(loop))(tiny_params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, np.asarray(b).reshape(a.shape), atol=2e-5)


# --- estimators ----------------------------------------------------------------------------------


def by_trajectory(values, index):
    return [one.tolist() for one in take_tokens(values, index)]


def loop_gae(rewards, values, gamma, lam):
    """Generalised advantages of one trajectory's drawn tokens."""
    gains, following, gain = [], 0.0, 0.0
    for reward, value in zip(rewards[::-1], values[::-1], strict=True):
        gain = reward + gamma * following - value + gamma * lam * gain
        gains.append(gain)
        following = value
    return gains[::-1]


@pytest.mark.parametrize("advantage", ["reward_to_go", "gae", "length_adaptive_gae"])
def test_estimators_step_over_observations(advantage):
    changes = {"advantage": advantage, "gamma": 0.9, "whiten": False}
    algorithm = algorithms.ppo() if "gae" in advantage else algorithms.reinforce_pp()
    algorithm = dataclasses.replace(algorithm, **changes)
    rollouts, _ = pack(SEGMENTS, 20, 2)
    index = np.asarray(rollouts.response_index)
    earned, steps = RNG.normal(size=len(TURNS)), RNG.normal(size=index.shape)
    values = np.where(index >= 0, RNG.normal(size=index.shape), np.nan)
    feedback = gather_feedback(
        index,
        earned,
        earned_by_tokens=np.where(index >= 0, steps, np.nan),
        groups=np.arange(len(TURNS)) // 2,
        correct=earned > 0,
        values=values,
    )
    advantages, returns = estimate(algorithm, feedback)
    assert not advantages[index < 0].any()
    for i, found in enumerate(by_trajectory(advantages, index)):
        rewards = by_trajectory(steps, index)[i]
        rewards[-1] += earned[i] - sum(rewards)
        own = by_trajectory(values, index)[i]
        if advantage == "reward_to_go":
            expected = loop_gae(rewards, [0.0] * len(rewards), 0.9, 1.0)
        else:
            lam = algorithm.lambda_policy
            if advantage != "gae":
                lam = max(0.0, 1 - 1 / (algorithm.lambda_alpha * DRAWN[i]))
            expected = loop_gae(rewards, own, 0.9, lam)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if returns is not None:
        assert not returns[index < 0].any()


def test_rewards_of_steps_stand_on_the_ends_of_their_turns():
    """And are what `reward_to_go` adds up; what a function gave tokens is added to them."""
    config = Config(
        environment=Environment(name="x:Y", rewards="steps"),
        reward=Reward(parts="environment=2,rule=1"),
    )
    completions, given, expected = [], [], []
    for segment, counts in zip(SEGMENTS, TURNS, strict=True):
        drawn = counts[::2]
        rewards = RNG.normal(size=len(drawn) - (len(drawn) == 3))  # the last turn of some was cut
        own = RNG.normal(size=sum(drawn)) if len(drawn) == 2 else None
        placed = np.zeros(sum(drawn)) if own is None else own.copy()
        for i, reward in enumerate(rewards):
            placed[sum(drawn[: i + 1]) - 1] += 2 * reward
        completions.append(dataclasses.replace(segment.completion, rewards=tuple(rewards)))
        given.append(Verdict(True, "1", token_rewards=None if own is None else own.tolist()))
        expected.append(placed)
    group = reward_group(config, SEGMENTS[0].prompt, tuple(completions), tuple(given))
    sums = [2 * sum(completion.rewards) for completion in completions]
    np.testing.assert_allclose(group.reward_parts["environment"], sums)
    for found, placed in zip(group.token_rewards, expected, strict=True):
        np.testing.assert_allclose(found, placed)
    rollouts, _ = pack(SEGMENTS, 20, 2)
    index = np.asarray(rollouts.response_index)
    feedback = gather_feedback(
        index,
        group.rewards,
        earned_by_tokens=place_tokens(group.token_rewards, index),
        groups=np.arange(len(TURNS)) // 2,
        correct=group.correct,
    )
    changes = {"advantage": "reward_to_go", "gamma": 1.0, "whiten": False}
    algorithm = dataclasses.replace(algorithms.reinforce_pp(), **changes)
    found = by_trajectory(estimate(algorithm, feedback)[0], index)
    for own, placed, reward in zip(found, expected, group.rewards, strict=True):
        placed[-1] += reward - placed.sum()  # the verifier's
        np.testing.assert_allclose(own, placed[::-1].cumsum()[::-1], atol=1e-6)
