"""Files of batches with a skipped update, for `dapo-jax replay`."""

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

FOLDER = "skipped"
ARRAYS = "batch.npz"
RECORD = "record.json"
MAX_BATCHES = 8  # per run; later batches are usually skipped for the same reason


def first_skipped(updates: Sequence[UpdateRecord]) -> tuple[UpdateRecord, TrainBatch] | None:
    """Return the first skipped update of a step with its batch on the host; None if all were taken.

    Every process must call it.
    """
    measured = [update for update in updates if update.means]
    flags = jax.device_get([update.means["skipped_updates"].total for update in measured])
    skipped = next((update for update, flag in zip(measured, flags, strict=True) if flag), None)
    if skipped is None:
        return None
    used = jax.tree.map(lambda array: array[: skipped.microbatches], skipped.batch)
    return skipped, to_host(used)


def write_skipped(
    run_dir: Folder, step: int, update: UpdateRecord, batch: TrainBatch, groups: Sequence[Group]
) -> Folder | None:
    """Write a skipped batch and return its folder; None if the run has `MAX_BATCHES` already."""
    folder = run_dir / FOLDER / f"step_{step:06d}_{update.learner}"
    full = (run_dir / FOLDER).exists() and len(list((run_dir / FOLDER).iterdir())) >= MAX_BATCHES
    if full and not folder.exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    named = jax.tree_util.tree_leaves_with_path(batch)
    with replacing(folder / ARRAYS) as file:
        np.savez_compressed(file, **{path_name(path): array for path, array in named})
    record = {
        "step": step,
        "learner": update.learner,
        "learning_rate": update.learning_rate,
        # Ordered by response index.
        "responses": [[g.prompt.id, done.sample] for g in groups for done in g.completions],
    }
    write_text(folder / RECORD, json.dumps(record, indent=2))
    return folder


def read_skipped(folder: Folder) -> tuple[dict[str, Any], TrainBatch]:
    """Read the record and the batch [M, R, T] of `write_skipped`; raises OSError."""
    with (folder / ARRAYS).open("rb") as raw, np.load(raw) as file:
        arrays = {name: file[name] for name in file.files}

    def fields(prefix: str) -> dict[str, Any]:
        names = [name for name in arrays if name.rpartition("/")[0] == prefix]
        return {name.rpartition("/")[2]: arrays[name] for name in names}

    scored = {"old_logprobs": None} | fields("scored")
    rollouts = PackedRows(**fields("scored/rollouts"))
    batch = TrainBatch(ScoredBatch(rollouts, **scored), **fields(""))
    return json.loads((folder / RECORD).read_text()), batch
