"""The algorithm: prompts to update, as in DAPO's Algorithm 1. `run.py` is the run around it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.advantages import ESTIMATORS
from dapo_jax.config import Config
from dapo_jax.filtering import Collected, collect
from dapo_jax.metrics import Clock, add_up, rollout_metrics, update_metrics
from dapo_jax.optimizer import learning_rate
from dapo_jax.packing import Segment, most_microbatches, nth, pack_updates, spread_weights
from dapo_jax.parts import Parts
from dapo_jax.sampler.sampling import SAMPLE_FOR_TRAINING, SamplingRule
from dapo_jax.structs import Group, Mean, ScoredBatch, TrainBatch, TrainState


@dataclasses.dataclass
class RunState:
    """All that a checkpoint holds. `step` counts finished rollout steps."""

    step: int
    train: TrainState
    position: int  # place in the data
    kept_fraction: float  # running estimate
    heldout_before: float | None = None
    seconds: float = 0.0
    unwritten: dict[str, float] | None = None  # metrics of `step`, still without its evaluation

    def record(self) -> dict[str, Any]:
        """What is saved beside the arrays."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name != "train"}


def prompts_per_update(config: Config) -> int:
    """Groups of one optimizer minibatch."""
    return config.rollout.prompts_per_step // config.rollout.updates_per_rollout


def split_updates(config: Config, groups: list[Group]) -> list[list[Segment]]:
    """Responses per optimizer update: as many prompts each (the last may have fewer), in order."""
    share = prompts_per_update(config)
    size = config.rollout.samples_per_prompt
    segments = [
        [Segment(g.prompt, done, i * size + j) for j, done in enumerate(g.completions)]
        for i, g in enumerate(groups)
    ]
    return [sum(segments[i : i + share], []) for i in range(0, len(groups), share)]


def score(parts: Parts, params: Any, updates: list[list[Segment]]) -> tuple[ScoredBatch, list[int]]:
    """Packs the updates and adds the policy's log-probs before any of them."""
    config, packing = parts.config, parts.config.packing
    rollouts, used = pack_updates(
        updates,
        row_tokens=packing.row_tokens,
        rows_per_microbatch=packing.rows_per_microbatch,
        microbatches=most_microbatches(
            prompts_per_update(config) * config.rollout.samples_per_prompt,
            config.data.max_prompt_tokens + config.sampler.max_response_tokens,
            packing.row_tokens,
            packing.rows_per_microbatch,
        ),
    )
    if config.algorithm.old_logprobs == "sampler":
        return ScoredBatch(rollouts, rollouts.sampler_logprobs), used
    if len(updates) == 1:  # the update's own forward pass is the old policy: ratio exactly 1
        return ScoredBatch(rollouts, None), used
    old = [parts.learner.score(params, nth(rollouts, u), count) for u, count in enumerate(used)]
    return ScoredBatch(rollouts, jnp.stack(old)), used


def update_policy(
    parts: Parts, state: TrainState, groups: list[Group], rate: float, clock: Clock
) -> tuple[TrainState, dict[str, float]]:
    """Score pass, advantages over the rollout batch, then an optimizer step per minibatch."""
    config = parts.config
    updates = split_updates(config, groups)
    scored, used = score(parts, state.params, updates)
    jax.block_until_ready(scored)  # so that its seconds are not booked on the updates
    clock.lap("score")
    rewards = np.concatenate([group.rewards for group in groups])
    members = np.arange(len(rewards)) // config.rollout.samples_per_prompt
    advantages = ESTIMATORS[config.algorithm.advantage](scored, rewards, members)
    means: list[dict[str, Mean]] = []
    for u, segments in enumerate(updates):
        part = nth(scored, u)
        weights = spread_weights(
            part.rollouts, segments, config.algorithm, config.sampler.max_response_tokens
        )
        if weights.any():  # an all-truncated, filtered minibatch has nothing to learn from
            batch = TrainBatch(part, advantages[u], weights)
            state, mean = parts.learner.update(state, batch, used[u], rate)
            means.append(mean)
    values = add_up(jax.device_get(means))
    clock.lap("update")
    return state, values | update_metrics(scored, advantages, len(updates) - len(means), clock)


def train_step(
    parts: Parts, run: RunState, interrupted: Callable[[], bool]
) -> tuple[RunState, dict[str, float], Collected]:
    """One rollout step (DAPO, arXiv 2503.14476, Algorithm 1): collect groups, update the policy."""
    config, clock = parts.config, Clock()
    rule = SamplingRule(config.sampler.temperature, config.sampler.top_p, config.sampler.top_k)
    rate = learning_rate(config.optimizer, run.step, config.total_steps)
    parts.sampler.begin(run.train.params, purpose=SAMPLE_FOR_TRAINING, step=run.step, rule=rule)
    parts.prompts.position = run.position
    with parts.progress.collecting(run.step + 1, parts.sampler) as show:
        collected = collect(
            config,
            parts.prompts,
            parts.sampler,
            parts.pool,
            run.kept_fraction,
            on_burst=show,
            interrupted=interrupted,
        )
    parts.sampler.release()  # the update needs the memory of the caches
    clock.lap("rollout")
    state, values = run.train, {}
    if collected.groups:
        state, values = update_policy(parts, state, collected.groups, rate, clock)
    values |= rollout_metrics(collected, parts.sampler.counts, clock) | {"learning_rate": rate}
    after = dataclasses.replace(
        run,
        step=run.step + 1,
        train=state,
        position=collected.next_position,
        kept_fraction=collected.kept_fraction,
    )
    return after, values | clock.seconds, collected
