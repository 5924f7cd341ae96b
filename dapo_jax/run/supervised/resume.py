"""Where supervised training or offline pairs are, beside the folder that they will write.

`OUT.halfway` holds checkpoints and the lines of metrics.jsonl until OUT is there. A command that
was stopped goes on from them; one with other settings, data or models begins anew.
"""

import contextlib
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

from dapo_jax.config.experiment import DpoConfig, SftConfig
from dapo_jax.config.outputs import Checkpoint
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.checkpointing.integrity import saved_steps
from dapo_jax.run.checkpointing.same_run import run_identity
from dapo_jax.run.checkpointing.saver import CheckpointSaver
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import leaves
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.output_folder import claim
from dapo_jax.runtime.storage.ownership import HALFWAY, MARK
from dapo_jax.runtime.storage.retries import NotSaved, Storage
from dapo_jax.structs import TrainState

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
NOT_COMPARED = ("out", "save_every_steps")


def model_digests(*folders: str) -> dict[str, str]:
    """Of model folders, by name; an empty name is none."""
    return {name: fingerprint(name) for name in folders if name}


def folder_of(out: str) -> pathlib.Path:
    """The folder beside the one that is to be written."""
    path = pathlib.Path(out)
    return path.with_name(f"{path.name}.halfway")


class Stopped(Exception):
    """A signal, its name, asked to leave; `out` was not written.

    Attributes:
        step: the last one that is on disk; 0: none.
    """

    step = 0


class ResumePoint:
    """The newest state of such a run, saved now and then. Every process calls every method.

    A context manager: it holds the folder against other processes.

    Args:
        digests: of what the run reads, by name.
        storage: is told of what could not be saved.

    Attributes:
        folder: holds metrics.jsonl; None where another process writes.
        step: steps that are done.
        skipped: updates in a row that were skipped.
    """

    def __init__(
        self, config: SftConfig | DpoConfig, digests: dict[str, str], storage: Storage | None = None
    ):
        self._storage = storage or Storage()
        self._every = config.save_every_steps
        self._path = folder_of(config.out)
        settings = {name: value for name, _, value in leaves(config) if name not in NOT_COMPARED}
        self._record = {"settings": settings, "identity": run_identity(settings, digests)}
        self.folder = self._path if processes.is_first() else None
        self.step, self.skipped, self._state = 0, dict[str, int](), None

    def __enter__(self) -> "ResumePoint":
        with contextlib.ExitStack() as stack:
            stack.enter_context(claim("out", str(self._path), HALFWAY))
            stack.callback(self._tidy)
            self._begin_anew_if_other()
            checkpoints = Checkpoints(self._path, Checkpoint(keep=1), self._storage.warn)
            self._checkpoints = stack.enter_context(checkpoints)
            self._keeper = CheckpointSaver(self._checkpoints, self._storage)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)  # waits for what is being written
        if isinstance(error, Stopped):
            error.step = max(saved_steps(self._path), default=0)

    def _begin_anew_if_other(self) -> None:
        """Removes what another run left."""
        if not Checkpoints.exist(self._path):
            return
        with Checkpoints(self._path) as checkpoints:
            step = checkpoints.latest_step()
            same = step is None or checkpoints.record()["identity"] == self._record["identity"]
        if not same:
            self._storage.warn(f"{self._path} is of other settings or data: it begins anew")
            processes.from_first(self._remove, "removing what another run left")

    def _tidy(self) -> None:
        """Leaves nothing where nothing was saved."""
        if self.folder and not list(self.folder.glob(f"{CHECKPOINTS}/[0-9]*")):
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._path / CHECKPOINTS, ignore_errors=True)
        (self._path / METRICS).unlink(missing_ok=True)

    def begin(self, abstract: TrainState, fresh: Callable[[], TrainState]) -> TrainState:
        """The state to go on from: the newest that was saved, or a fresh one."""
        if self._checkpoints.latest_step() is None:
            return fresh()
        record = self._checkpoints.record()
        self.step, self.skipped = record["step"], record["skipped"]
        self._state = self._checkpoints.state(abstract)
        return self._state

    def first_row(self) -> dict[str, Any]:
        """The metrics before the first step, where the run goes on."""

        def read() -> dict[str, Any]:
            rows = objects(self._path / METRICS) if self.step else ()
            return next((row for row in rows if row.get("step") == 0), {})

        return processes.from_first(read, "metrics before the first step")

    def is_due(self, step: int) -> bool:
        """Whether the state after so many steps is to be saved."""
        return step % self._every == 0

    def done(self, state: TrainState, skipped: dict[str, int]) -> None:
        """Another step is done; saves where that is due."""
        self._state, self.step, self.skipped = state, self.step + 1, skipped
        self._keeper.step(self.is_due(self.step), self._save)

    def _save(self) -> None:
        told = {"step": self.step, "skipped": self.skipped}
        self._checkpoints.save(self.step, {"state": self._state}, self._record | told)

    def keep(self) -> None:
        """Returns when the state as it is is on disk, or can't be."""
        try:
            if self.step:
                self._keeper.last(self._save)
        except NotSaved as error:
            self._storage.failed("where the run is", str(error))


def forget(out: str) -> None:
    """Removes what is beside a folder that is complete."""
    path = folder_of(out)
    if not processes.is_first() or not path.is_dir():
        return
    shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    with contextlib.suppress(OSError):
        for name in (METRICS, MARK):
            (path / name).unlink(missing_ok=True)
        path.rmdir()
