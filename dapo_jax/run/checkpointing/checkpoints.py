"""Checkpoints of a run: arrays and a typed record, saved by Orbax, complete or absent.

Reinforcement learning, SFT and DPO share this store. Every process calls every method. A list with
a digest of every file is checked before reading; Orbax's default format has no checksums.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from dapo_jax.config.experiment import Checkpoint
from dapo_jax.learner.batches import TrainState
from dapo_jax.run.checkpointing.same_run import Record
from dapo_jax.runtime import processes
from dapo_jax.runtime.nonfinite import check_state
from dapo_jax.runtime.sharding import flatten
from dapo_jax.runtime.storage.paths import folder_at, is_remote
from dapo_jax.runtime.storage.retries import (
    NotSaved,
    Storage,
    print_error,
    reason,
    silence_orbax,
    suppress_storage_errors,
    sync_folder,
    write_text,
)
from dapo_jax.types.errors import ConfigError, require

CHECKSUMS = "checksums.json"  # the last file that is written before a checkpoint gets its name
COMMITTED = "commit_success.txt"  # marks a complete checkpoint on an object store
UNNAMED = ".orbax-checkpoint-tmp"  # in the name of a local checkpoint that is being written
# Orbax writes these two after the list; reading a state or record needs neither.
UNLISTED = ("_CHECKPOINT_METADATA", COMMITTED)
INCOMPLETE = "incomplete"  # partly deleted, or never finished
DAMAGED = "damaged_checkpoints"
CHUNK_BYTES = 1 << 22  # of a file, at a time
SETTLING_SECONDS = 0.5  # for threads of a failed save, which may still create files
MAX_TRIES = 3  # of a save, a step apart
LAST_PAUSES = (0, 5, 20)  # seconds before each try of the last save
CHECKPOINT = "the checkpoint"


def checkpoint_folder(run_dir: str | os.PathLike) -> epath.Path:
    """Return the folder of a run's checkpoints, absolute, as Orbax needs it."""
    folder = folder_at(run_dir, "checkpoints")
    return epath.Path(folder if is_remote(run_dir) else folder.absolute())


def find_steps(run_dir: str | os.PathLike) -> list[int]:
    """Return the steps of all named checkpoints, ascending, as this process sees them."""
    folder = checkpoint_folder(run_dir)
    if is_remote(run_dir):  # a glob raises if the bucket fails; `is_dir` would be False
        names = [path.parent.name for path in folder.glob(f"*/{COMMITTED}")]
    else:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def saved_steps(run_dir: str | os.PathLike) -> list[int]:
    """Return the steps of all named checkpoints, ascending. Every process calls it."""
    return processes.broadcast_from_host0(lambda: find_steps(run_dir), "checkpoints")


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        yield from _files(path) if path.is_dir() else [path]


def _digests(folder: epath.Path, names: list[str], sync: bool = False) -> dict[str, Any]:
    """Return [bytes, sha256] by name, or the error as text; flush files first if `sync`."""

    def digest(name: str) -> list[Any] | str:
        size, sha256 = 0, hashlib.sha256()
        try:
            with (folder / name).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    size += len(chunk)
                    sha256.update(chunk)
                if sync:
                    os.fsync(file.fileno())
        except FileNotFoundError:  # a bucket words it differently
            return "No such file or directory"
        except (OSError, ValueError) as error:  # ValueError: the name itself was damaged
            return getattr(error, "strerror", None) or str(error)
        return [size, sha256.hexdigest()]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def seal(folder: epath.Path) -> None:
    """Write the list of all files in a folder, with sizes and digests."""
    names = [str(path.relative_to(folder)) for path in _files(folder)]
    names = [name for name in names if name not in (CHECKSUMS, *UNLISTED)]
    digests = _digests(folder, names, sync=not is_remote(folder))
    for name, digest in digests.items():
        if isinstance(digest, str):
            raise OSError(f"{name}: {digest}")
    write_text(folder / CHECKSUMS, json.dumps(digests, indent=0))
    if not is_remote(folder):
        for parent in {folder, *(path.parent for path in _files(folder))}:
            sync_folder(pathlib.Path(parent))


