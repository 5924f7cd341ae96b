"""Names and rows of the records in a run folder."""

from typing import Any

from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.paths import Folder


def rollouts_name(step: int) -> str:
    """Return the name of a step's file in rollouts/."""
    return f"step_{step:06d}.jsonl"


def read_rows(path: Folder) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; none if there is no file."""
    return list(objects(path)) if path.exists() else []
