"""Router replay: which routes the sampler records, an update takes, and what it measures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MOE, TINY
from learners import make_batch
from samplers import PROMPTS, make_sampler, sample
from small_runs import equal, make_quick_config

from dapo_jax import algorithms
from dapo_jax.config.experiment import Compute, Optimizer
from dapo_jax.learner.packing import Segment, pack
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model.decoder import init_params
from dapo_jax.model.experts import BALANCE, REPLACED, ROUTES
from dapo_jax.model.logprobs import Rows, hidden_states
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.run.loop import train
from dapo_jax.runtime.sharding import unbox
from dapo_jax.types.errors import ConfigError


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


@pytest.mark.slow
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
        gradient, _ = learner.differentiate(state.params, batch, used)
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
    (gradient, one), (moved, other) = (
        learner.differentiate(state.params, batch, used) for learner in (plain, weighed)
    )
    _, means = plain.update(jax.tree.map(jnp.copy, state), batch, used, 1e-3)
    assert batch.loss_weights.sum() == pytest.approx(1)
    assert 1 < means[BALANCE].value() < MOE.experts
    # Weights of a token mean are all alike, so the term is the mean that is measured.
    change = other.means["loss"].total - one.means["loss"].total
    assert change == pytest.approx(0.5 * means[BALANCE].value(), rel=1e-4)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), gradient, moved)
    assert apart["layers"]["moe"]["router"]["kernel"] > 1e-4


@pytest.mark.parametrize("name", ["router_replay", "router_balance_coefficient"])
def test_a_policy_without_experts_has_no_router(name, tiny_folder, alone, tmp_path):
    config = make_quick_config(tiny_folder, tmp_path)
    setattr(config.algorithm, name, {"router_replay": "old"}.get(name, 0.1))
    with pytest.raises(ConfigError, match=f"config.algorithm.{name} .* the policy has no experts"):
        train(config)


# --- routes that the sampler records -------------------------------------------------------------

ROUTES_MOE = dataclasses.replace(
    TINY, mlp=16, experts=8, experts_per_token=2, family="qwen3_moe", records_routes=True
)
SOME = PROMPTS[:5]


@pytest.fixture(scope="module")
def params():
    return unbox(init_params(ROUTES_MOE, jax.random.key(0)))


def open_sampler(mesh, **settings) -> Scheduler:
    return make_sampler(mesh, config=ROUTES_MOE, **settings)


@pytest.fixture(scope="module")
def groups(params, one_device):
    return sample(open_sampler(one_device), params, SOME)


def trainer_routes(params, groups) -> dict[tuple[int, int], np.ndarray]:
    """Routes of a forward pass over packed rows, by prompt and sample; and those packed there."""
    places = [(p, done) for p in SOME for done in groups[p.index]]
    segments = [Segment(p, done, i) for i, (p, done) in enumerate(places)]
    rows, used = pack(segments, 64, 4)
    actual = {}
    for microbatch in range(used):
        part = jax.tree.map(lambda x, m=microbatch: x[m], rows)
        arrays = Rows(part.tokens, part.segment_ids, part.positions)
        records = jax.jit(lambda rows: hidden_states(params, ROUTES_MOE, rows, [ROUTES])[1])(arrays)
        routes = np.asarray(records.routes)
        for row, number in np.argwhere(part.positions == 0):
            if not (segment := part.segment_ids[row, number]):
                continue
            own = part.segment_ids[row] == segment
            index = part.response_index[row][own].max()
            prompt, done = places[index]
            actual[prompt.index, done.sample] = routes[row][own]
            packed = part.routes[row][own]
            np.testing.assert_array_equal(packed[:-1], done.routes)
            assert (packed[-1] == -1).all()
        assert (part.routes[part.segment_ids == 0] == -1).all()
    return actual


def test_routes_equal_those_of_a_training_pass(params, groups):
    """In float32; of two experts with the same probability either may be taken."""
    expected, compared = trainer_routes(params, groups), 0
    for prompt in SOME:
        for done in groups[prompt.index]:
            wanted = expected[prompt.index, done.sample]
            assert done.routes.shape == (len(prompt.tokens) + len(done.tokens) - 1, 2, 2)
            np.testing.assert_array_equal(done.routes, wanted[:-1])
            compared += done.routes.size
    assert compared > 500
    assert len(np.unique(np.concatenate([g.routes for g in groups[0]]))) > 4
