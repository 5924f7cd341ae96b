"""Checkpoints of a run: arrays and a typed record, saved by Orbax, complete or absent.

Reinforcement learning, SFT and DPO share this store. Every process calls every method. Orbax gives
a checkpoint its name, or its mark in a bucket, once all its files are written; one that can't be
read is skipped, and the one before it is used.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dapo_jax.config.experiment import Checkpoint
from dapo_jax.learner.batches import TrainState
from dapo_jax.rollout.group_format import pack_partial, unpack_partial
from dapo_jax.rollout.source import Journal
from dapo_jax.run.identity import Record
from dapo_jax.runtime import processes
from dapo_jax.runtime.nonfinite import check_state
from dapo_jax.runtime.storage.files import (
    Folder,
    NotSaved,
    Storage,
    folder_at,
    is_bucket_error,
    is_remote,
    print_error,
    reason,
    replacing,
    storage_fault,
    suppress_storage_errors,
)
from dapo_jax.types.errors import ConfigError, require
from dapo_jax.types.structs import Group, PartialGroup, Prompt, present

T = TypeVar("T")

COMMITTED = "commit_success.txt"  # marks a complete checkpoint on an object store
RECORD = "record"  # entry with the JSON of `Record`
MAX_TRIES = 3  # of a save, a step apart
LAST_PAUSES = (0, 5, 20)  # seconds before each try of the last save
CHECKPOINT = "the checkpoint"
JOURNAL = "groups"  # folder of the journal

# Errors of storage or memory that may be gone the next time.
PASSING = (PermissionError, ConnectionError, TimeoutError, MemoryError)
PASSING_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")


class Unreadable(ConfigError):
    """Raised for a checkpoint with broken or missing files."""


def may_pass(error: Exception) -> bool:
    """Return True if what can't be read now may be whole all the same."""
    is_passing = isinstance(error, PASSING) or is_bucket_error(error) or storage_fault(error) != ""
    return is_passing or any(code in str(error) for code in PASSING_CODES)


def read_together(folder: epath.Path, read: Callable[[], T]) -> T:
    """Return `read()` of a checkpoint, if every process can read it.

    Raises on all processes `Unreadable`, or `ConfigError` if the checkpoint may be whole: it must
    not be passed over.
    """
    value, passes, text = None, False, ""
    try:
        value = read()
    except ConfigError:  # of another version
        raise
    except Exception as error:  # whatever Orbax raises of broken files
        passes, text = may_pass(error), reason(error)
    errors = processes.all_gather_json((passes, text), "whether a checkpoint can be read")
    passes, text = max(errors)
    if passes:
        raise ConfigError(
            f"{folder} can't be read now ({text}): start again later, or move it away to go on "
            "from the checkpoint before it"
        )
    if text:
        raise Unreadable(f"{folder} can't be read ({text})")
    return cast(T, value)


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


def record_path(run_dir: str | os.PathLike, step: int) -> epath.Path:
    """Return the file that holds the record of a checkpoint."""
    return checkpoint_folder(run_dir) / str(step) / RECORD / "metadata"


def read_record(folder: epath.Path) -> Record:
    """Return the record of a checkpoint in its folder."""
    content = ocp.JsonCheckpointHandler().restore(folder / RECORD)
    return Record.read(content, folder)


def read_newest(
    run_dir: str | os.PathLike,
    read: Callable[[int, Record], T],
    warn: Callable[[str], None] = print_error,
    field: str = "run_dir",
    last: float = math.inf,  # step of the newest one that counts
) -> T | None:
    """Return `read(step, record)` of the newest checkpoint that can be read; None without any.

    Goes back a checkpoint, with a warning, while `read` raises `Unreadable`. Raises `ConfigError`
    if there are checkpoints and none can be read.
    """
    error = ""
    for step in reversed([step for step in saved_steps(run_dir) if step <= last]):
        if error:
            warn(f"{error}: step {step} is used")
        folder = checkpoint_folder(run_dir) / str(step)
        try:
            record = read_together(folder, functools.partial(read_record, folder))
            return read(step, record)
        except Unreadable as unreadable:
            error = str(unreadable)
    if error:
        raise ConfigError(
            f"config.{field} = {str(run_dir)!r}: {error}, and no checkpoint before it can be read: "
            "restore one from a copy, or choose another folder"
        )
    return None


def newest_step(run_dir: str | os.PathLike, field: str) -> int | None:
    """Return the step of the newest checkpoint whose record can be read, as `read_newest`."""
    return read_newest(run_dir, lambda step, record: step, field=field)


