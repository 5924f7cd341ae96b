"""Rollout journal: judged groups of an unfinished step on disk, so that a kill costs none.

Random draws are keyed, and the order of the data decides what a step trains on: groups read back
make the same step as groups drawn again. Costs are counted from where the step went on.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo_jax.rollout.carry_over import pack_partial, unpack_partial
from dapo_jax.rollout.dynamic_sampling import FinishedGroups, digest_tokens
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import Storage, replacing, suppress_storage_errors
from dapo_jax.structs import Group, PartialGroup, Prompt

FOLDER = "groups"
RECORD = "record"


class RolloutJournal:
    """Journal of the judged groups of a step, until a checkpoint has the step.

    Every process calls `begin`.

    Files are written in the background: one holds the groups that were judged while the file before
    it was written, and is whole or absent. A kill costs the groups of the file under way.

    Args:
        folder: of the run.
        identity: of the run; groups of another identity are ignored.
        storage: writes in the background, and warns of failed writes.
        decode: from tokens of a response to text.
    """

    def __init__(
        self,
        folder: Folder,
        identity: str,
        storage: Storage,
        decode: Callable[[list[int]], str],
    ):
        self._folder = folder / FOLDER
        self._identity, self._storage, self._decode = identity, storage, decode
        self._step = 0
        # Two threads use these; each use is one operation of Python, which no other divides.
        self._unwritten: list[Group] = []
        self._file_to_come = False

    def begin(self, step: int) -> FinishedGroups:
        """Groups that an earlier try of a step has finished."""
        self._storage.drain()
        self._step, self._unwritten = step, []
        folder = self._folder / _name(step)

        def names() -> list[str]:
            with suppress_storage_errors():
                return sorted(path.name for path in folder.glob("*.npz"))
            return []

        groups: dict[int, tuple[str, Group]] = {}
        for name in processes.broadcast_from_host0(names, "finished groups"):
            groups |= self._read(folder / name)
        # A file that one process can't read is read by none.
        readable = map(set, processes.all_gather_json(sorted(groups), "finished groups"))
        return {place: groups[place] for place in set.intersection(*readable)}

    def add(self, groups: Sequence[Group]) -> None:
        """Queues groups that were judged; groups without a reward are left out."""
        whole = [group for group in groups if not group.broken]
        if not whole or not processes.is_first():
            return
        self._unwritten.extend(whole)
        if not self._file_to_come:  # else it takes these as well
            self._file_to_come = True
            self._storage.attempt_later(f"{FOLDER}/", self._write)

    def forget(self, step: int) -> None:
        """Removes the groups of steps before `step`, which a checkpoint has, in the background."""
        if processes.is_first():
            self._storage.attempt_later(f"{FOLDER}/", lambda: self._remove(step))

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
        """Writes a file of the queued groups, unless the file before took them."""
        self._file_to_come = False
        groups = self._unwritten[:]
        if not groups:
            return
        path = self._folder / _name(self._step) / f"{groups[0].prompt.index:012d}.npz"
        carried = [PartialGroup(group.prompt, self._step, judged=group) for group in groups]
        arrays, record = pack_partial(carried)
        prompts = [digest_tokens(group.prompt.tokens) for group in groups]
        content = {"identity": self._identity, "prompts": prompts, "groups": record}
        members: dict[str, Any] = arrays | {
            RECORD: np.frombuffer(json.dumps(content).encode(), "u1")
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez_compressed(file, **members)
        del self._unwritten[: len(groups)]

    def _read(self, path: Folder) -> dict[int, tuple[str, Group]]:
        try:
            with path.open("rb") as file, np.load(file) as saved:
                arrays = {name: saved[name] for name in saved.files}
            content: dict[str, Any] = json.loads(arrays.pop(RECORD).tobytes())
            if content["identity"] != self._identity:
                return {}
            groups = unpack_partial(arrays, content["groups"], _somewhere, self._decode)
            pairs = zip(content["prompts"], groups, strict=True)
            return {one.prompt.index: (digest, one.judged) for digest, one in pairs if one.judged}
        except Exception:  # whatever numpy and zipfile make of an archive that is damaged
            return {}


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _somewhere(index: int) -> Prompt:
    """Stand-in for a prompt, until the data are read."""
    return Prompt(index, "", "", np.zeros(0, np.int32), "", "")
