"""The algorithm: prompts to update, as in DAPO's Algorithm 1. `run/run.py` is the run around it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.config.user_code import describe_error
from dapo_jax.learner.advantages import Feedback, estimate, gather_feedback
from dapo_jax.learner.critic import as_value_metrics
from dapo_jax.learner.losses import KL_ESTIMATORS
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.packing import (
    Segment,
    fill,
    make_batch,
    nth,
    pack_updates,
    place_tokens,
    trained_tokens,
)
from dapo_jax.learner.skipped_batches import Taken
from dapo_jax.learner.token_traces import trace_ratios, trace_responses
from dapo_jax.learner.update import Learner
from dapo_jax.reporting.metrics import Clock, add_up, feedback_metrics, rollout_metrics
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.rollout.source import Gathered, Order, make_rollouts
from dapo_jax.run.components import Parts
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.sharding import to_host
from dapo_jax.structs import (
    Carried,
    Collected,
    Group,
    Interrupted,
    Mean,
    ScoredBatch,
    Trace,
    TrainBatch,
    TrainState,
)


@dataclasses.dataclass
class RunState:
    """All that a checkpoint holds. `step` counts finished rollout steps."""

    step: int
    train: TrainState
    position: int  # place in the data
    kept_fraction: float  # running estimate
    critic: TrainState | None = None
    heldout_before: float | None = None
    seconds: float = 0.0
    unwritten: dict[str, float] | None = None  # metrics of `step`, still without its evaluation
    behaviour: Any = None  # with a lag: parameters that draw the next rollouts
    ahead: Gathered | None = None  # those rollouts
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # see `count_skipped`
    carried: tuple[Carried, ...] = ()  # what the newest rollouts left to the next

    def after_step(self) -> "RunState":
        return dataclasses.replace(self, step=self.step + 1)

    def record(self) -> dict[str, Any]:
        """What is saved beside the arrays."""
        others = {"train", "critic", "behaviour", "ahead", "carried"}
        names = {field.name for field in dataclasses.fields(self)} - others
        return {name: getattr(self, name) for name in sorted(names)}


def prompts_per_update(config: Config) -> int:
    """Groups of one optimizer minibatch."""
    return config.rollout.prompts_per_step // config.rollout.updates_per_rollout


def weigh_tokens(parts: Parts, group: Group, sample: int) -> np.ndarray:
    """What the user's hook says of a response. Raises `ConfigError`."""
    tokens = len(group.completions[sample])
    assert parts.token_weights is not None  # or nobody asks
    try:
        weights = np.asarray(parts.token_weights(group, sample), np.float64)
        if weights.shape != (tokens,) or not np.isfinite(weights).all() or (weights < 0).any():
            raise ValueError(f"got shape {weights.shape}")
    except Exception as error:  # whatever a user's function may raise
        raise ConfigError(
            f"config.algorithm.token_weights = {parts.config.algorithm.token_weights!r}: must "
            f"return {tokens} finite numbers, none below 0, for response {sample} to prompt "
            f"{group.prompt.id}; {describe_error(error)}"
        ) from error
    return weights


def weigh_groups(parts: Parts, groups: list[Group]) -> list[list[np.ndarray | None]]:
    """The same of every response of every group, asked once; None without a hook."""
    if parts.token_weights is None:
        return [[None] * len(group.completions) for group in groups]
    said = processes.share_out(
        [group.prompt.index for group in groups],
        lambda i: [
            weigh_tokens(parts, groups[i], j).tolist() for j in range(len(groups[i].completions))
        ],
        "token weights",
    )
    return [[np.asarray(weights, np.float64) for weights in one] for one in said]


def split_updates(parts: Parts, groups: list[Group]) -> list[list[Segment]]:
    """Responses per optimizer update: as many prompts each (the last may have fewer), in order."""
    share = prompts_per_update(parts.config)
    size = parts.config.rollout.samples_per_prompt
    weights = weigh_groups(parts, groups)
    segments = [
        [
            Segment(g.prompt, done, i * size + j, bool(g.correct[j]), weights[i][j])
            for j, done in enumerate(g.completions)
        ]
        for i, g in enumerate(groups)
    ]
    return [sum(segments[i : i + share], []) for i in range(0, len(groups), share)]


