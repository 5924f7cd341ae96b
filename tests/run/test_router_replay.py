"""Router replay in training: which routes an update takes, what it measures, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE
from learners import make_batch
from small_runs import equal, make_quick_config

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model.decoder import init_params
from dapo_jax.model.experts import BALANCE, REPLACED
from dapo_jax.run.run import train
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import unbox


@pytest.fixture(scope="module")
def learner_of(one_device):
    """Learner of a policy of experts that replays so, and that policy's state."""

    def make(replay, balance=0.0, preset="dapo"):
        algorithm = algorithms.preset(preset)
        algorithm.router_replay, algorithm.router_balance_coefficient = replay, balance
        settings = PolicySettings(algorithm, Compute())
        learner = policy_learner(settings, Optimizer(learning_rate=1e-3), MOE, one_device)
        return learner, learner.start(unbox(init_params(MOE, jax.random.key(0))))

    return make


def batch_of(learner, state, routes):
    """The batch of uneven responses, with log-probs of this policy on those routes."""
    batch, used = make_batch()
    rollouts = batch.scored.rollouts.replace(routes=routes)
    old = learner.score(state.params, rollouts, used).values
    scored = batch.scored.replace(rollouts=rollouts, old_logprobs=np.asarray(old))
    return batch.replace(scored=scored), used


def test_a_score_pass_records_routes_whose_replay_changes_no_bit(learner_of):
    recording, state = learner_of("old")
    plain, _ = learner_of("none")
    batch, used = make_batch()
    rollouts = batch.scored.rollouts
    scores = recording.score(state.params, rollouts, used)
    logprobs, routes = scores.values, scores.routes
    assert routes.shape == (*rollouts.tokens.shape, MOE.layers, MOE.experts_per_token)
    np.testing.assert_array_equal(logprobs, plain.score(state.params, rollouts, used).values)
    again = recording.score(state.params, rollouts.replace(routes=np.asarray(routes)), used)
    np.testing.assert_array_equal(again.values, logprobs)


@pytest.mark.slow
def test_an_update_takes_the_routes_of_its_batch(learner_of):
    """The ratio is 1 on them, and on others the gradient is another: the gates' own."""
    learner, state = learner_of("old")
    batch, used = make_batch()
    routes = learner.score(state.params, batch.scored.rollouts, used).routes
    gradients = []
    for taken in np.asarray(routes), (np.asarray(routes) + 1) % MOE.experts, None:
        batch, used = batch_of(learner, state, taken)
        _, gradient = learner.loss_and_gradient(state.params, batch, used)
        fresh = jax.tree.map(jnp.copy, state)
        _, (means, _) = learner.update(fresh, batch, used, 1e-3)
        assert means["clip_fraction_low"].value() == means["clip_fraction_high"].value() == 0
        gradients.append(gradient)
        replaced = means[REPLACED].value()
        assert replaced > 0.2 if taken is not None and len(gradients) == 2 else replaced == 0
    assert equal(gradients[0], gradients[2])
    routers = [np.asarray(g["layers"]["moe"]["router"]["kernel"]) for g in gradients]
    assert np.abs(routers[1]).max() > 1e-6
    assert np.abs(routers[1] - routers[0]).max() > 0.1 * np.abs(routers[0]).max()


@pytest.mark.slow
def test_the_balance_loss_is_added_in_the_weight_of_the_tokens(learner_of):
    plain, state = learner_of("none")
    weighed, _ = learner_of("none", balance=0.5)
    batch, used = batch_of(plain, state, None)
    loss, gradient = plain.loss_and_gradient(state.params, batch, used)
    other, moved = weighed.loss_and_gradient(state.params, batch, used)
    _, means = plain.update(jax.tree.map(jnp.copy, state), batch, used, 1e-3)
    assert batch.loss_weights.sum() == pytest.approx(1)
    assert 1 < means[BALANCE].value() < MOE.experts
    # Weights of a token mean are all alike, so the term is the mean that is measured.
    assert other - loss == pytest.approx(0.5 * means[BALANCE].value(), rel=1e-4)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), gradient, moved)
    assert apart["layers"]["moe"]["router"]["kernel"] > 1e-4


@pytest.mark.parametrize("name", ["router_replay", "router_balance_coefficient"])
def test_a_policy_without_experts_has_no_router(name, tiny_folder, alone, tmp_path):
    config = make_quick_config(tiny_folder, tmp_path)
    setattr(config.algorithm, name, {"router_replay": "old"}.get(name, 0.1))
    with pytest.raises(ConfigError, match=f"config.algorithm.{name} .* the policy has no experts"):
        train(config)
