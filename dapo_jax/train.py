"""The reinforcement-learning loop: prompts to update, as in DAPO's Algorithm 1.

`train_step` and `update_policy` are the algorithm; `train` is the run around them: resuming,
evaluating, showing, saving.
"""

import dataclasses
import json
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.advantages import ESTIMATORS
from dapo_jax.checkpoints import Checkpoints
from dapo_jax.cli import as_dict
from dapo_jax.config import Config
from dapo_jax.data.pipeline import heldout_prompts
from dapo_jax.evaluation import heldout_metrics, sample_groups
from dapo_jax.filtering import Collected, Interrupted, collect
from dapo_jax.metrics import Clock, MetricWriter, add_up, rollout_metrics, write_rollouts
from dapo_jax.optimizer import learning_rate
from dapo_jax.packing import Segment, most_microbatches, nth, pack_updates, spread_weights
from dapo_jax.parts import Parts, build
from dapo_jax.plots import plot_run
from dapo_jax.sampler.sampling import SAMPLE_FOR_TRAINING, SamplingRule
from dapo_jax.structs import Group, Mean, ScoredBatch, TrainBatch, TrainState


@dataclasses.dataclass
class RunState:
    """All that a checkpoint holds. `step` counts finished rollout steps."""

    step: int
    train: TrainState
    position: int  # place in the data
    kept_fraction: float
    heldout_before: float | None

    def record(self, seed: int) -> dict[str, Any]:
        """What is saved beside the arrays."""
        names = ("step", "position", "kept_fraction", "heldout_before")
        return {name: getattr(self, name) for name in names} | {"seed": seed}


# --- the algorithm --------------------------------------------------------------------------


def split_updates(config: Config, groups: list[Group]) -> list[list[Segment]]:
    """Responses per optimizer update: equal shares of the prompts, in data order."""
    share = config.rollout.prompts_per_step // config.rollout.updates_per_rollout
    size = config.rollout.samples_per_prompt
    segments = [
        [Segment(g.prompt, done, i * size + j) for j, done in enumerate(g.completions)]
        for i, g in enumerate(groups)
    ]
    return [sum(segments[i : i + share], []) for i in range(0, len(groups), share)]


