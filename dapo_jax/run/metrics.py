"""Metrics and traces of a step, computed from its record. docs/metrics.md explains them."""

import collections
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Config
from dapo_jax.learner.advantages import Feedback, preference_margins
from dapo_jax.learner.batches import CRITIC, NOT_SCORED, Mean, TrainBatch
from dapo_jax.learner.losses import policy_loss
from dapo_jax.learner.minibatches import row_choice
from dapo_jax.learner.packing import fill, take_tokens
from dapo_jax.learner.policy import EDGES, IMPORTANCE_SQUARE, RATIO_HISTOGRAM
from dapo_jax.learner.update import POLICY, LearnerPrograms, LearnerStates, learning_rates
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.source import RolloutSource, SourceState
from dapo_jax.run.scores import REFLECTION
from dapo_jax.runtime.clock import Clock
from dapo_jax.runtime.nonfinite import REASONS, is_reason
from dapo_jax.runtime.sharding import shards, to_host
from dapo_jax.step import StepRecord, Trainer, TrainerState, train_step
from dapo_jax.types.structs import (
    FAILURES,
    CollectedGroups,
    Group,
    Outcome,
    SamplerCounts,
    Trace,
    mean_or_zero,
    present,
    repetition,
)

MIN_VARIANCE = 1e-12
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
LOW, HIGH, DUAL = 1, 2, 3  # bounds that removed the gradient of a token; 0: none
# Metrics that have a meaning without sampling.
OF_GIVEN_GROUPS = (
    "policy_nll entropy mean_probability gradient_norm skipped_updates learning_rate empty_updates "
    "packing_fill preference_loss preference_accuracy"
).split() + [*REASONS]


def take_steps(
    source: RolloutSource,
    programs: LearnerPrograms,
    decoder: DecoderConfig,
    params: Any,
    steps: int,
) -> Iterator[tuple[StepRecord, dict[str, float]]]:
    """Yield record and metrics of the first steps of a policy's training; no folder is written."""
    rows = row_choice(source.config, decoder, shards(programs.policy.mesh, "batch"))
    trainer = Trainer(source, programs, rows)
    state = TrainerState(0, LearnerStates(programs.policy.start(params)), SourceState())
    for _ in range(steps):
        clock = Clock()
        with clock.running():
            state, record = train_step(trainer, state)
        yield record, measure(source.config, record, clock)


def measure(config: Config, record: StepRecord, clock: Clock) -> dict[str, float]:
    """Return every metric of a step by name; host metrics first, then those of the updates."""
    rollouts = record.rollouts
    host_values = _host_metrics(config, record)  # overlaps device compute
    means = jax.device_get([(update.learner, update.means) for update in record.updates])
    policy = [values for learner, values in means if learner == POLICY]
    critic = [
        {f"value_{name.removeprefix('value_')}": mean for name, mean in values.items()}
        for learner, values in means
        if learner == CRITIC
    ]
    seconds = {f"seconds_{part}": spent for part, spent in clock.seconds.items()}
    seconds["seconds_update"] = clock.total() - sum(clock.seconds.values())
    seconds["seconds_rollout"] = rollouts.seconds  # also of rollouts made ahead
    values = _ratio_metrics(policy) | add_up(policy) | add_up(critic) | host_values
    if rollouts.counts is None:
        values = {name: value for name, value in values.items() if name in OF_GIVEN_GROUPS}
    else:
        values |= speed_metrics(rollouts.batch, rollouts.counts, seconds)
    return values | seconds | {"seconds_step": clock.total()}


