"""The score pass: log-probs and values of a rollout batch before its updates."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config.algorithm import traits
from dapo_jax.config.experiment import Config
from dapo_jax.learner.advantages import Feedback, gather_feedback
from dapo_jax.learner.batches import (
    CRITIC,
    NOT_SCORED,
    REFERENCE,
    TEACHER,
    PackedRows,
    ScoredBatch,
    TokenScores,
)
from dapo_jax.learner.losses import estimate_kl
from dapo_jax.learner.minibatches import Minibatches, trained_tokens
from dapo_jax.learner.packing import (
    Segment,
    move_tokens,
    pack_updates,
    place_tokens,
    tree_index,
)
from dapo_jax.learner.update import AveragedLearner, Learner, LearnerPrograms, LearnerStates
from dapo_jax.runtime.clock import timed
from dapo_jax.runtime.sharding import to_host
from dapo_jax.types.structs import Group, present


@timed("score")
def score_pass(
    config: Config, programs: LearnerPrograms, states: LearnerStates, minibatches: Minibatches
) -> ScoredBatch:
    """Score a rollout batch with the policy, and with the other models that the run has.

    The result is returned while the devices still compute it.
    """
    algorithm = config.algorithm
    rollouts = minibatches.rollouts
    unrouted = rollouts.replace(routes=None)  # only the policy replays routes

    def score(
        learner: Learner | AveragedLearner,
        params: Any,
        rollouts: PackedRows = unrouted,
        first: int = 0,
    ) -> TokenScores:
        """Score the minibatches from the first one on."""
        counts = minibatches.microbatches
        scores = [
            learner.score(params, tree_index(rollouts, u), counts[u])
            for u in range(first, len(counts))
        ]
        if first:
            values, routes = scores[0].values, scores[0].routes
            nothing = TokenScores(
                jnp.full_like(values, NOT_SCORED),
                None if routes is None else jnp.full_like(routes, -1),
            )
            scores = [nothing, *scores]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *scores)

    old = energies = entropies = None
    if algorithm.old_logprobs == "sampler":
        old = rollouts.sampler_logprobs
    elif scored := algorithm.scored_minibatches(len(minibatches)):
        output = score(programs.policy, states.policy.params, rollouts, scored.start)
        old, energies, entropies = output.values, output.energies, output.entropies
        if output.routes is not None:
            rollouts = rollouts.replace(routes=output.routes)
    scores = {}
    for name, model in programs.scorers.items():
        if model.learner:
            params = states.others[name].params if model.params is None else model.params
            if model.tell:
                told = model.tell(minibatches.responses())
                default = present(old, "old_logprobs")
                scores[name] = _score_told(config, model.learner, params, told, rollouts, default)
            else:
                scores[name] = score(model.learner, params).values
    return ScoredBatch(rollouts, old, scores, energies, entropies)


def _score_told(
    config: Config,
    learner: Learner | AveragedLearner,
    params: Any,
    told: Sequence[Segment],  # responses behind other prompts
    rollouts: PackedRows,
    default: Any,  # [U, M, R, T] of tokens that no prompt was told for
) -> Any:
    """Return log-probs of the sampled tokens behind other prompts, at their places in `rollouts`.

    The rows are as long as those of the policy, doubled until the longest response fits.
    """
    if not told:
        return default
    packing = dataclasses.replace(config.rows(), share_prompts=False)
    while packing.row_tokens < max(segment.length for segment in told):
        packing = dataclasses.replace(packing, row_tokens=2 * packing.row_tokens)
    packed, used = pack_updates([told], packing)
    rows = tree_index(packed, 0)
    values = to_host(learner.score(params, rows, used[0]).values)
    index = np.asarray(rollouts.response_index)
    moved, scored = move_tokens(values, np.asarray(rows.response_index), index)
    return np.where(scored, moved, to_host(default)).astype(np.float32)


@timed("score")
def await_scores(scored: ScoredBatch) -> ScoredBatch:
    """Wait until the devices have computed the scores."""
    return jax.block_until_ready(scored)


@timed("score")  # it waits for scores that it reads
def make_feedback(
    config: Config, minibatches: Minibatches, scored: ScoredBatch, groups: Sequence[Group]
) -> Feedback:
    """Combine the rewards of the groups with the scores into the input of an estimator."""
    algorithm = config.algorithm
    index = np.asarray(scored.rollouts.response_index)
    old = scored.old_logprobs
    reference, values = scored.scores.get(REFERENCE), scored.scores.get(CRITIC)
    if algorithm.trained_responses == "pairs" and reference is None:
        reference = scored.rollouts.sampler_logprobs  # given pairs come with those of the reference
    penalties = log_ratios = None
    if old is not None and reference is not None:
        if algorithm.kl == "reward":
            kl = estimate_kl(algorithm, old, reference)
            penalties = algorithm.kl_coefficient * to_host(kl)
        if algorithm.trained_responses == "pairs":
            log_ratios = to_host(old - reference)
    rewards = np.concatenate([group.rewards for group in groups])
    parts = zip(*(group.reward_parts.values() for group in groups), strict=True)
    weights = config.reward.weights()  # shaping parts are not listed and have weight 1
    token_rewards = None
    if any(group.token_rewards for group in groups):
        each = (g.token_rewards or [np.zeros(len(c)) for c in g.completions] for g in groups)
        token_rewards = place_tokens([rewards for group in each for rewards in group], index)
    teacher = None
    if TEACHER in scored.scores:
        teacher = to_host(scored.scores[TEACHER] - present(old, "old_logprobs"))
    trained = trained_tokens(minibatches.responses(), algorithm)
    behaviour = None
    if "log_ratios" in traits(algorithm.advantage):
        behaviour = to_host(present(old, "old_logprobs") - scored.rollouts.sampler_logprobs)
    sizes = [len(group.rewards) for group in groups]
    return gather_feedback(
        index,
        rewards,
        earned_by_tokens=token_rewards,
        penalties=penalties,
        log_ratios=log_ratios,
        reward_parts=np.array([np.concatenate(part) for part in parts]),
        part_weights=np.array([weights.get(name, 1.0) for name in groups[0].reward_parts]),
        groups=np.repeat(np.arange(len(groups)), sizes),
        energies=None if scored.energies is None else to_host(scored.energies),
        correct=np.concatenate([group.correct for group in groups]),
        trained=place_tokens(trained, index) > 0,
        teacher_log_ratios=teacher,
        sampler_log_ratios=behaviour,
        values=None if values is None else to_host(values).astype(np.float64),
    )
