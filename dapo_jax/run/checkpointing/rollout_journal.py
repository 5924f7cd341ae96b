"""Journal of the scored groups of an unfinished step, so that a kill loses none of them.

Sampling is keyed, and the order of the data decides what a step trains on: groups that are read
back make the same step as groups that are sampled again. Costs count from where the step resumed.
"""

import json
from collections.abc import Sequence

import numpy as np

from dapo_jax.rollout.dynamic_sampling import FinishedGroups, digest_tokens
from dapo_jax.rollout.group_format import pack_partial, unpack_partial
from dapo_jax.rollout.source import Journal
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, replacing, suppress_storage_errors
from dapo_jax.types.structs import Group, PartialGroup, Prompt

FOLDER = "groups"


class RolloutJournal(Journal):
    """Journal of the scored groups of a step, until a checkpoint has the step.

    Files are written in the background: each holds the groups that were scored while the file
    before it was written, and is complete or absent. Groups of a run of another `identity` are
    ignored. Every process calls `begin`.
    """

    def __init__(self, folder: Folder, identity: str, storage: Storage):
        self._folder = folder / FOLDER
        self._identity = identity
        self._storage = storage
        self._step = 0
        # Two threads use these; each use is one operation of Python, which is atomic.
        self._unwritten: list[Group] = []
        self._write_is_queued = False

    def begin(self, step: int) -> FinishedGroups:
        """Return the groups that an earlier try of a step has finished."""
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
        return {index: groups[index] for index in set.intersection(*readable)}

    def add(self, groups: Sequence[Group]) -> None:
        """Queue groups that were scored; those with a failed reward are left out."""
        scored = [group for group in groups if not group.failed]
        if not scored or not processes.is_first():
            return
        self._unwritten.extend(scored)
        if not self._write_is_queued:  # else that write takes these as well
            self._write_is_queued = True
            self._storage.attempt_later(f"{FOLDER}/", self._write)

    def forget(self, step: int) -> None:
        """Remove the groups of steps before `step` in the background; a checkpoint has them."""
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
