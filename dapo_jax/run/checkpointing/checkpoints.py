"""Orbax checkpoints: arrays with a typed record of the run. Complete or absent."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from dapo_jax.config.experiment import Checkpoint
from dapo_jax.learner.batches import TrainState
from dapo_jax.run.checkpointing.integrity import (
    checkpoint_folder,
    damage,
    latest_valid,
    saved_steps,
    seal,
)
from dapo_jax.run.checkpointing.same_run import run_identity, with_defaults
from dapo_jax.runtime import processes
from dapo_jax.runtime.nonfinite import check_state
from dapo_jax.runtime.settings import ConfigError, require
from dapo_jax.runtime.sharding import flatten
from dapo_jax.runtime.storage.ownership import folder_at, is_remote
from dapo_jax.runtime.storage.retries import (
    NotSaved,
    let_orbax_use_buckets,
    print_error,
    quiet_orbax,
    reason,
)
from dapo_jax.structs import present

DAMAGED = "damaged_checkpoints"
POLL_SECONDS = 0.1
SETTLING_SECONDS = 0.5  # for threads of a save that failed, which may still make files


@dataclasses.dataclass(frozen=True)
class Record:
    """Progress of a run and what it computes with: JSON beside the arrays of a checkpoint.

    Attributes:
        step: steps that are done.
        settings: values by dotted name.
        inputs: digests of what the run reads, by kind.
        progress: what else this kind of run goes on with.
    """

    step: int
    settings: dict[str, Any]
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    progress: dict[str, Any] = dataclasses.field(default_factory=dict)

    def continues(self, saved: "Record") -> bool:
        """True if a run of these settings and inputs computes the same as the run of `saved`."""
        settings = {name: saved.settings.get(name) for name in self.settings}
        return run_identity(self.settings, self.inputs) == run_identity(settings, saved.inputs)

    def content(self) -> dict[str, Any]:
        """JSON that `read` takes; entries of `progress` stand beside the others."""
        return self.progress | {
            name: getattr(self, name) for name in ("step", "settings", "inputs")
        }

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Record":
        """Record from a checkpoint's JSON; settings younger than it have their defaults."""
        progress = dict(content)
        step, settings = progress.pop("step"), with_defaults(progress.pop("settings"))
        return cls(step, settings, progress.pop("inputs", {}), progress)


