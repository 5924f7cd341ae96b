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

from dapo_jax.config.experiment import Checkpoint, DpoConfig, SftConfig
from dapo_jax.learner.batches import TrainState
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.checkpointing.integrity import find_steps, saved_steps
from dapo_jax.run.checkpointing.same_run import Record, RunProgress
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import leaves
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.output_folder import MARK, UNFINISHED, claim
from dapo_jax.runtime.storage.retries import NotSaved, Storage

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
NOT_COMPARED = ("out", "save_every_steps")


class Stopped(Exception):
    """Raised if a signal, named by the argument, ended the command; `out` is not written.

    Attributes:
        step: the newest one on disk; 0: none.
    """

    step = 0


def resume_folder(out: str) -> pathlib.Path:
    """Return the folder beside `out` that holds the state until `out` is complete."""
    path = pathlib.Path(out)
    return path.with_name(f"{path.name}.halfway")


class ResumePoint:
    """Newest state of a supervised run; a context manager that locks its folder.

    Every process calls every method.

    Args:
        digests: of the files that the run reads, by name.
        storage: warns of failed saves.

    Attributes:
        path: of the folder, which holds metrics.jsonl too.
        step: finished steps.
        skipped: updates in a row that were skipped.
    """

    def __init__(
        self, config: SftConfig | DpoConfig, digests: dict[str, str], storage: Storage | None = None
    ):
        self._storage = storage or Storage()
        self._every = config.save_every_steps
        self.path = resume_folder(config.out)
        settings = {name: value for name, _, value in leaves(config) if name not in NOT_COMPARED}
        self._record = Record(0, settings, digests)
        self.step = 0
        self.skipped: dict[str, int] = {}
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
            if saved.latest_step() is None or self._record.continues(saved.record()):
                return
        self._storage.warn(f"{self.path} has other settings or data: training starts from scratch")
        processes.broadcast_from_host0(lambda: _remove(self.path), "removal of another run")

    def _remove_if_empty(self) -> None:
        if processes.is_first() and not find_steps(self.path):
            _remove(self.path)

    def begin(self, abstract: TrainState, make_state: Callable[[], TrainState]) -> TrainState:
        """Return the newest saved state, or a new one."""
        if self._checkpoints.latest_step() is None:
            return make_state()
        record = self._checkpoints.record()
        self.step = record.step
        self.skipped = record.progress.skipped
        self._state = self._checkpoints.state(abstract)
        return self._state

    def first_row(self) -> dict[str, Any]:
        """Return the metrics from before the first step, on every process; empty without any."""

        def read() -> dict[str, Any]:
            rows = objects(self.path / METRICS) if self.step else ()
            return next((row for row in rows if row.get("step") == 0), {})

        return processes.broadcast_from_host0(read, "metrics before the first step")

    def is_due(self, step: int) -> bool:
        """Return True if the state after so many steps is to be saved."""
        return step % self._every == 0

    def after_step(self, state: TrainState, skipped: dict[str, int]) -> None:
        """Count a step, and save if that is due."""
        self._state = state
        self.step += 1
        self.skipped = skipped
        self._checkpoints.after_step(self.is_due(self.step), self._save)

    def _save(self) -> None:
        progress = RunProgress(skipped=self.skipped)
        record = dataclasses.replace(self._record, step=self.step, progress=progress)
        self._checkpoints.save(record, {"state": self._state})

    def keep(self) -> None:
        """Wait until the newest state is on disk, or can't be."""
        try:
            if self.step:
                self._checkpoints.save_last(self._save)
        except NotSaved as error:
            self._storage.report_failure("the training state", str(error))


def _remove(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    (folder / METRICS).unlink(missing_ok=True)


def forget(out: str) -> None:
    """Remove the state beside a folder that is complete."""
    path = resume_folder(out)
    if processes.is_first() and (path / MARK).exists():
        shutil.rmtree(path, ignore_errors=True)