def score(
    parts: Parts, run: RunState, updates: list[list[Segment]]
) -> tuple[ScoredBatch, list[int]]:
    """Packs the updates and adds what policy, reference and critic say before any of them."""
    algorithm = parts.config.algorithm
    rollouts, used = pack_updates(updates, parts.rows(updates))

    def over_updates(learner: Learner, params: Any) -> jax.Array:
        return jnp.stack(
            [learner.score(params, nth(rollouts, u), count) for u, count in enumerate(used)]
        )

    old = reference = values = None
    # A single update's own forward pass is the old policy: the ratio is exactly 1.
    if algorithm.old_logprobs == "sampler":
        old = rollouts.sampler_logprobs
    elif len(updates) > 1 or algorithm.kl == "reward" or algorithm.trained_responses == "pairs":
        old = over_updates(parts.learner, run.train.params)
    if algorithm.reference:
        reference = over_updates(parts.learner, parts.reference)
    if algorithm.critic:
        assert parts.critic is not None and run.critic is not None
        values = over_updates(parts.critic, run.critic.params)
    return ScoredBatch(rollouts, old, reference, values), used


def gather(
    config: Config, scored: ScoredBatch, groups: list[Group], segments: list[Segment]
) -> Feedback:
    """The feedback on a rollout batch, with the KL penalty where it belongs into the reward."""
    algorithm, index = config.algorithm, np.asarray(scored.rollouts.response_index)
    old, reference = scored.old_logprobs, scored.reference_logprobs
    penalties = log_ratios = None
    if algorithm.kl == "reward":
        assert old is not None and reference is not None  # `score` made them
        kl = KL_ESTIMATORS[algorithm.kl_estimator](old, reference)
        penalties = algorithm.kl_coefficient * to_host(kl)
    if algorithm.trained_responses == "pairs":
        assert old is not None and reference is not None
        log_ratios = to_host(old - reference)
    rewards = np.concatenate([group.rewards for group in groups])
    return gather_feedback(
        index,
        rewards,
        penalties=penalties,
        log_ratios=log_ratios,
        groups=np.arange(len(rewards)) // config.rollout.samples_per_prompt,
        correct=np.concatenate([group.correct for group in groups]),
        trained=place_tokens(trained_tokens(segments, algorithm), index) > 0,
        values=None if scored.values is None else to_host(scored.values).astype(np.float64),
    )


def learning_rates(config: Config, step: int) -> tuple[float, float]:
    """Of the policy (0 while the critic learns alone) and of the critic."""
    alone, total = config.critic_pretrain_steps(), config.total_steps
    policy = learning_rate(config.optimizer, step - alone, total - alone) if step >= alone else 0.0
    return policy, learning_rate(config.critic.optimizer, step, total)


def take_update(
    parts: Parts, run: RunState, batch: TrainBatch, used: int, rates: tuple[float, float]
) -> tuple[RunState, dict[str, Mean]]:
    """One optimizer step of the policy (with a learning rate above 0) and of the critic."""
    rate, value_rate = rates
    policy, critic, mean = run.train, run.critic, {}
    if rate:
        policy, mean = parts.learner.update(policy, batch, used, rate)
        taken = Taken("policy", batch, used, rate, mean["skipped_updates"])
        parts.skipped.add(run.step, taken)
    if parts.config.algorithm.critic:
        assert parts.critic is not None and critic is not None
        critic, value_mean = parts.critic.update(critic, batch, used, value_rate)
        taken = Taken("critic", batch, used, value_rate, value_mean["skipped_updates"])
        parts.skipped.add(run.step, taken)
        mean |= as_value_metrics(value_mean)
    return dataclasses.replace(run, train=policy, critic=critic), mean


