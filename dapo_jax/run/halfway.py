"""Resumption of supervised training: checkpoints and metrics.jsonl beside the output folder.

`OUT.halfway` holds them until OUT is complete. A command that was stopped resumes from them; one
with other settings, data or models starts from scratch.
"""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from dapo_jax.config.experiment import DpoConfig, SftConfig
from dapo_jax.config.sections import Checkpoint
from dapo_jax.learner.batches import TrainState
from dapo_jax.run.checkpointing.checkpoints import Checkpoints, find_steps, saved_steps
from dapo_jax.run.checkpointing.same_run import Record, RunProgress
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import leaves
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.output_folder import UNFINISHED, claim
from dapo_jax.runtime.storage.retries import NotSaved, Storage

METRICS = "metrics.jsonl"
NOT_COMPARED = ("out", "save_every_steps")


class Stopped(Exception):
    """Raised if a signal, named by the argument, ended the command; `out` is not written.

    Attributes:
        step: the newest one on disk; 0: none.
    """

    step = 0


class ResumePoint:
    """Newest state of a supervised run; a context manager that locks its folder.

    Every process calls every method.

    Args:
        digests: of the files that the run reads, by name.

    Attributes:
        path: of the folder, which holds metrics.jsonl too.
        record: finished steps, settings and skipped updates.
    """

    def __init__(self, config: SftConfig | DpoConfig, digests: dict[str, str]):
        self._storage = Storage()
        self._every = config.save_every_steps
        out = pathlib.Path(config.out)
        self.path = out.with_name(f"{out.name}.halfway")
        settings = {name: value for name, _, value in leaves(config) if name not in NOT_COMPARED}
        self.record = Record(0, settings, digests)
        self._state: TrainState | None = None

    def __enter__(self) -> "ResumePoint":
        with contextlib.ExitStack() as stack:
            stack.enter_context(claim("out", str(self.path), UNFINISHED))
            stack.callback(self._remove_if_empty)
            self._remove_other_run()
            checkpoints = Checkpoints(self.path, Checkpoint(keep=1), self._storage)
            self._checkpoints = stack.enter_context(checkpoints)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)  # waits for what is being written
        if isinstance(error, Stopped):
            error.step = max(saved_steps(self.path), default=0)

    def _remove_other_run(self) -> None:
        if not Checkpoints.exist(self.path):
            return
        with Checkpoints(self.path) as saved:
            if saved.latest_step() is None or self.record.continues(saved.record()):
                return
        self._storage.warn(f"{self.path} has other settings or data: training starts from scratch")
        processes.broadcast_from_host0(self._remove, "removal of another run")

    def _remove_if_empty(self) -> None:
        if processes.is_first() and not find_steps(self.path):
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        (self.path / METRICS).unlink(missing_ok=True)

    def begin(self, abstract: TrainState, make_state: Callable[[], TrainState]) -> TrainState:
        """Return the newest saved state, or a new one."""
        if self._checkpoints.latest_step() is None:
            return make_state()
        saved = self._checkpoints.record()
        self.record = dataclasses.replace(self.record, step=saved.step, progress=saved.progress)
        self._state = self._checkpoints.state(abstract)
        return self._state

    def first_row(self) -> dict[str, Any]:
        """Return the metrics from before the first step, on every process; empty without any."""

        def read() -> dict[str, Any]:
            rows = objects(self.path / METRICS) if self.record.step else ()
            return next((row for row in rows if row.get("step") == 0), {})

        return processes.broadcast_from_host0(read, "metrics before the first step")

    def is_due(self) -> bool:
        """Return True if the state after the running step is to be saved."""
        return (self.record.step + 1) % self._every == 0

    def after_step(self, state: TrainState, skipped: dict[str, int]) -> None:
        """Count a step, and save if that is due."""
        is_due = self.is_due()
        self._state = state
        step, progress = self.record.step + 1, RunProgress(skipped=skipped)
        self.record = dataclasses.replace(self.record, step=step, progress=progress)
        self._checkpoints.after_step(is_due, self._save)

    def _save(self) -> None:
        self._checkpoints.save(self.record, {"state": self._state})

    def keep(self) -> None:
        """Wait until the newest state is on disk, or can't be."""
        try:
            if self.record.step:
                self._checkpoints.save_last(self._save)
        except NotSaved as error:
            self._storage.report_failure("the training state", str(error))

    def forget(self) -> None:
        """Remove the folder, once the output is complete."""
        if processes.is_first():
            shutil.rmtree(self.path, ignore_errors=True)