def damage(folder: epath.Path) -> str:
    """Return the damage of a checkpoint in a few words; empty for a valid one.

    Every process calls it, and each reads a part of the files.
    """

    def read_list() -> dict[str, Any] | str:
        try:
            return dict(json.loads((folder / CHECKSUMS).read_text())) or f"{CHECKSUMS} is empty"
        except FileNotFoundError:
            return INCOMPLETE
        except (OSError, ValueError, TypeError) as error:
            return f"{CHECKSUMS} can't be read: {error}"

    written = processes.broadcast_from_host0(read_list, "files of a checkpoint")
    if isinstance(written, str):
        return written
    own = sorted(written)[processes.index() :: processes.count()]
    texts = [
        f"{name}: {digest}" if isinstance(digest, str) else f"{name} is not what was written"
        for name, digest in _digests(folder, own).items()
        if digest != written[name]
    ]
    texts = processes.all_gather_json(texts[0] if texts else "", "damaged files")
    return next(filter(None, texts), "")


def latest_valid(
    run_dir: str | os.PathLike, warn: Callable[[str], None] = print_error, field: str = "run_dir"
) -> int | None:
    """Return the step of the newest valid checkpoint; None if there are no checkpoints."""
    folder, damages = checkpoint_folder(run_dir), dict[int, str]()
    for step in reversed(saved_steps(run_dir)):
        damages[step] = damage(folder / str(step))
        if not damages[step]:
            for other, text in damages.items():
                if text and text != INCOMPLETE:
                    warn(f"{folder / str(other)} is damaged ({text}): step {step} is used")
            return step
    if damages:
        step, text = next(iter(damages.items()))
        raise ConfigError(
            f"config.{field} = {str(run_dir)!r}: {folder / str(step)} is damaged ({text}), and no "
            "checkpoint before it is valid: restore one from a copy, or choose another folder"
        )
    return None


def _remove_unfinished(folder: epath.Path) -> None:
    """Remove the checkpoints that a kill or a failed save left incomplete."""
    for path in folder.glob("*"):  # an empty folder of a bucket does not exist
        is_unmarked = is_remote(folder) and path.name.isdigit() and not (path / COMMITTED).exists()
        if UNNAMED in path.name or is_unmarked:
            path.rmtree()


