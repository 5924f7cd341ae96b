"""The state of a run from its beginning or its newest checkpoint, and into the next one."""

from typing import Any

import jax
import numpy as np

from dapo_jax.reporting.console import fit
from dapo_jax.rollout.carry_over import OF_ARRAYS, pack_carried, packed_tokens, unpack_carried
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.components import Parts
from dapo_jax.run.memory import megabytes_per_device
from dapo_jax.structs import Carried, Prompt
from dapo_jax.train import RunState

FIRST_KEPT_FRACTION = 0.5  # before anything was seen
DTYPES = dict(zip(OF_ARRAYS, (np.int32, np.float32), strict=True))


def first_state(parts: Parts) -> RunState:
    """Nothing is learned yet."""
    train = parts.learner.start(parts.first_params())
    critic = parts.critic.start(parts.critic_params()) if parts.critic else None
    return RunState(0, train, 0, FIRST_KEPT_FRACTION, critic)


def saved_state(parts: Parts, checkpoints: Checkpoints, record: dict[str, Any]) -> RunState:
    """That of the newest checkpoint, whose record is `record` without its settings."""
    critic = behaviour = None
    train = checkpoints.state(parts.learner.abstract_state)
    if parts.critic:
        critic = checkpoints.state(parts.critic.abstract_state, "critic")
    if parts.config.rollout.lag and record["step"]:
        behaviour = checkpoints.state(parts.learner.abstract_state.params, "behaviour")
    carried = _saved_carried(parts, checkpoints, record.pop("carried", []))
    return RunState(train=train, critic=critic, behaviour=behaviour, carried=carried, **record)


def _saved_carried(
    parts: Parts, checkpoints: Checkpoints, record: list[dict[str, Any]]
) -> tuple[Carried, ...]:
    size = packed_tokens(record)
    arrays: Any = {name: np.zeros(size, dtype) for name, dtype in DTYPES.items()}
    if size:  # these only say what to read
        arrays = checkpoints.state(arrays, "carried")

    def read_prompt(index: int) -> Prompt:
        parts.prompts.position = index
        return next(parts.prompts)

    return unpack_carried(arrays, record, read_prompt, parts.tokenizer.decode)


def save_state(checkpoints: Checkpoints, state: RunState, marks: dict[str, Any]) -> None:
    """A checkpoint of it, written in the background; `marks` stand beside it in the record."""
    arrays, carried = pack_carried(state.carried)
    record = state.record() | marks
    if carried:
        record["carried"] = carried
    states: dict[str, Any] = {"state": state.train, "critic": state.critic}
    states |= {"behaviour": state.behaviour, "carried": arrays}
    checkpoints.save(state.step, states, record)


def announce_policy(parts: Parts, state: RunState) -> None:
    """How many parameters there are, and what they and what belongs to them take."""
    parts.sampler.hold()
    trees = state.train.params, parts.frozen
    trained, frozen = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in trees)
    sizes = [f"{name} {size:g}" for name, size in resident_megabytes(parts, state).items()]
    parts.progress.say(f"policy: {trained:,} parameters to train, {frozen:,} frozen")
    parts.progress.say(fit(["MB per device:", *sizes]))


def resident_megabytes(parts: Parts, state: RunState) -> dict[str, float]:
    """What stays in memory between steps, by name."""
    policy, critic = state.train, state.critic
    return megabytes_per_device(
        policy=policy.params,
        policy_optimizer=policy.opt_state,
        policy_frozen=parts.frozen,
        sampler_frozen=parts.sampler.held,
        critic=critic and critic.params,
        critic_optimizer=critic and critic.opt_state,
        reference=parts.reference,
    )