class Checkpoints:
    """Checkpoint store of a run: saves and restores arrays and records, on any process count.

    Every process calls every method. A context manager: leaving it closes. The newest sound
    checkpoint is restored; where this saves, damaged ones after it are moved to
    `damaged_checkpoints`.

    Args:
        settings: of the run that saves; None: checkpoints are only read.
        warn: receives warnings of damaged checkpoints.

    Raises:
        ConfigError: there are checkpoints, and none is sound.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        settings: Checkpoint | None = None,
        warn: Callable[[str], None] = print_error,
    ):
        self._folder, self._settings = checkpoint_folder(run_dir), settings
        self._step = latest_valid(run_dir, warn)
        self._saving = 0  # the step of the newest save
        if settings is not None:
            quiet_orbax()
            later = [step for step in saved_steps(run_dir) if step > (self._step or 0)]
            error = processes.broadcast_from_host0(
                lambda: self._set_aside(later, run_dir), "damaged checkpoints"
            )
            require(not error, "run_dir", str(run_dir), f"a folder to write; {error}")
        self._manager: ocp.CheckpointManager | None = None
        try:
            self._manager = self._open()
        except OSError as error:
            raise ConfigError(
                f"config.run_dir = {str(run_dir)!r}: {self._folder}: {reason(error)}"
            ) from None

    def _set_aside(self, steps: list[int], run_dir: str | os.PathLike) -> str:
        """Moves checkpoints away, since Orbax saves no step before its newest one.

        Returns an error message; empty where all went well.
        """
        try:
            for step in steps:
                aside = epath.Path(folder_at(run_dir, DAMAGED)) / str(step)
                aside.parent.mkdir(parents=True, exist_ok=True)
                if aside.exists():
                    aside.rmtree()
                epath.Path(self._folder / str(step)).rename(aside)
        except Exception as error:  # of the system or a bucket's client
            return f"the damaged checkpoint of step {step} can't be moved: {reason(error)}"
        return ""

    def _open(self) -> ocp.CheckpointManager:
        let_orbax_use_buckets()
        saves = self._settings is not None
        # Made in the background, folders that can't be made are waited for, for 5 minutes.
        background = ocp.AsyncOptions(
            post_finalization_callback=self._seal,
            create_directories_asynchronously=False,
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._settings.keep if self._settings else None,
            create=saves,
            cleanup_tmp_directories=saves,  # what a kill during a save left behind
            async_options=background,
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def _seal(self) -> None:
        """Lists checksums, before Orbax gives a folder its name or, in a store, its mark."""
        unnamed = list(epath.Path(self._folder).glob(f"{self._saving}.*tmp*"))
        seal(unnamed[0] if unnamed else epath.Path(self._folder) / str(self._saving))

    @staticmethod
    def exist(run_dir: str | os.PathLike) -> bool:
        """True if a run has ever saved in the folder; creates nothing."""
        folder = checkpoint_folder(run_dir)
        # `is_dir` is False for a bucket that can't be read: a run would begin anew over its own.
        find = folder.exists if is_remote(run_dir) else folder.is_dir
        return processes.broadcast_from_host0(find, "whether a run has saved")

    def latest_step(self) -> int | None:
        """Step of the newest sound checkpoint; None without one."""
        return self._step

    def save(self, record: Record, states: Mapping[str, Any]) -> None:
        """Starts writing in the background; a step that is already there is left alone.

        Args:
            states: arrays by entry ("state" is the policy's `TrainState`); None has no entry.

        Raises:
            NotSaved: it could not be begun; later `done` and `wait` say so.
            NotFinite: such a state would one day be the only one that is kept.
        """
        check_state(states, f"step {record.step} is not saved")
        with contextlib.suppress(NotSaved):  # of whoever saved that, and did not ask
            self.wait()
        self._saving = record.step
        self._try(lambda: self._start(record, states))

    def _start(self, record: Record, states: Mapping[str, Any]) -> None:
        self._manager = self._manager or self._open()
        if record.step in self._manager.all_steps():
            return
        entries = {name: ocp.args.StandardSave(state) for name, state in states.items() if state}
        record_args = ocp.args.JsonSave(record.content())
        self._manager.save(record.step, args=ocp.args.Composite(**entries, record=record_args))

    def _try(self, work: Callable[[], Any]) -> None:
        """Raises `NotSaved` on every process where one fails; nothing half written stays."""
        try:
            work()
            error = ""
        except Exception as problem:  # of Orbax, TensorStore or a bucket's client
            error = reason(problem)
        errors = list(
            filter(None, processes.all_gather_json(error, "whether a checkpoint is saved"))
        )
        if errors:
            self._manager = None
            time.sleep(SETTLING_SECONDS)
            with contextlib.suppress(Exception):  # else the next save does
                self._manager = self._open()  # which removes what is half written
            raise NotSaved(f"step {self._saving}: {errors[0]}")

    def done(self, seconds: float) -> bool:
        """True if everything is on disk, after so many seconds at most. Raises `NotSaved`."""
        ends = time.monotonic() + seconds
        while self._is_saving():
            if not processes.broadcast_from_host0(lambda: time.monotonic() < ends, "patience"):
                return False
            time.sleep(POLL_SECONDS)
        self.wait()
        return True

    def _is_saving(self) -> bool:
        saving = self._manager is not None and self._manager.is_saving_in_progress()
        return any(processes.all_gather_json(saving, "whether a checkpoint is being saved"))

    def record(self) -> Record:
        """Record of the newest sound checkpoint."""
        return Record.read(self._restore("record", ocp.args.JsonRestore()))

    def state(self, abstract_state: TrainState, entry: str = "state") -> TrainState:
        """Arrays of an entry of the newest sound checkpoint, on the mesh of `abstract_state`.

        Raises `NotFinite`.
        """
        restored = self._restore(entry, ocp.args.StandardRestore(abstract_state))
        # Once somebody has moved that folder away, an older one is the newest.
        check_state({entry: restored}, str(self._folder / str(self._step)))
        return restored

    def _restore(self, entry: str, args: Any) -> Any:
        composite = ocp.args.Composite(**{entry: args})
        try:
            return present(self._manager, "checkpoint manager").restore(self._step, args=composite)[
                entry
            ]
        except Exception as error:  # whatever Orbax raises of arrays of other shapes or names
            raise ConfigError(
                f"config.run_dir: {self._folder / str(self._step)} can't be read "
                f"({reason(error)}): move it away, and the one before it is used"
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or processes.count() == 1:  # others may not be here to be waited for
            self.close()

    def wait(self) -> None:
        """Returns when everything is on disk. Raises `NotSaved`."""
        self._try(lambda: self._manager and self._manager.wait_until_finished())

    def close(self) -> None:
        """Waits until everything is on disk, or can't be."""
        with contextlib.suppress(NotSaved):
            self.wait()
        if self._manager:
            self._manager.close()


class SavedPolicy:
    """Policy of one checkpoint, read parameter by parameter; the run may go on meanwhile.

    Args:
        step: 0: the newest.
        entry: of the checkpoint; a critic is read as a policy is.

    Raises:
        ConfigError: `run_dir` (the setting `run`) has no such checkpoint.
    """

    def __init__(self, run_dir: str | os.PathLike, step: int = 0, entry: str = "state"):
        folder, steps = epath.Path(checkpoint_folder(run_dir)), saved_steps(run_dir)
        self._entry = entry
        require(bool(steps), "run", str(run_dir), "the run_dir of a run that has saved")
        self.step = step or latest_valid(run_dir, field="run") or 0
        listed = ", ".join(map(str, steps))
        require(self.step in steps, "step", step, f"0 or one of {listed}")
        self._folder = folder / str(self.step)
        flaw = damage(self._folder) if step else ""
        require(not flaw, "step", step, f"0 or one of {listed} that is not damaged ({flaw})")
        self._handler = ocp.PyTreeCheckpointHandler()

    def settings(self) -> dict[str, Any]:
        """Settings of the run, by dotted name."""
        return Record.read(ocp.JsonCheckpointHandler().restore(self._folder / "record")).settings

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by path (`layers/query/kernel`) of every parameter."""
        tree = self._handler.metadata(self._folder / self._entry).tree["params"]
        return {path: leaf.shape for path, leaf in flatten(tree).items()}

    def read(self, path: str) -> np.ndarray:
        """A whole parameter on the host, from whatever mesh it was written."""

        def only(value: Any) -> Any:
            return {"params": traverse_util.unflatten_dict({path: value}, sep="/")}

        args = ocp.args.PyTreeRestore(
            item=only(np.zeros(())),
            restore_args=only(ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        params = self._handler.restore(self._folder / self._entry, args=args)["params"]
        return flatten(params)[path]
