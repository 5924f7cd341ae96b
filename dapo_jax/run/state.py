"""State of a run: from its beginning or a checkpoint, and into the next checkpoint."""

import dataclasses
from typing import Any

import jax

from dapo_jax.learner.learners import LearnerStates
from dapo_jax.reporting.console import fit
from dapo_jax.reporting.notices import SPOT_SECONDS, describe_saving, saving_seconds
from dapo_jax.rollout.carry_over import empty_arrays, pack_partial, unpack_partial
from dapo_jax.rollout.dynamic_sampling import seek
from dapo_jax.rollout.source import SourceState
from dapo_jax.run.checkpointing.checkpoints import Checkpoints, Record
from dapo_jax.run.components import Components
from dapo_jax.run.memory import checkpoint_bytes, megabytes_per_device
from dapo_jax.runtime import processes
from dapo_jax.structs import PartialGroup, Prompt
from dapo_jax.train import TrainerState


@dataclasses.dataclass
class RunProgress:
    """Record of a run beside its trainer's state.

    Attributes:
        heldout_before: held-out accuracy before the first step.
        seconds: that the run has taken, in all its processes.
        unwritten: metrics of the newest step, while its evaluation is still to come.
        skipped: steps in a row without an update, by learner (`count_skipped`).
    """

    heldout_before: float | None = None
    seconds: float = 0.0
    unwritten: dict[str, float] | None = None
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)


def first_state(components: Components) -> TrainerState:
    """The state before the first step."""
    learners, critic = components.learners, None
    if learners.critic:
        critic = learners.critic.start(components.critic_params())
    policy = learners.policy.start(components.first_params())
    return TrainerState(0, LearnerStates(policy, critic), SourceState())


def restore(
    components: Components, checkpoints: Checkpoints, record: Record
) -> tuple[TrainerState, RunProgress]:
    """State and progress of the newest checkpoint, whose record is `record`."""
    learners, critic, behaviour = components.learners, None, None
    policy = checkpoints.state(learners.policy.abstract_state)
    if learners.critic:
        critic = checkpoints.state(learners.critic.abstract_state, "critic")
    if components.config.rollout.lag and record.step:
        behaviour = checkpoints.state(learners.policy.abstract_state.params, "behaviour")
    rest = dict(record.progress)
    partial = _restore_partial(components, checkpoints, rest.pop("carried", []))
    source = SourceState(rest.pop("position"), rest.pop("kept_fraction"), partial, behaviour)
    return TrainerState(record.step, LearnerStates(policy, critic), source), RunProgress(**rest)


def _restore_partial(
    components: Components, checkpoints: Checkpoints, records: list[dict[str, Any]]
) -> tuple[PartialGroup, ...]:
    arrays: Any = empty_arrays(records)
    if arrays["tokens"].size:  # these only say what to read
        arrays = checkpoints.state(arrays, "carried")

    def read_prompt(index: int) -> Prompt:
        return next(seek(components.prompts, index))

    return unpack_partial(arrays, records, read_prompt, components.tokenizer.decode)


def save(
    checkpoints: Checkpoints, state: TrainerState, progress: RunProgress, record: Record
) -> None:
    """Starts writing a checkpoint in the background; `record` has settings and inputs."""
    source, arrays, partial = state.source, *pack_partial(state.source.partial)
    place = {"position": source.position, "kept_fraction": source.kept_fraction}
    rest = dataclasses.asdict(progress) | place | ({"carried": partial} if partial else {})
    states: dict[str, Any] = {"state": state.learners.policy, "critic": state.learners.critic}
    states |= {"behaviour": source.behaviour, "carried": arrays}
    checkpoints.save(dataclasses.replace(record, step=state.step, progress=rest), states)


def announce_policy(components: Components, state: TrainerState) -> None:
    """Console lines with the number of parameters and their memory."""
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
    """Megabytes per device that stay in memory between steps, by name."""
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