class Checkpoints:
    """Checkpoint store of a run, on any number of processes; a context manager.

    The newest valid checkpoint is restored. A store that saves moves damaged newer ones to
    `damaged_checkpoints`, and keeps the newest `settings.keep`. Raises `ConfigError` if there are
    checkpoints, and none is valid.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        settings: Checkpoint | None = None,  # of the run that saves; None: only read
        storage: Storage | None = None,  # warns of damaged checkpoints and failed saves
        # Receives step and folder of each new checkpoint once it is complete.
        on_saved: Callable[[int, str], None] = lambda step, folder: None,
    ):
        self._on_saved = on_saved
        self._run_dir, self._settings = run_dir, settings
        self._folder = checkpoint_folder(run_dir)
        self._storage = storage or Storage()
        self._step = latest_valid(run_dir, self._storage.warn)
        self._writer: ocp.AsyncCheckpointer | None = None
        self._saving = 0  # step of the newest save
        self._finished: concurrent.futures.Future[None] | None = None  # of that save
        self._failures = 0  # in a row
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if settings is not None:
            silence_orbax()
            later = [step for step in saved_steps(run_dir) if step > (self._step or 0)]
            error = processes.broadcast_from_host0(
                lambda: self._prepare(later), "folder of checkpoints"
            )
            require(not error, "run_dir", str(run_dir), f"a folder to write; {error}")

    def _prepare(self, damaged: list[int]) -> str:
        """Create the folder, and move damaged checkpoints away; return an error message."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(self._folder)
            for step in damaged:
                aside = epath.Path(folder_at(self._run_dir, DAMAGED)) / str(step)
                aside.parent.mkdir(parents=True, exist_ok=True)
                if is_remote(self._run_dir):  # an empty folder does not exist
                    (aside.parent / "moved").write_text(str(step))
                if aside.exists():
                    aside.rmtree()
                (self._folder / str(step)).rename(aside)
        except Exception as error:  # of the system or a bucket's client
            return f"{self._folder} can't be prepared: {reason(error)}"
        return ""

    @staticmethod
    def exist(run_dir: str | os.PathLike) -> bool:
        """Return True if a run has ever saved in the folder; create nothing."""
        folder = checkpoint_folder(run_dir)
        # `is_dir` is False for a bucket that can't be read: a run would overwrite its own work.
        find = folder.exists if is_remote(run_dir) else folder.is_dir
        return processes.broadcast_from_host0(find, "whether a run has saved")

    def latest_step(self) -> int | None:
        """Return the step of the newest valid checkpoint; None without one."""
        return self._step

    def digest(self) -> str:
        """Return a digest of the files of the newest valid checkpoint: 16 hexadecimal digits."""
        content = (self._folder / str(self._step) / CHECKSUMS).read_bytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def record(self) -> Record:
        """Return the record of the newest valid checkpoint."""
        return Record.read(
            self._restore("record", ocp.args.JsonRestore()), self._folder / str(self._step)
        )

    def state(self, abstract_state: TrainState, entry: str = "state") -> TrainState:
        """Return the arrays of an entry of the newest valid checkpoint. Raises `NotFinite`."""
        restored = self._restore(entry, ocp.args.StandardRestore(abstract_state))
        # Once somebody has moved that folder away, an older one is the newest.
        check_state({entry: restored}, str(self._folder / str(self._step)))
        return restored

    def _restore(self, entry: str, args: Any) -> Any:
        path = self._folder / str(self._step)
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
                return reader.restore(path, args=ocp.args.Composite(**{entry: args}))[entry]
        except Exception as error:  # whatever Orbax raises of arrays of other shapes or names
            raise ConfigError(
                f"config.run_dir: {path} can't be read ({reason(error)}): "
                "move it away, and the one before it is used"
            ) from error

    def save(self, record: Record, states: Mapping[str, Any]) -> None:
        """Start writing in the background; a step that is already saved is left alone.

        Raises `NotSaved` if it could not be started (later `wait` raises it), and `NotFinite`: such
        a state would one day be the only one that is kept.
        """
        check_state(states, f"step {record.step} is not saved")
        with contextlib.suppress(NotSaved):  # an earlier save failed; it was reported then
            self.wait()
        self._saving = record.step
        is_saved = record.step in saved_steps(self._run_dir)
        self._on_all_processes(lambda: is_saved or self._start(record, states))

    def _start(self, record: Record, states: Mapping[str, Any]) -> None:
        if self._writer is None:
            # Folders that can't be created in the background are waited for, for 5 minutes.
            options = ocp.AsyncOptions(
                post_finalization_callback=self._seal, create_directories_asynchronously=False
            )
            handler = ocp.CompositeCheckpointHandler()
            self._writer = ocp.AsyncCheckpointer(handler, async_options=options)
        entries: dict[str, Any] = {
            name: ocp.args.StandardSave(state) for name, state in states.items() if state
        }
        entries["record"] = ocp.args.JsonSave(dataclasses.asdict(record))
        self._writer.save(self._folder / str(record.step), args=ocp.args.Composite(**entries))
        self._finished = self._thread.submit(self._finish, self._writer)

    def _seal(self) -> None:
        """List checksums before Orbax gives a folder its name or, in a bucket, its mark."""
        unnamed = list(self._folder.glob(f"{self._saving}.*tmp*"))
        seal(unnamed[0] if unnamed else self._folder / str(self._saving))

    def _finish(self, writer: ocp.AsyncCheckpointer) -> None:
        """Wait until a save is complete, and remove the oldest checkpoints."""
        writer.wait_until_finished()
        if processes.is_first() and self._settings and self._settings.keep:
            with suppress_storage_errors():  # else after the next save
                for step in find_steps(self._run_dir)[: -self._settings.keep]:
                    if is_remote(self._folder):  # its mark first, so that it is absent at once
                        (self._folder / str(step) / COMMITTED).unlink(missing_ok=True)
                    (self._folder / str(step)).rmtree()

    def _on_all_processes(self, work: Callable[[], Any]) -> None:
        """Raise `NotSaved` on every process if one fails; remove what is incomplete."""
        error = ""
        try:
            work()
        except Exception as problem:  # of Orbax, TensorStore or a bucket's client
            error = reason(problem)
        errors = processes.all_gather_json(error, "whether a checkpoint is saved")
        if not any(errors):
            return
        self._writer = self._finished = None
        time.sleep(SETTLING_SECONDS)
        if processes.is_first():
            with contextlib.suppress(Exception):  # else before the next save
                _remove_unfinished(self._folder)
        raise NotSaved(f"step {self._saving}: {next(filter(None, errors))}")

    def is_saving(self) -> bool:
        """Return True while a save is being written on any process."""
        saving = self._finished is not None and not self._finished.done()
        return any(processes.all_gather_json(saving, "whether a checkpoint is being saved"))

    def wait(self) -> None:
        """Wait until everything is on disk. Raises `NotSaved`."""
        self._on_all_processes(lambda: self._finished and self._finished.result())
        if self._finished is not None:
            self._finished = None
            self._failures = 0
            self._storage.report_recovery(CHECKPOINT)
            self._on_saved(self._saving, str(self._folder / str(self._saving)))

    def after_step(self, is_due: bool, save: Callable[[], None]) -> None:
        """Save after a step if that is due or has just failed; warn of failures.

        A save waits for the one before it.
        """
        if self._finished is not None and (is_due or not self.is_saving()):
            self._attempt(self.wait)
        if is_due or 0 < self._failures < MAX_TRIES:
            self._attempt(save)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except NotSaved as error:
            self._failures += 1
            self._storage.report_failure(CHECKPOINT, reason(error))

    def save_last(self, save: Callable[[], None]) -> None:
        """Save, and wait until that is on disk. Raises `NotSaved` after a few tries."""
        for number, pause in enumerate(LAST_PAUSES, 1):
            time.sleep(pause)
            try:
                save()
                return self.wait()
            except NotSaved:
                if number == len(LAST_PAUSES):
                    raise

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or processes.count() == 1:  # else other processes may be gone
            self.close()

    def close(self) -> None:
        """Wait until everything is on disk, or can't be."""
        with contextlib.suppress(NotSaved):
            self.wait()
        if self._writer:
            self._writer.close()
        self._thread.shutdown()