class Checkpoints:
    """Checkpoint store of a run, on any number of processes; a context manager.

    `newest` reads the newest checkpoint that can be read. The first save deletes later ones, and
    the newest `settings.keep` are kept. Raises `ConfigError` if there are checkpoints, and no
    record of one can be read.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        settings: Checkpoint | None = None,  # of the run that saves; None: only read
        storage: Storage | None = None,  # warns of unreadable checkpoints and failed saves
        # Receives step and folder of each new checkpoint once it is complete.
        on_saved: Callable[[int, str], None] = lambda step, folder: None,
    ):
        self._on_saved = on_saved
        self._run_dir, self._settings = run_dir, settings
        self._folder = checkpoint_folder(run_dir)
        self._storage = storage or Storage()
        self._step = read_newest(run_dir, lambda step, record: step, self._storage.warn)
        self._manager: ocp.CheckpointManager | None = None  # made by the first save
        self._saving = 0  # step of the newest save
        self._is_begun = False  # that save, and not waited for
        self._failures = 0  # in a row
        if settings is not None:
            silence_orbax()
            error = processes.broadcast_from_host0(self._make_folder, "folder of checkpoints")
            require(not error, "run_dir", str(run_dir), f"a folder to write; {error}")

    def _make_folder(self) -> str:
        """Create the folder; return an error message."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except Exception as error:  # of the system or a bucket's client
            return f"{self._folder} can't be made: {reason(error)}"
        return ""

    def latest_step(self) -> int | None:
        """Return the step of the checkpoint that is read; None without one."""
        return self._step

    def digest(self) -> str:
        """Return a digest of the record that is read: 16 hexadecimal digits."""
        content = record_path(self._run_dir, self._step or 0).read_bytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def newest(self, read: Callable[[Record], T]) -> T:
        """Return `read(record)`; go back a checkpoint, with a warning, while one can't be read.

        Raises `ConfigError` if none can be read.
        """

        def read_step(step: int, record: Record) -> T:
            self._step = step
            return read(record)

        warn, last = self._storage.warn, self._step or 0
        return present(read_newest(self._run_dir, read_step, warn, last=last), "checkpoint")

    def record(self) -> Record:
        """Return the record of the checkpoint that is read."""
        return read_record(self._folder / str(self._step))

    def state(self, abstract_state: TrainState, entry: str = "state") -> TrainState:
        """Return the arrays of an entry.

        Raises `NotFinite`, and as `read_together`.
        """
        folder, args = self._folder / str(self._step), ocp.args.StandardRestore(abstract_state)
        handler = ocp.StandardCheckpointHandler()
        restored = read_together(folder, lambda: handler.restore(folder / entry, args=args))
        # Once somebody has moved that folder away, an older one is the newest.
        check_state({entry: restored}, str(folder))
        return restored

    def save(self, record: Record, states: Mapping[str, Any]) -> None:
        """Start writing in the background; a step that is already saved is left alone.

        Raises `NotSaved` if it could not be started (later `wait` raises it), and `NotFinite`: such
        a state would one day be the only one that is kept.
        """
        check_state(states, f"step {record.step} is not saved")
        with contextlib.suppress(NotSaved):  # an earlier save failed; it was reported then
            self.wait()
        self._saving = record.step
        self._on_all_processes(lambda: self._start(record, states))

    def _start(self, record: Record, states: Mapping[str, Any]) -> None:
        manager = self._manager = self._manager or self._open_manager()
        if record.step in manager.all_steps():
            return
        entries: dict[str, Any] = {
            name: ocp.args.StandardSave(state) for name, state in states.items() if state
        }
        entries[RECORD] = ocp.args.JsonSave(dataclasses.asdict(record))
        manager.save(record.step, args=ocp.args.Composite(**entries), force=True)
        self._is_begun = True

    def _open_manager(self) -> ocp.CheckpointManager:
        """Return the manager, after it removed what is incomplete and later than what was read."""
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._settings and self._settings.keep,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
            # Folders that can't be created in the background are waited for, for 5 minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        manager = ocp.CheckpointManager(self._folder, options=options)
        for step in manager.all_steps():
            if step > (self._step or 0):
                manager.delete(step)
        return manager

    def _on_all_processes(self, work: Callable[[], Any]) -> None:
        """Raise `NotSaved` on every process if one fails."""
        error = ""
        try:
            work()
        except Exception as problem:  # of Orbax, TensorStore or a bucket's client
            error = reason(problem)
        errors = processes.all_gather_json(error, "whether a checkpoint is saved")
        if not any(errors):
            return
        self._manager, self._is_begun = None, False  # the next one removes what is incomplete
        raise NotSaved(f"step {self._saving}: {next(filter(None, errors))}")

    def is_saving(self) -> bool:
        """Return True while a save is being written on any process."""
        saving = self._manager is not None and self._manager.is_saving_in_progress()
        return any(processes.all_gather_json(saving, "whether a checkpoint is being saved"))

    def wait(self) -> None:
        """Wait until everything is on disk. Raises `NotSaved`."""
        self._on_all_processes(lambda: self._manager and self._manager.wait_until_finished())
        if self._is_begun:
            self._is_begun = False
            self._step = self._saving
            self._failures = 0
            self._storage.report_recovery(CHECKPOINT)
            self._on_saved(self._saving, str(self._folder / str(self._saving)))

    def after_step(self, is_due: bool, save: Callable[[], None]) -> None:
        """Save after a step if that is due or has just failed; warn of failures.

        A save waits for the one before it.
        """
        if self._is_begun and (is_due or not self.is_saving()):
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
        if self._manager:
            self._manager.close()


