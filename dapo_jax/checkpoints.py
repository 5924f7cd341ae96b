"""Orbax checkpoints: parameters, optimizer, and where the run is. Complete or absent."""

import pathlib
from typing import Any

import orbax.checkpoint as ocp

from dapo_jax.config import Checkpoint
from dapo_jax.settings import require
from dapo_jax.structs import TrainState


class Checkpoints:
    """Saves and restores `TrainState` with a small JSON record beside it.

    The record holds the step to go on with, the data position, the kept-fraction estimate and the
    seed, from which every random key of a step is derived.
    """

    def __init__(self, run_dir: str | pathlib.Path, settings: Checkpoint):
        folder = pathlib.Path(run_dir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=settings.keep, create=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def latest_step(self) -> int | None:
        """The step that the newest complete checkpoint goes on with; None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
        """Starts writing in the background; a step that is already there is left alone."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
            ),
        )

    def restore(self, abstract_state: TrainState, seed: int) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint on the mesh of `abstract_state`, and its record.

        Raises `ConfigError` where the run was made with another seed: nothing would repeat.
        """
        restored = self._manager.restore(
            self._manager.latest_step(),
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state), record=ocp.args.JsonRestore()
            ),
        )
        record = restored["record"]
        require(seed == record["seed"], "seed", seed, f"{record['seed']}, the run's own, to resume")
        return restored["state"], record

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
