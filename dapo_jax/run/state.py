"""State of a run: from its beginning or a checkpoint, and into the next checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from dapo_jax.learner.learners import LearnerStates
from dapo_jax.reporting.console import fit
from dapo_jax.reporting.notices import SPOT_SECONDS, describe_saving, saving_seconds
from dapo_jax.rollout.carry_over import empty_arrays, pack_partial, unpack_partial
from dapo_jax.rollout.dynamic_sampling import seek
from dapo_jax.rollout.source import NoJournal, SourceState
from dapo_jax.run.checkpointing.checkpoints import Checkpoints, find_steps
from dapo_jax.run.checkpointing.rollout_journal import RolloutJournal
from dapo_jax.run.checkpointing.same_run import Record, RunProgress
from dapo_jax.run.components import Components
from dapo_jax.run.memory import checkpoint_bytes, megabytes_per_device
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.retries import Storage, suppress_storage_errors
from dapo_jax.structs import PartialGroup, Prompt
from dapo_jax.train import TrainerState


def first_state(components: Components) -> TrainerState:
    """Return the state before the first step."""
    learners, critic = components.learners, None
    if learners.critic:
        critic = learners.critic.start(components.critic_params())
    policy = learners.policy.start(components.first_params())
    return TrainerState(0, LearnerStates(policy, critic), SourceState())


def restore(components: Components, checkpoints: Checkpoints, record: Record) -> TrainerState:
    """Return the state of the newest checkpoint; `record` belongs to it."""
    learners, critic, behaviour = components.learners, None, None
    policy = checkpoints.state(learners.policy.abstract_state)
    if learners.critic:
        critic = checkpoints.state(learners.critic.abstract_state, "critic")
    if components.config.rollout.lag and record.step:
        behaviour = checkpoints.state(learners.policy.abstract_state.params, "behaviour")
    progress = record.progress
    partial = _restore_partial(components, checkpoints, progress.carried)
    source = SourceState(progress.position, progress.kept_fraction, partial, behaviour)
    return TrainerState(record.step, LearnerStates(policy, critic), source)


def _restore_partial(
    components: Components, checkpoints: Checkpoints, records: list[dict[str, Any]]
) -> tuple[PartialGroup, ...]:
    arrays: Any = empty_arrays(records)
    if arrays["tokens"].size:  # these only say what to read
        arrays = checkpoints.state(arrays, "carried")

    def read_prompt(index: int) -> Prompt:
        return next(seek(components.prompts, index))

    return unpack_partial(arrays, records, read_prompt, components.tokenizer.decode)


class RunStore:
    """What a run saves: checkpoints, and the journal of the step under way.

    Args:
        record: settings and inputs of the run, which every checkpoint holds.
        storage: finishes the files of a step before a checkpoint holds the step.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        record: Record,
        storage: Storage,
        journal: RolloutJournal | NoJournal,
    ):
        self.checkpoints = checkpoints
        self._record = record
        self._storage = storage
        self._journal = journal

    def save(self, state: TrainerState, progress: RunProgress) -> None:
        """Start writing a checkpoint in the background. Raises `NotSaved`, `NotFinite`."""
        self._storage.drain()
        source = state.source
        arrays, carried = pack_partial(source.partial)
        progress = dataclasses.replace(
            progress,
            position=source.position,
            kept_fraction=source.kept_fraction,
            carried=carried,
        )
        states = {
            "state": state.learners.policy,
            "critic": state.learners.critic,
            "behaviour": source.behaviour,
            "carried": arrays,
        }
        record = dataclasses.replace(self._record, step=state.step, progress=progress)
        self.checkpoints.save(record, states)

    def after_step(self, is_due: bool, save: Callable[[], None], run_dir: str) -> None:
        """Save if that is due or has just failed; forget journal entries of saved steps."""
        self.checkpoints.after_step(is_due, save)
        if isinstance(self._journal, RolloutJournal) and processes.is_first():
            with suppress_storage_errors():  # else after the next step
                self._journal.forget(max(find_steps(run_dir), default=0))

    def save_last(self, step: int, save: Callable[[], None]) -> None:
        """Save, and wait until everything is on disk. Raises `NotSaved`, `NotFinite`."""
        self.checkpoints.save_last(save)
        self._storage.clear_backoff()  # last chance to write: do not back off
        self._journal.forget(step)
        self._storage.drain()


def announce_policy(components: Components, state: TrainerState) -> None:
    """Print the number of parameters and their memory."""
    trees = state.learners.policy.params, components.frozen
    trained, frozen = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in trees)
    sizes = [f"{name} {size:g}" for name, size in resident_megabytes(components, state).items()]
    components.progress.say(f"policy: {trained:,} parameters to train, {frozen:,} frozen")
    components.progress.say(fit(["MB per device:", *sizes]))
    size, hosts = checkpoint_bytes(components.config, components.decoder), processes.count()
    if saving_seconds(size, hosts) > SPOT_SECONDS / 2:
        every = components.config.checkpoint.every_steps
        components.progress.say(describe_saving(size, hosts, every))


def resident_megabytes(components: Components, state: TrainerState) -> dict[str, float]:
    """Return megabytes per device that stay in memory between steps, by name."""
    policy, critic = state.learners.policy, state.learners.critic
    return megabytes_per_device(
        policy=policy.params,
        policy_optimizer=policy.opt_state,
        policy_frozen=components.frozen,
        sampler_frozen=components.sampler.resident(),
        critic=critic and critic.params,
        critic_optimizer=critic and critic.opt_state,
        reference=components.learners.reference,
        teacher=components.learners.teacher_params,
    )
