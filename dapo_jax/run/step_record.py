"""Metrics and traces of a step, computed from its record."""

import functools
import itertools
import operator
from collections.abc import Iterator

import jax
import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.learner.batches import CRITIC, Mean
from dapo_jax.learner.learners import POLICY, LearnerPrograms, LearnerStates, learning_rates
from dapo_jax.learner.metrics import (
    add_up,
    feedback_metrics,
    quantiles,
    trace_ratios,
    trace_responses,
)
from dapo_jax.learner.minibatches import row_choice
from dapo_jax.learner.packing import fill
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.reporting.metrics import rollout_metrics, speed_metrics
from dapo_jax.rollout.source import RolloutSource, SourceState
from dapo_jax.runtime.clock import Clock
from dapo_jax.runtime.sharding import shards
from dapo_jax.step import StepRecord, Trainer, TrainerState, train_step
from dapo_jax.types.structs import Trace


def take_steps(
    source: RolloutSource,
    programs: LearnerPrograms,
    decoder: DecoderConfig,
    learners: LearnerStates,
    steps: int,
) -> Iterator[tuple[StepRecord, dict[str, float]]]:
    """Yield record and metrics of the first steps of a training without a run's folder."""
    rows = row_choice(source.config, decoder, shards(programs.policy.mesh, "batch"))
    trainer = Trainer(source, programs, rows)
    state = TrainerState(0, learners, SourceState())
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
    values = _ratio_metrics(record, policy) | add_up(policy) | add_up(critic) | host_values
    values |= speed_metrics(rollouts.batch, rollouts.counts, seconds)
    return values | seconds | {"seconds_step": clock.total()}


def _host_metrics(config: Config, record: StepRecord) -> dict[str, float]:
    """Return the metrics that do not depend on the updates."""
    rollouts, min_spread = record.rollouts, config.reward.min_spread
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


def _ratio_metrics(record: StepRecord, means: list[dict[str, Mean]]) -> dict[str, float]:
    """Return the quantiles of the ratios and the effective sample size of the policy's updates."""
    updates = [update for update in record.updates if update.learner == POLICY]
    fetched = jax.device_get([(u.ratio_histogram, u.importance_square) for u in updates])
    histograms = [histogram.total for histogram, _ in fetched if histogram is not None]
    squares = [square for _, square in fetched if square is not None]
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
