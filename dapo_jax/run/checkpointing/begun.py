"""A step whose updates are not all made: saved in the middle, and gone on with from there.

`run_dir/updates` holds the state after so many updates, and what was said of the rollouts before
the first of them; the rollouts themselves are among the finished groups.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from dapo_jax.config.checkpoint import Checkpoint
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.checkpointing.saver import CheckpointSaver
from dapo_jax.run.components import Parts
from dapo_jax.runtime import processes
from dapo_jax.runtime.sharding import put, to_host
from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import Storage, overlooked
from dapo_jax.structs import Group, Mean, ScoredBatch
from dapo_jax.train import Begun, RunState

FOLDER = "updates"


class BegunSteps:
    """Saves and restores a step in progress. Every process calls every method.

    Args:
        folder: of the run.
        identity: of the run; what another left is removed.
        storage: is told of what can't be saved.
    """

    def __init__(self, parts: Parts, folder: Folder, identity: str, storage: Storage):
        self._parts, self._storage, self._folder = parts, storage, folder / FOLDER
        self._identity, self._every = identity, parts.config.checkpoint.every_updates
        self._per_step = parts.config.rollout.updates_per_rollout
        self._open()

    def _open(self) -> None:
        self._checkpoints = Checkpoints(self._folder, Checkpoint(keep=1), self._storage.warn)
        self._keeper = CheckpointSaver(self._checkpoints, self._storage)

    def done(
        self,
        updates: int,
        run: RunState,
        scored: ScoredBatch,
        means: Sequence[dict[str, Mean]],
        groups: Sequence[Group],
    ) -> None:
        """Saves where that is due; after a step's last update the run itself does.

        Args:
            updates: of the step that are made.
            means: of those of them that had something to learn from.
        """
        if updates % self._every or updates == self._per_step:
            return
        names = ("old_logprobs", "reference_logprobs", "values")
        scores = {name: getattr(scored, name) for name in names}
        scores = to_host({name: array for name, array in scores.items() if array is not None})
        position, kept_fraction = run.started
        record = run.record() | {
            "position": position,
            "kept_fraction": kept_fraction,
            "settings": {},
            "identity": self._identity,
            "packing": dataclasses.asdict(self._parts.config.packing),
            "updates": updates,
            "means": [_numbers(one) for one in means],
            "scores": {name: np.shape(array) for name, array in scores.items()},
            "groups": [group.prompt.index for group in groups],
        }
        states = {"state": run.train, "critic": run.critic, "scores": scores or None}
        number = run.step * self._per_step + updates
        self._keeper.step(True, lambda: self._checkpoints.save(number, states, record))

    def restore(self, run: RunState) -> RunState:
        """`run` itself, or a later state in the middle of a step.

        That is one whose groups are all there: they would else be drawn by a policy that has
        learned from them.
        """
        if self._checkpoints.latest_step() is None:
            return run
        record = self._checkpoints.record()
        del record["settings"]
        names = ("identity", "packing", "updates", "means", "scores")
        told = {name: record.pop(name) for name in names}
        groups = set(record.pop("groups"))
        known: Mapping[int, Any] = self._parts.finished.begin(record["step"])
        if (
            told["identity"] != self._identity
            # What was said of the rollouts is packed as they were; a run may go on with other rows.
            or told["packing"] != dataclasses.asdict(self._parts.config.packing)
            or record["step"] < run.step
            or not groups <= known.keys()
        ):
            self._begin_anew()
            return run
        parts = self._parts
        train = self._checkpoints.state(parts.learner.abstract_state)
        critic = None
        if parts.critic:
            critic = self._checkpoints.state(parts.critic.abstract_state, "critic")
        scores: Any = {name: np.zeros(size, np.float32) for name, size in told["scores"].items()}
        if scores:  # these only say what to read
            scores = self._checkpoints.state(scores, "scores")
        scores = put(parts.learner.mesh, scores, None, None, "batch")
        begun = Begun(told["updates"], [_means(one) for one in told["means"]], scores)
        return RunState(train=train, critic=critic, begun=begun, **record)

    def _begin_anew(self) -> None:
        """Orbax would save nothing before what is there."""
        self._checkpoints.close()
        processes.from_first(self._remove, "removing updates")
        self._open()

    def _remove(self) -> None:
        with overlooked():  # what is left there does not fit the next time either
            epath.Path(self._folder).rmtree(missing_ok=True)  # which may be on an object store

    def close(self) -> None:
        """Waits until everything is on disk, or can't be."""
        self._checkpoints.close()


def _numbers(means: dict[str, Mean]) -> dict[str, list[float]]:
    found = to_host(means)
    return {name: [float(mean.total), float(mean.weight)] for name, mean in found.items()}


def _means(numbers: dict[str, list[float]]) -> dict[str, Mean]:
    return {name: Mean(*map(jnp.float32, pair)) for name, pair in numbers.items()}
