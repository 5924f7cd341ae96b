"""Batches whose update was skipped, kept as files: `dapo-jax replay` computes them again."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.learners import UpdateRecord
from dapo_jax.runtime.nonfinite import path_name
from dapo_jax.runtime.sharding import to_host
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import replacing, write_text
from dapo_jax.structs import Group

FOLDER, ARRAYS, RECORD = "skipped", "batch.npz", "record.json"
MOST = 8  # in a run: what comes later is skipped for the same reason


def first_skipped(updates: Sequence[UpdateRecord]) -> tuple[UpdateRecord, TrainBatch] | None:
    """The first update of a step that was skipped, with the part of its batch that it used.

    The batch is on the host; every process asks.
    """
    made = [update for update in updates if update.means]
    flags = jax.device_get([update.means["skipped_updates"].total for update in made])
    skipped = next((one for one, flag in zip(made, flags, strict=True) if flag), None)
    if skipped is None:
        return None
    used = jax.tree.map(lambda array: array[: skipped.microbatches], skipped.batch)
    return skipped, to_host(used)


def write_skipped(
    run_dir: Folder, step: int, update: UpdateRecord, batch: TrainBatch, groups: Sequence[Group]
) -> Folder | None:
    """Writes a skipped batch; returns its folder, or None where a run has enough of them.

    Args:
        step: number of the finished step.
        groups: trained in the step, in their order.
    """
    folder = run_dir / FOLDER / f"step_{step:06d}_{update.learner}"
    if _is_full(run_dir / FOLDER) and not folder.exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    named = jax.tree_util.tree_leaves_with_path(batch)
    with replacing(folder / ARRAYS) as file:
        np.savez_compressed(file, **{path_name(path): array for path, array in named})
    record = {
        "step": step,
        "learner": update.learner,
        "learning_rate": update.learning_rate,
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
    rollouts = PackedRows(**of("scored/rollouts/"))
    batch = TrainBatch(ScoredBatch(rollouts, **scored), **of(""))
    return json.loads((folder / RECORD).read_text()), batch
