"""The score pass: what policy, reference, teacher and critic make of rollouts before updates."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.learner.advantages import Feedback, gather_feedback
from dapo_jax.learner.batches import PackedRows, ScoredBatch
from dapo_jax.learner.learners import LearnerPrograms, LearnerStates
from dapo_jax.learner.losses import KL_ESTIMATORS
from dapo_jax.learner.minibatches import Minibatches
from dapo_jax.learner.packing import place_tokens, trained_tokens, tree_index
from dapo_jax.learner.update import Learner
from dapo_jax.runtime.clock import timed
from dapo_jax.runtime.sharding import to_host
from dapo_jax.structs import Group, present


@timed("score")
def score_pass(
    config: Config, learners: LearnerPrograms, states: LearnerStates, minibatches: Minibatches
) -> ScoredBatch:
    """Rollouts with log-probs and values of policy, reference, teacher and critic before updates.

    Returns at once: they are still being computed.
    """
    algorithm, rollouts = config.algorithm, minibatches.rollouts
    unrouted = rollouts.replace(routes=None)  # routes are the policy's alone

    def over_minibatches(learner: Learner, params: Any, rollouts: PackedRows = unrouted) -> Any:
        used = enumerate(minibatches.microbatches)
        each = [learner.score(params, tree_index(rollouts, u), count) for u, count in used]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *each)

    old = reference = values = teacher = None
    distilled = algorithm.distillation == "reverse"
    # A single update's own forward pass is the old policy: the ratio is exactly 1.
    if algorithm.old_logprobs == "sampler":
        old = rollouts.sampler_logprobs
    elif (
        len(minibatches) > 1
        or algorithm.kl == "reward"
        or algorithm.trained_responses == "pairs"
        or distilled
    ):
        old = over_minibatches(learners.policy, states.policy.params, rollouts)
        if algorithm.router_replay == "old":
            old, routes = old
            rollouts = rollouts.replace(routes=routes)
    if algorithm.reference:
        reference = over_minibatches(learners.policy, learners.reference)
        if algorithm.router_replay == "old":
            reference, _ = reference
    if learners.critic and states.critic:
        values = over_minibatches(learners.critic, states.critic.params)
    if distilled and learners.teacher:
        teacher = over_minibatches(learners.teacher, learners.teacher_params)
    return ScoredBatch(rollouts, old, reference, values, teacher)


@timed("score")
def await_scores(scored: ScoredBatch) -> ScoredBatch:
    """Waits for the devices that compute the scores."""
    return jax.block_until_ready(scored)


@timed("score")  # where it needs the scores it waits for them
def make_feedback(
    config: Config, minibatches: Minibatches, scored: ScoredBatch, groups: Sequence[Group]
) -> Feedback:
    """Feedback on a rollout batch: rewards, with the KL penalty where it belongs to them."""
    algorithm, index = config.algorithm, np.asarray(scored.rollouts.response_index)
    old, reference = scored.old_logprobs, scored.reference_logprobs
    penalties = log_ratios = None
    if old is not None and reference is not None:
        if algorithm.kl == "reward":
            kl = KL_ESTIMATORS[algorithm.kl_estimator](old, reference)
            penalties = algorithm.kl_coefficient * to_host(kl)
        if algorithm.trained_responses == "pairs":
            log_ratios = to_host(old - reference)
    rewards = np.concatenate([group.rewards for group in groups])
    parts = zip(*(group.reward_parts.values() for group in groups), strict=True)
    weights = config.reward.weights()  # a part that shapes alone has 1
    by_tokens = None
    if any(group.token_rewards for group in groups):
        each = (g.token_rewards or [np.zeros(len(c)) for c in g.completions] for g in groups)
        by_tokens = place_tokens([own for group in each for own in group], index)
    pulls = None
    if scored.teacher_logprobs is not None:
        pulls = to_host(scored.teacher_logprobs - present(old, "old_logprobs"))
    trained = trained_tokens(minibatches.responses(), algorithm)
    return gather_feedback(
        index,
        rewards,
        earned_by_tokens=by_tokens,
        penalties=penalties,
        log_ratios=log_ratios,
        reward_parts=np.array([np.concatenate(part) for part in parts]),
        part_weights=np.array([weights.get(name, 1.0) for name in groups[0].reward_parts]),
        groups=np.arange(len(rewards)) // config.rollout.samples_per_prompt,
        correct=np.concatenate([group.correct for group in groups]),
        trained=place_tokens(trained, index) > 0,
        teacher_log_ratios=pulls,
        values=None if scored.values is None else to_host(scored.values).astype(np.float64),
    )