def _host_metrics(config: Config, record: StepRecord) -> dict[str, float]:
    """Return the metrics that do not depend on the updates."""
    rollouts, min_spread = record.rollouts, config.reward.min_spread
    values: dict[str, float] = {}
    if rollouts.counts is not None:
        values = rollout_metrics(rollouts.batch, rollouts.counts, record.step, min_spread)
    if config.rollout.curriculum == "pools":
        values["passed_over_prompts"] = float(rollouts.passed_over)
    if record.minibatches and record.feedback and record.advantages is not None:
        arrays = record.feedback, record.advantages, record.returns
        values |= feedback_metrics(config.algorithm, *arrays)
        taken = sum(update.learner == POLICY for update in record.updates)
        rates = learning_rates(config, record.step)
        values |= {
            "learning_rate": rates[POLICY],
            "empty_updates": float(len(record.minibatches) - taken),
            "packing_fill": fill(record.minibatches.rollouts, record.minibatches.microbatches),
        }
        values |= {"value_learning_rate": rates[CRITIC]} if CRITIC in rates else {}
    return values


def _ratio_metrics(means: list[dict[str, Mean]]) -> dict[str, float]:
    """Return the quantiles of the ratios and the effective sample size of the policy's updates.

    What they are computed of is taken out of the means.
    """
    histograms = [
        update.pop(RATIO_HISTOGRAM).total for update in means if RATIO_HISTOGRAM in update
    ]
    squares = [update.pop(IMPORTANCE_SQUARE) for update in means if IMPORTANCE_SQUARE in update]
    values = quantiles(np.sum(histograms, axis=0)) if histograms else {}
    if squares:
        square = functools.reduce(operator.add, squares).value()
        weights = [update["importance_weight"] for update in means]
        mean = functools.reduce(operator.add, weights).value()
        values["effective_sample_fraction"] = mean**2 / square if square else 0.0
    return values


def trace(config: Config, record: StepRecord) -> dict[int, list[Trace]]:
    """Return a trace of each trained response, by the index of its group in the data.

    Ratios and clips are those of the last update, if `log.token_ratios` asks for them.
    """
    if not record.minibatches or record.advantages is None:
        return {}
    ratios: list[tuple[np.ndarray, np.ndarray]] = []
    last = [u for u in record.updates if u.minibatch == len(record.minibatches) - 1]
    for update in last:
        if update.token_logprobs is not None and update.batch.scored.old_logprobs is not None:
            ratios = trace_ratios(config.algorithm, update.batch, update.token_logprobs)
    index = np.asarray(record.minibatches.rollouts.response_index)
    traces = trace_responses(record.advantages, index, ratios)
    rest = iter(traces)
    return {
        group.prompt.index: list(itertools.islice(rest, len(group.completions)))
        for group in record.rollouts.groups
    }


def quantiles(counts: np.ndarray) -> dict[str, float]:
    """Return the quantiles of the ratios by name, accurate to a bin; 1 if there is no token."""
    if not counts.sum():
        return dict.fromkeys(QUANTILES, 1.0)
    # The outermost bins have one edge, which stands for their middle.
    middles = np.concatenate([EDGES[:1], (EDGES[1:] + EDGES[:-1]) / 2, EDGES[-1:]])
    reached = np.cumsum(counts) / counts.sum()
    places = {name: np.searchsorted(reached, share) for name, share in QUANTILES.items()}
    return {name: float(np.exp(middles[place])) for name, place in places.items()}