class SavedPolicy:
    """Policy of one checkpoint (0: the newest), read parameter by parameter while the run goes on.

    Raises `ConfigError` if `run_dir` has no such checkpoint.
    """

    def __init__(self, run_dir: str | os.PathLike, step: int = 0):
        steps = saved_steps(run_dir)
        require(bool(steps), "run", str(run_dir), "the run_dir of a run that has saved")
        self.step = step or latest_valid(run_dir, field="run") or 0
        listed = ", ".join(map(str, steps))
        require(self.step in steps, "step", step, f"0 or one of {listed}")
        self._folder = checkpoint_folder(run_dir) / str(self.step)
        flaw = damage(self._folder) if step else ""
        require(not flaw, "step", step, f"0 or one of {listed} that is not damaged ({flaw})")
        self._handler = ocp.PyTreeCheckpointHandler()

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, by dotted name."""
        content = ocp.JsonCheckpointHandler().restore(self._folder / "record")
        return Record.read(content, self._folder).settings

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its path (`layers/query/kernel`)."""
        tree = self._handler.metadata(self._folder / "state").tree["params"]
        return {path: leaf.shape for path, leaf in flatten(tree).items()}

    def read(self, path: str) -> np.ndarray:
        """Return a whole parameter on the host, from whatever mesh it was written."""

        def only(value: Any) -> Any:
            return {"params": traverse_util.unflatten_dict({path: value}, sep="/")}

        args = ocp.args.PyTreeRestore(
            item=only(np.zeros(())),
            restore_args=only(ocp.RestoreArgs(restore_type=np.ndarray)),
            partial_restore=True,
        )
        params = self._handler.restore(self._folder / "state", args=args)["params"]
        return flatten(params)[path]
