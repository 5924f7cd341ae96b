"""Resume of supervised training: checkpoints and metrics.jsonl beside the folder to be written.

`OUT.halfway` holds them until OUT is there. A command that was stopped goes on from them; one with
other settings, data or models begins anew.
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
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.run.checkpointing.checkpoints import Checkpoints, Record
from dapo_jax.run.checkpointing.integrity import saved_steps
from dapo_jax.run.checkpointing.saver import CheckpointSaver
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import leaves
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.output_folder import claim
from dapo_jax.runtime.storage.ownership import HALFWAY, MARK
from dapo_jax.runtime.storage.retries import NotSaved, Storage

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
NOT_COMPARED = ("out", "save_every_steps")


def model_digests(*folders: str) -> dict[str, str]:
    """Digests of model folders, by name; an empty name is no folder."""
    return {name: fingerprint(name) for name in folders if name}


def resume_folder(out: str) -> pathlib.Path:
    """Folder beside `out` that holds the state until `out` is complete."""
    path = pathlib.Path(out)
    return path.with_name(f"{path.name}.halfway")


class Stopped(Exception):
    """Raised where a signal, whose name is the argument, asked to leave; `out` is not written.

    Attributes:
        step: the newest one on disk; 0: none.
    """

    step = 0


class ResumePoint:
    """Newest state of a supervised run, saved now and then. Every process calls every method.

    A context manager: it locks the folder.

    Args:
        digests: of the files that the run reads, by name.
        storage: warns of failed saves.

    Attributes:
        folder: holds metrics.jsonl; None on processes that do not write.
        step: steps that are done.
        skipped: updates in a row that were skipped.
    """

    def __init__(
        self, config: SftConfig | DpoConfig, digests: dict[str, str], storage: Storage | None = None
    ):
        self._storage = storage or Storage()
        self._every = config.save_every_steps
        self._path = resume_folder(config.out)
        settings = {name: value for name, _, value in leaves(config) if name not in NOT_COMPARED}
        self._record = Record(0, settings, digests)
        self.folder = self._path if processes.is_first() else None
        self.step, self.skipped, self._state = 0, dict[str, int](), None

    def __enter__(self) -> "ResumePoint":
        with contextlib.ExitStack() as stack:
            stack.enter_context(claim("out", str(self._path), HALFWAY))
            stack.callback(self._remove_if_empty)
            self._remove_other_run()
            checkpoints = Checkpoints(self._path, Checkpoint(keep=1), self._storage.warn)
            self._checkpoints = stack.enter_context(checkpoints)
            self._saver = CheckpointSaver(self._checkpoints, self._storage)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)  # waits for what is being written
        if isinstance(error, Stopped):
            error.step = max(saved_steps(self._path), default=0)

    def _remove_other_run(self) -> None:
        if not Checkpoints.exist(self._path):
            return
        with Checkpoints(self._path) as checkpoints:
            same = checkpoints.latest_step() is None or self._record.continues(checkpoints.record())
        if not same:
            self._storage.warn(f"{self._path} is of other settings or data: it begins anew")
            processes.broadcast_from_host0(
                lambda: _remove(self._path), "removing what another run left"
            )

    def _remove_if_empty(self) -> None:
        if self.folder and not list(self.folder.glob(f"{CHECKPOINTS}/[0-9]*")):
            _remove(self._path)

    def begin(self, abstract: TrainState, make_state: Callable[[], TrainState]) -> TrainState:
        """Newest state that was saved, or a new one."""
        if self._checkpoints.latest_step() is None:
            return make_state()
        record = self._checkpoints.record()
        self.step, self.skipped = record.step, record.progress["skipped"]
        self._state = self._checkpoints.state(abstract)
        return self._state

    def first_row(self) -> dict[str, Any]:
        """Metrics from before the first step, on every process; empty where there are none."""

        def read() -> dict[str, Any]:
            rows = objects(self._path / METRICS) if self.step else ()
            return next((row for row in rows if row.get("step") == 0), {})

        return processes.broadcast_from_host0(read, "metrics before the first step")

    def is_due(self, step: int) -> bool:
        """True if the state after so many steps is to be saved."""
        return step % self._every == 0

    def done(self, state: TrainState, skipped: dict[str, int]) -> None:
        """Counts a step, and saves where that is due."""
        self._state, self.step, self.skipped = state, self.step + 1, skipped
        self._saver.step(self.is_due(self.step), self._save)

    def _save(self) -> None:
        record = dataclasses.replace(
            self._record, step=self.step, progress={"skipped": self.skipped}
        )
        self._checkpoints.save(record, {"state": self._state})

    def keep(self) -> None:
        """Returns when the newest state is on disk, or can't be."""
        try:
            if self.step:
                self._saver.last(self._save)
        except NotSaved as error:
            self._storage.failed("where the run is", str(error))


def _remove(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    (folder / METRICS).unlink(missing_ok=True)


def forget(out: str) -> None:
    """Removes the state beside a folder that is complete."""
    path = resume_folder(out)
    if processes.is_first() and path.is_dir():
        with contextlib.suppress(OSError):
            _remove(path)
            (path / MARK).unlink(missing_ok=True)
            path.rmdir()