def score(parts: Parts, params: Any, updates: list[list[Segment]]) -> tuple[ScoredBatch, list[int]]:
    """Packs the updates and adds the policy's log-probs before any of them."""
    config, packing = parts.config, parts.config.packing
    share = config.rollout.prompts_per_step // config.rollout.updates_per_rollout
    rollouts, used = pack_updates(
        updates,
        row_tokens=packing.row_tokens,
        rows_per_microbatch=packing.rows_per_microbatch,
        microbatches=most_microbatches(
            share * config.rollout.samples_per_prompt,
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
    on_response = scored.rollouts.response_index >= 0
    return state, values | {
        "advantage_std": float(advantages[on_response].std()),
        "empty_updates": float(len(updates) - len(means)),
        "trained_tokens_per_second": on_response.sum() / clock.seconds["seconds_update"],
    }


def train_step(
    parts: Parts, run: RunState, interrupted: Callable[[], bool]
) -> tuple[RunState, dict[str, float], Collected]:
    """One rollout step (DAPO, arXiv 2503.14476, Algorithm 1): collect groups, update the policy."""
    config, clock = parts.config, Clock()
    sampler = config.sampler
    rule = SamplingRule(sampler.temperature, sampler.top_p, sampler.top_k)
    rate = learning_rate(config.optimizer, run.step)
    dropped_before = parts.prompts.dropped_prompts
    parts.sampler.begin(run.train.params, purpose=SAMPLE_FOR_TRAINING, step=run.step, rule=rule)
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
    counts = parts.sampler.counts
    values |= rollout_metrics(collected, counts) | {
        "learning_rate": rate,
        "dropped_prompts": float(parts.prompts.dropped_prompts - dropped_before),
        "sampled_tokens_per_second": counts.tokens / clock.seconds["seconds_rollout"],
        "seconds_step": clock.total(),
    }
    values |= clock.seconds
    after = dataclasses.replace(
        run,
        step=run.step + 1,
        train=state,
        position=collected.next_position,
        kept_fraction=collected.kept_fraction,
    )
    return after, values, collected


# --- the run around it ----------------------------------------------------------------------

FIRST_KEPT_FRACTION = 0.5  # before anything was seen
MANY_WITHOUT_ANSWER = 0.5


class _Preemption:
    """Remembers SIGTERM, so that the run can save and leave at the next safe place."""

    def __init__(self):
        self.requested = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, *_: Any) -> None:
        self.requested = True

    def __call__(self) -> bool:
        return self.requested


class _Run:
    """One run folder: its state, its files, and what is said about it."""

    def __init__(self, config: Config):
        self.config, self.parts = config, build(config)
        self.folder = pathlib.Path(config.run_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.folder, config.checkpoint)
        self.heldout = heldout_prompts(config.data, config.seed, self.parts.tokenizer)
        resumed_step = self.checkpoints.latest_step()
        self.state = self._begin() if resumed_step is None else self._resume(resumed_step)
        self.parts.prompts.position = self.state.position
        self.writer = MetricWriter(self.folder, resumed_step, config.log.tensorboard)
        (self.folder / "config.json").write_text(json.dumps(as_dict(config), indent=2))

    def _resume(self, step: int) -> RunState:
        train, record = self.checkpoints.restore(
            self.parts.learner.abstract_state, self.config.seed
        )
        record.pop("seed")
        self.parts.progress.say(f"resuming {self.folder} after step {step}")
        return RunState(train=train, **record)

    def _begin(self) -> RunState:
        train = self.parts.learner.start(self.parts.folder_params())
        return RunState(0, train, 0, FIRST_KEPT_FRACTION, None)

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics of the policy as it is; empty without held-out problems."""
        if not self.heldout:
            return {}
        groups = sample_groups(self.state.train.params, self.heldout, self.parts)
        return heldout_metrics(groups)

    def evaluate_before(self) -> None:
        """The first row: the policy that the run starts from."""
        if self.state.step == 0 and self.state.heldout_before is None:
            values = self.evaluate()
            self.state.heldout_before = values.get("heldout_accuracy")
            self.writer.write(0, values)
            if values:
                accuracy = values["heldout_accuracy"]
                self.parts.progress.say(f"held-out accuracy before training: {accuracy:.3f}")

    def step(self, interrupted: Callable[[], bool]) -> None:
        """One rollout step with its evaluation, its lines and, where due, its checkpoint."""
        config, progress = self.config, self.parts.progress
        self.state, values, collected = train_step(self.parts, self.state, interrupted)
        step = self.state.step
        last = step == config.total_steps
        if last or _due(step, config.evaluation.every_steps):
            values |= self.evaluate()
        if config.log.rollouts:
            write_rollouts(self.folder, step, collected.judged)
        self.writer.write(step, values)
        progress.step(step, config.total_steps, values)
        if _due(step - 1, config.log.show_group_every_steps) and collected.groups:
            progress.group(collected.groups[0])
        self._warn(values, collected)
        if last or _due(step, config.checkpoint.every_steps):
            self.save()

    def _warn(self, values: dict[str, float], collected: Collected) -> None:
        warn, step = self.parts.progress.warn, self.state.step
        if collected.starved:
            warn(f"step {step}: only {len(collected.groups)} groups carried signal")
        if values.get("empty_updates"):
            warn(
                f"step {step}: {values['empty_updates']:.0f} updates had no trained token and "
                "were not taken (every response truncated and filtered?)"
            )
        if values.get("skipped_updates"):
            warn(f"step {step}: an update was skipped: its gradient was not finite")
        if step == 1 and values["answer_not_found_rate"] > MANY_WITHOUT_ANSWER:
            warn(
                f"no answer was found in {values['answer_not_found_rate']:.0%} of the responses: "
                "do config.data.template and config.reward.verifier agree?"
            )

    def save(self) -> None:
        """A checkpoint of the state as it is."""
        record = self.state.record(self.config.seed)
        self.checkpoints.save(self.state.step, self.state.train, record)

    def finish(self, seconds: float) -> dict[str, Any]:
        """summary.json, the picture, and the last words."""
        rows = self.writer.read()
        summary = {
            "steps": self.state.step,
            "heldout_accuracy_before": self.state.heldout_before,
            "heldout_accuracy_after": rows[-1].get("heldout_accuracy") if rows else None,
            "seconds": round(seconds, 1),
            "seed": self.config.seed,
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2))
        plot_run(rows, self.folder / "curves.png", str(self.folder))
        before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
        if before is not None and after is not None:
            self.parts.progress.say(
                f"[bold]held-out accuracy {before:.3f} -> {after:.3f}[/] after "
                f"{self.state.step} steps in {seconds:.0f} s"
            )
        self.parts.progress.say(f"metrics, rollouts and curves.png are in {self.folder}")
        return summary

    def close(self) -> None:
        """Waits for checkpoints, ends workers."""
        self.checkpoints.close()
        self.writer.close()
        self.parts.close()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def train(config: Config) -> dict[str, Any] | None:
    """Runs `config` to its last step, from its newest checkpoint where there is one.

    Returns the summary, or None where SIGTERM ended the run early; it has then been saved.
    """
    preempted, started = _Preemption(), time.perf_counter()
    run = _Run(config)
    try:
        run.evaluate_before()
        while run.state.step < config.total_steps and not preempted():
            try:
                run.step(interrupted=preempted)
            except Interrupted:
                break
        if run.state.step >= config.total_steps:
            return run.finish(time.perf_counter() - started)
        run.save()
        run.parts.progress.say(
            f"stopped by SIGTERM after step {run.state.step}; saved in {run.folder}. "
            "The same command goes on from there"
        )
        return None
    finally:
        run.close()
