"""Batches whose update was skipped, kept as files: `dapo-jax replay` computes them again."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.runtime.nonfinite import path_name
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import replacing, write_text
from dapo_jax.structs import Group, Mean, Rollouts, ScoredBatch, TrainBatch

FOLDER, ARRAYS, RECORD = "skipped", "batch.npz", "record.json"
MOST = 8  # in a run: what comes later is skipped for the same reason


class Taken(NamedTuple):
    """A batch that an update was asked to learn from.

    Attributes:
        learner: `policy` or `critic`.
        microbatches: how many of the batch's it used.
        skipped: on the devices, whether the update was.
    """

    learner: str
    batch: TrainBatch
    microbatches: int
    learning_rate: float
    skipped: Mean


class SkippedBatches:
    """The batches of a step, until it is known which of them were skipped."""

    def __init__(self):
        self._step, self._taken = -1, []

    def add(self, step: int, taken: Taken) -> None:
        """Those of an earlier step are forgotten."""
        if step != self._step:
            self._step, self._taken = step, []
        self._taken.append(taken)

    def first(self) -> tuple[Taken, TrainBatch] | None:
        """The first that was skipped, with what it used of its batch on the host; all forget them.

        Every process asks.
        """
        taken, self._taken = self._taken, []
        flags = jax.device_get([one.skipped.total for one in taken])
        found = next((one for one, flag in zip(taken, flags, strict=True) if flag), None)
        if found is None:
            return None
        used = jax.tree.map(lambda array: array[: found.microbatches], found.batch)
        return found, to_host(used)


def write_skipped(
    run_dir: Folder, step: int, taken: Taken, batch: TrainBatch, groups: Sequence[Group]
) -> Folder | None:
    """Writes a batch that was skipped; its folder, None where a run has enough of them.

    Args:
        step: that has been made of it.
        groups: that were trained on, in their order.
    """
    folder = run_dir / FOLDER / f"step_{step:06d}_{taken.learner}"
    if _is_full(run_dir / FOLDER) and not folder.exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    named = jax.tree_util.tree_leaves_with_path(batch)
    with replacing(folder / ARRAYS) as file:
        np.savez_compressed(file, **{path_name(path): array for path, array in named})
    record = {
        "step": step,
        "learner": taken.learner,
        "learning_rate": taken.learning_rate,
        # By their index in the batch.
        "responses": [[g.prompt.id, done.sample] for g in groups for done in g.completions],
    }
    write_text(folder / RECORD, json.dumps(record, indent=2))
    return folder


def _is_full(folder: Folder) -> bool:
    return folder.exists() and sum(1 for _ in folder.iterdir()) >= MOST


def read_skipped(folder: Folder) -> tuple[dict[str, Any], TrainBatch]:
    """The record and the batch [M, R, T] that `write_skipped` wrote. Raises OSError."""
    with (folder / ARRAYS).open("rb") as raw, np.load(raw) as file:
        arrays = {name: file[name] for name in file.files}

    def of(prefix: str) -> dict[str, Any]:
        size = len(prefix)
        named = {name[size:]: array for name, array in arrays.items() if name.startswith(prefix)}
        return {name: array for name, array in named.items() if "/" not in name}

    scored = {"old_logprobs": None} | of("scored/")
    rollouts = Rollouts(**of("scored/rollouts/"))
    batch = TrainBatch(ScoredBatch(rollouts, **scored), **of(""))
    return json.loads((folder / RECORD).read_text()), batch