def trace_ratios(
    algorithm: Algorithm, batch: TrainBatch, logprobs: Float[Array, "M R T"]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return ([n] ratios, [n] bounds) of each response; empty for those of other minibatches."""
    rollouts = batch.scored.rollouts
    old = present(batch.scored.old_logprobs, "old_logprobs")
    old = jnp.where(old == NOT_SCORED, logprobs, old)
    arrays = (logprobs, old, batch.advantages, batch.loss_weights, rollouts.segment_ids)
    rows = [jnp.asarray(array).reshape(-1, logprobs.shape[-1]) for array in to_host(arrays)]
    _, info = policy_loss(algorithm, *rows)
    bounds = LOW * info["clipped_low"] + HIGH * info["clipped_high"]
    bounds = jnp.where(info["clipped_dual"] > 0, DUAL, bounds)
    index = np.asarray(rollouts.response_index)
    ratios = take_tokens(np.asarray(info["ratio"]), index)
    return list(zip(ratios, take_tokens(np.asarray(bounds), index), strict=True))


def trace_responses(
    advantages: Float[np.ndarray, "*U M R T"],
    response_index: np.ndarray,
    ratios: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> list[Trace]:
    """Return the trace of each response, ordered by index."""
    per_response = take_tokens(advantages, response_index)
    means = [float(values.mean()) if values.size else 0.0 for values in per_response]
    traced = {i: pair for i, pair in enumerate(ratios) if len(pair[0])}
    return [Trace(mean, *traced.get(i, ())) for i, mean in enumerate(means)]


def feedback_metrics(
    algorithm: Algorithm, feedback: Feedback, advantages: np.ndarray, returns: np.ndarray | None
) -> dict[str, float]:
    """Return the spread of advantages; also metrics of a critic and of preference pairs.

    Args:
        advantages, returns: of each token, [*M, R, T]; returns are None without a critic.
    """
    trained = feedback.trained
    values = {"advantage_std": float(advantages[trained].std()) if trained.any() else 0.0}
    if returns is not None and trained.any():
        old_values = present(feedback.values, "values")[trained]
        variance = float(returns[trained].var())
        unexplained = float((returns[trained] - old_values).var())
        # Equal returns have no variance to explain.
        explained = 1 - unexplained / variance if variance > MIN_VARIANCE else 0.0
        values["explained_variance"] = explained
    if feedback.reference_log_ratios is not None and algorithm.trained_responses == "pairs":
        _, margins = preference_margins(feedback)
        values |= preference_metrics(margins, algorithm.preference_beta)
    return values


def preference_metrics(margins: np.ndarray, beta: float) -> dict[str, float]:
    """Return DPO's mean loss and the accuracy of pairs by their margins; 0 counts half."""
    return {
        "preference_loss": mean_or_zero(np.logaddexp(0.0, -beta * margins)),
        "preference_accuracy": mean_or_zero((np.sign(margins) + 1) / 2),
    }


def add_up(updates: list[dict[str, Mean]]) -> dict[str, float]:
    """Return the means of a step over its updates; a reason to skip an update only if above 0."""
    means = {}
    for name in updates[0] if updates else ():
        mean = sum((update[name] for update in updates[1:]), updates[0][name]).value()
        if mean or not is_reason(name):
            means[name] = mean
    return means


def response_metrics(groups: list[Group]) -> dict[str, float]:
    """Return means over all responses of the groups."""
    completions = [completion for group in groups for completion in group.completions]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    correct = np.array([right for group in groups for right in group.correct], bool)
    lengths = np.array([len(completion) for completion in completions])
    reflects = np.array([bool(REFLECTION.search(c.text)) for c in completions], bool)
    return {
        "reward": mean_or_zero([reward for group in groups for reward in group.rewards]),
        "accuracy": mean_or_zero(correct),
        "response_tokens_mean": mean_or_zero(lengths),
        "response_tokens_max": float(lengths.max(initial=0)),
        "truncated_fraction": mean_or_zero([c.truncated for c in completions]),
        "response_tokens_right": mean_or_zero(lengths[correct]),
        "response_tokens_wrong": mean_or_zero(lengths[~correct]),
        "answer_not_found_rate": mean_or_zero([v.extracted is None for v in verdicts]),
        "repetition": mean_or_zero([repetition(c.sampled_tokens) for c in completions]),
        "reflection_fraction": mean_or_zero(reflects),
        "accuracy_with_reflection": mean_or_zero(correct[reflects]),
        "accuracy_without_reflection": mean_or_zero(correct[~reflects]),
    }


def verdict_counts(groups: list[Group]) -> dict[str, float]:
    """Return the numbers of verdicts by how they were decided."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    decided = collections.Counter(verdict.decided for verdict in verdicts)
    return {f"verdicts/{how}": float(n) for how, n in decided.items() if how}


def judge_counts(groups: list[Group]) -> dict[str, float]:
    """Return the requests to the judge, their tokens and their price."""
    parts = [verdict.parts for group in groups for verdict in group.verdicts]
    parts += [response.failure.counts for group in groups for response in group.failed]
    names = {name: None for part in parts for name in part if name.startswith("judge_")}
    return {f"judge/{name[6:]}": sum(part.get(name, 0.0) for part in parts) for name in names}


def outcome_metrics(outcomes: collections.Counter[Outcome]) -> dict[str, float]:
    """Return the number of rewards by outcome, and the fraction that failed."""
    failed = sum(outcomes[outcome] for outcome in FAILURES)
    return {
        **{f"outcomes/{outcome}": float(outcomes[outcome]) for outcome in Outcome},
        "failed_rewards": failed / max(1, outcomes.total()),
    }


def _age_metrics(groups: list[Group], step: int) -> dict[str, float]:
    """Return the ages, in steps, of the policies that sampled the groups' tokens."""
    completions = [completion for group in groups for completion in group.completions]
    parts = np.array([part for c in completions for part in c.sampled_by], int).reshape(-1, 2)
    lags, tokens = step - parts[:, 0], parts[:, 1]
    return {
        "policy_lag": float(lags @ tokens) / max(1, tokens.sum()),
        "policy_lag_max": float(lags.max(initial=0)),
        "continued_fraction": mean_or_zero([len(c.sampled_by) > 1 for c in completions]),
    }


def _trained_tokens(collected: CollectedGroups) -> int:
    return sum(len(c) for group in collected.groups for c in group.completions)


def rollout_metrics(
    collected: CollectedGroups, counts: SamplerCounts, step: int = 0, min_spread: float = 0.0
) -> dict[str, float]:
    """Return the metrics of the groups of a step; means exclude surplus groups, costs do not.

    Args:
        step: number of steps that the policy was trained for.
        min_spread: rewards of a group that differ by no more have no spread.
    """
    judged = collected.judged
    is_flat = [not group.has_spread(min_spread) for group in judged]
    scored = [g for g in judged + collected.surplus if g.prompt.index not in collected.reused]
    return (
        response_metrics(judged)
        | verdict_counts(scored)
        | judge_counts(scored)
        | outcome_metrics(collected.outcomes)
        | {
            f"reward_parts/{name}": mean_or_zero(
                np.concatenate([group.reward_parts[name] for group in judged])
            )
            for name in (judged[0].reward_parts if judged else ())
        }
        | _age_metrics(collected.groups, step)
        | counts.metrics()
        | {
            "broken_groups": float(len(collected.broken)),
            "resampled_groups": float(len(collected.resampled)),
            "kept_fraction": collected.with_signal / max(1, len(judged)),
            "all_right_fraction": collected.all_right / max(1, len(judged)),
            "all_wrong_fraction": collected.all_wrong / max(1, len(judged)),
            "no_spread_fraction": mean_or_zero(is_flat),
            "surplus_groups": float(len(collected.surplus)),
            "trained_groups": float(len(collected.groups)),
            "sampled_to_kept_tokens": counts.sampled_tokens / max(1, _trained_tokens(collected)),
            "carried_groups": float(sum(group.tokens > 0 for group in collected.carried)),
            "carried_tokens": float(sum(group.tokens for group in collected.carried)),
            "expired_groups": float(collected.expired),
            "dropped_prompts": float(collected.dropped_prompts),
            "truncated_prompts": float(collected.truncated_prompts),
            "starved": float(collected.starved),
        }
    )


def speed_metrics(
    collected: CollectedGroups, counts: SamplerCounts, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the sampled and trained tokens per second.

    Args:
        seconds: of the parts of the step, by metric.
    """
    updating = sum(seconds.get(f"seconds_{part}", 0.0) for part in ("update", "ahead"))
    return {
        "sampled_tokens_per_second": counts.tokens / seconds["seconds_rollout"],
        "trained_tokens_per_second": _trained_tokens(collected) / (updating or math.inf),
    }