# --- the journal of an unfinished step --------------------------------------------------------


def digest_tokens(tokens: np.ndarray) -> str:
    """Return a digest that identifies a prompt."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]


class RolloutJournal(Journal):
    """Journal of the scored groups of an unfinished step, so that a kill loses none of them.

    Sampling is keyed, and the order of the data decides what a step trains on: groups that are
    read back make the same step as groups that are sampled again. Costs count from where the step
    resumed.

    Files are written in the background: each holds the groups that were scored while the file
    before it was written, and is complete or absent. Groups of a run of another `identity` are
    ignored. Every process calls `begin`.
    """

    def __init__(self, folder: Folder, identity: str, storage: Storage):
        self._folder = folder / JOURNAL
        self._identity = identity
        self._storage = storage
        self._step = 0
        self.finished: dict[int, tuple[str, Group]] = {}  # by position, with the prompt's digest
        # Two threads use these; each use is one operation of Python, which is atomic.
        self._unwritten: list[Group] = []
        self._write_is_queued = False

    def begin(self, step: int) -> None:
        """Read the groups that an earlier try of a step has finished."""
        self._storage.drain()
        self._step = step
        self._unwritten = []
        folder = self._folder / _name(step)

        def list_files() -> list[str]:
            with suppress_storage_errors():
                return sorted(path.name for path in folder.glob("*.groups"))
            return []

        groups: dict[int, tuple[str, Group]] = {}
        for name in processes.broadcast_from_host0(list_files, "finished groups"):
            groups |= self._read(folder / name)
        # A file that one process can't read is ignored by all.
        readable = map(set, processes.all_gather_json(sorted(groups), "finished groups"))
        self.finished = {index: groups[index] for index in set.intersection(*readable)}

    def recall(self, prompt: Prompt) -> Group | None:
        """Return the finished group of a prompt, or None if that position had another prompt."""
        digest, group = self.finished.get(prompt.index, ("", None))
        if group is None or digest != digest_tokens(prompt.tokens):
            return None
        return dataclasses.replace(group, prompt=prompt)

    def add(self, groups: Sequence[Group]) -> None:
        """Queue groups that were scored; those with a failed reward are left out."""
        scored = [group for group in groups if not group.failed]
        if not scored or not processes.is_first():
            return
        self._unwritten.extend(scored)
        if not self._write_is_queued:  # else that write takes these as well
            self._write_is_queued = True
            self._storage.attempt_later(f"{JOURNAL}/", self._write)

    def forget(self, step: int) -> None:
        """Remove the groups of steps before `step` in the background; a checkpoint has them."""
        if processes.is_first():
            self._storage.attempt_later(f"{JOURNAL}/", lambda: self._remove(step))

    def _remove(self, step: int) -> None:
        with suppress_storage_errors():  # else the next time
            for folder in list(self._folder.glob("step_*")):
                if folder.name < _name(step):
                    for path in list(folder.iterdir()):
                        path.unlink()
                    folder.rmdir()
            if not list(self._folder.iterdir()):
                self._folder.rmdir()

    def _write(self) -> None:
        """Write the queued groups to a file, unless the file before has them."""
        self._write_is_queued = False
        groups = self._unwritten[:]
        if not groups:
            return
        path = self._folder / _name(self._step) / f"{groups[0].prompt.index:012d}.groups"
        prompts = [digest_tokens(group.prompt.tokens) for group in groups]
        header = {"identity": self._identity, "prompts": prompts}
        carried = [PartialGroup(group.prompt, self._step, judged=group) for group in groups]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(header).encode() + b"\n" + pack_partial(carried).tobytes())
        del self._unwritten[: len(groups)]

    def _read(self, path: Folder) -> dict[int, tuple[str, Group]]:
        try:
            header, _, content = path.read_bytes().partition(b"\n")
            fields = json.loads(header)
            if fields["identity"] != self._identity:
                return {}
            # Prompts have no text until the data are read.
            groups = unpack_partial(
                np.frombuffer(content, np.uint8),
                lambda index: Prompt(index, "", "", np.zeros(0, np.int32), "", ""),
            )
            pairs = zip(fields["prompts"], groups, strict=True)
            return {
                partial.prompt.index: (digest, partial.judged)
                for digest, partial in pairs
                if partial.judged
            }
        except Exception:  # whatever a damaged file raises
            return {}


def _name(step: int) -> str:
    return f"step_{step:06d}"


def silence_orbax() -> None:
    """Silence errors that Orbax logs in each of its threads before it raises them once."""
    before = sys.unraisablehook
    if getattr(before, "__name__", "") == "hide_closed_loops":
        return
    logging.getLogger("absl").addFilter(
        lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname
    )

    def hide_closed_loops(event: Any) -> None:
        # TensorStore reports results that nobody awaits to a closed event loop.
        if str(event.exc_value) != "Event loop is closed":
            before(event)

    sys.unraisablehook = hide_closed_loops
