"""Prefill of the prompts that wait, those of one padded length in one call, and their insertion."""

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dapo_jax.model.caches import Prefix
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.requests import PendingResponses
from dapo_jax.rollout.sampling import sample_keys


def prefill_ahead(
    engine: PolicyEngine,
    params: Any,
    waiting: collections.deque[PendingResponses],
    seed: int,
    purpose: int,
) -> int:
    """Prefills the first prompt that waits, with others of its length that do.

    Args:
        seed, purpose: of the draws' keys.

    Returns the number of prompts that are prefilled now.
    """
    first = waiting[0]
    alike = (
        pending
        for pending in waiting
        if pending.prefilled is None and len(pending.padded) == len(first.padded)
    )
    batch = list(itertools.islice(alike, engine.prefill_width))
    if len(batch) <= engine.prefill_width // 2:  # most of a wide call would be padding
        batch = batch[: engine.replicas]
    padding = engine.prefilled_together(len(batch)) - len(batch)
    groups = [pending.group for pending in [*batch, *[batch[-1]] * padding]]
    steps, places = [group.step for group in groups], [group.prompt.index for group in groups]
    prefix = engine.prefill_prompts(
        params,
        np.stack([pending.padded for pending in batch]),
        [pending.length for pending in batch],
        sample_keys(seed, purpose, steps, places),
        [pending.ahead for pending in batch],
    )
    for row, pending in enumerate(batch):
        pending.prefilled = (prefix, row)
    return len(batch)


def insert_all(
    engine: PolicyEngine, state: Any, prefix: Prefix, started: Sequence[tuple[int, int, int]]
) -> Any:
    """State in which responses to prefilled prompts begin, as many in a call as it takes.

    Args:
        started: of each response its slot, its sample number and its prompt's row of `prefix`.
    """
    for i in range(0, len(started), engine.most_inserted):
        part = started[i : i + engine.most_inserted]
        slots, samples, rows = map(np.array, zip(*part, strict=True))
        state = engine.insert(prefix, state, slots, sample_index=samples, row=rows)
    return state