def update_policy(
    parts: Parts, run: RunState, groups: list[Group], clock: Clock
) -> tuple[RunState, dict[str, float], list[dict[str, Mean]], dict[int, list[Trace]]]:
    """Score pass, advantages over the rollout batch, then an optimizer step per minibatch.

    The steps are under way when this returns: what is still on the devices is the new state and,
    of each step, the means. The traces are by the place of a group in the data.
    """
    config, algorithm = parts.config, parts.config.algorithm
    updates = split_updates(parts, groups)
    scored, used = score(parts, run, updates)
    jax.block_until_ready(scored)  # so that its seconds are not booked on the updates
    clock.lap("score")
    feedback = gather(config, scored, groups, sum(updates, []))
    advantages, returns = estimate(algorithm, feedback)
    means, ratios, rates = [], [], learning_rates(config, run.step)
    budget, planned = config.sampler.max_response_tokens, prompts_per_update(config)
    for u, segments in enumerate(updates):
        part, gains, targets = nth((scored, advantages, returns), u)
        batch = make_batch(part, segments, gains, targets, algorithm, budget, planned)
        if not batch.loss_weights.any():  # nothing to learn from, all filtered or nothing right
            continue
        if (
            config.log.token_ratios
            and u == len(updates) - 1
            and batch.scored.old_logprobs is not None
        ):
            logprobs = parts.learner.score(run.train.params, part.rollouts, used[u])
            ratios = trace_ratios(algorithm, batch, logprobs)
        run, mean = take_update(parts, run, batch, used[u], rates)
        means.append(mean)
    values = {"empty_updates": float(len(updates) - len(means)), "learning_rate": rates[0]}
    values |= feedback_metrics(algorithm, feedback, advantages, returns)
    values |= {"packing_fill": fill(scored.rollouts, used)}
    values |= {"value_learning_rate": rates[1]} if algorithm.critic else {}
    traces = trace_responses(advantages, feedback.response_index, ratios)
    size = config.rollout.samples_per_prompt
    by_group = {g.prompt.index: traces[i * size : (i + 1) * size] for i, g in enumerate(groups)}
    return run, values, means, by_group


def take_rollouts(
    parts: Parts, run: RunState, interrupted: Callable[[], bool]
) -> tuple[Gathered, RunState]:
    """The groups of this step: those made ahead, or made now."""
    lag = int(run.behaviour is not None)
    params = run.behaviour if lag else run.train.params
    place = run.position, run.kept_fraction, run.carried
    order = Order(params, run.step - lag, run.step, *place)
    gathered = run.ahead or make_rollouts(parts, order, interrupted)
    collected = gathered.collected
    behaviour = None
    if parts.config.rollout.lag:
        behaviour = parts.learner.copy(run.train.params)  # the update consumes them
    return gathered, dataclasses.replace(
        run,
        position=collected.next_position,
        kept_fraction=collected.kept_fraction,
        behaviour=behaviour,
        ahead=None,
        carried=collected.carried,
    )


def look_ahead(parts: Parts, run: RunState, interrupted: Callable[[], bool]) -> RunState:
    """With `rollout.lag`, adds the next step's groups, drawn by the policy before this update.

    The update is computed meanwhile. Which policy draws, which prompts and which keys are a
    function of the step alone, so a run that is resumed repeats itself: `behaviour` is in its
    checkpoint. What ends a collection early comes up when the next step makes it again.
    """
    if run.step + 1 == parts.config.total_steps:
        return run
    order = Order(run.behaviour, run.step, run.step + 1, run.position, run.kept_fraction)
    try:
        return dataclasses.replace(run, ahead=make_rollouts(parts, order, interrupted))
    except (Interrupted, Starved):
        return run


def train_step(
    parts: Parts, run: RunState, interrupted: Callable[[], bool]
) -> tuple[RunState, dict[str, float], Collected]:
    """One rollout step (DAPO, arXiv 2503.14476, Algorithm 1): collect groups, update the policy."""
    clock = Clock()
    rollouts, run = take_rollouts(parts, run, interrupted)
    clock.lap("rollout")
    collected, values, means = rollouts.collected, {}, []
    if collected.groups:
        run, values, means, traces = update_policy(parts, run, collected.groups, clock)
        collected = dataclasses.replace(collected, traces=traces)
    if parts.config.rollout.lag:
        clock.lap("update")
        run = look_ahead(parts, run, interrupted)
        clock.lap("ahead")
    values |= add_up(jax.device_get(means))
    clock.lap("update")
    clock.seconds |= {"seconds_rollout": rollouts.seconds}
    values |= rollout_metrics(collected, rollouts.counts, clock, run.step)
    return run.after_step(), values | clock.seconds, collected
