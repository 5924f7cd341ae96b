"""Packing of responses into rows of one length, so that padding costs little.

A segment is a prompt with one response. It never crosses a row, and a row never crosses a
microbatch. Each optimizer minibatch is packed separately.
"""

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.config.experiment import Packing
from dapo_jax.learner.batches import PackedRows
from dapo_jax.structs import Completion, Prompt

# Row shapes that `choose_rows` tries.
ROW_FACTORS = (1, 2, 3, 4)  # times the shortest row that holds the longest response
MICROBATCH_SPLITS = (1, 2)
MIN_DEVICE_TOKENS = 512  # per device in a split microbatch; below, matrix products are inefficient
MAX_COST_RATIO = 0.97  # to the best shape so far: a new shape has to be compiled


class Segment(NamedTuple):
    """A prompt with a response, and the response's position in the rollout batch."""

    prompt: Prompt
    completion: Completion
    index: int
    correct: bool = True
    token_weights: np.ndarray | None = None  # [n], 0: no loss; None: all 1

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.completion.tokens)


def assign_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Assign segments to rows of `row_tokens`, best fit decreasing; return segments by row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for segment in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(room, (lengths[segment], -1))
        if place == len(room):
            rows.append([])
            room.append((row_tokens, len(rows) - 1))
            place = len(room) - 1
        free, row = room.pop(place)
        rows[row].append(segment)
        bisect.insort(room, (free - lengths[segment], row))
    return rows


def padded_microbatches(
    updates: Sequence[Sequence[Segment]], row_tokens: int, rows_per_microbatch: int
) -> int:
    """Return the number of microbatches of arrays that hold each of these minibatches.

    It is a power of two, so that few shapes are compiled.
    """
    rows = (len(assign_rows([s.length for s in part], row_tokens)) for part in updates)
    largest = math.ceil(max(rows) / rows_per_microbatch)
    return 1 << (largest - 1).bit_length() if largest else 1


def pack(
    segments: Sequence[Segment],
    row_tokens: int,
    rows_per_microbatch: int,
    microbatches: int | None = None,
) -> tuple[PackedRows, int]:
    """Pack a minibatch into [microbatches, rows_per_microbatch, row_tokens] host arrays.

    Args:
        microbatches: default: as `padded_microbatches` returns.

    Returns:
        the rows, padded to `microbatches`, and the number of microbatches that are not empty.

    Raises:
        ValueError: a segment is longer than a row, or there are too many rows.
    """
    lengths = [segment.length for segment in segments]
    if lengths and max(lengths) > row_tokens:
        raise ValueError(f"a segment of {max(lengths)} tokens exceeds row_tokens = {row_tokens}")
    if microbatches is None:
        microbatches = padded_microbatches([segments], row_tokens, rows_per_microbatch)
    rows = assign_rows(lengths, row_tokens)
    used = math.ceil(len(rows) / rows_per_microbatch)
    if used > microbatches:
        raise ValueError(f"{len(rows)} rows exceed {microbatches} x {rows_per_microbatch}")
    shape = (microbatches * rows_per_microbatch, row_tokens)
    tokens, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
    response_index = np.full(shape, -1, np.int32)
    logprobs = np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members, 1):
            prompt, completion, index, *_ = segments[member]
            response = start + len(prompt.tokens)
            end = start + lengths[member]
            tokens[row, start:response] = prompt.tokens
            tokens[row, response:end] = completion.tokens
            segment_ids[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
            response_index[row, response:end] = np.where(completion.drawn, index, -1)
            logprobs[row, response:end] = completion.sampler_logprobs
            start = end
    arrays: list[Any] = [tokens, segment_ids, positions, response_index, logprobs]
    arrays += _pack_routes(segments, rows, shape)
    split = (microbatches, rows_per_microbatch)
    return PackedRows(*(array.reshape(*split, *array.shape[1:]) for array in arrays)), used


def _pack_routes(
    segments: Sequence[Segment], rows: Sequence[Sequence[int]], shape: tuple[int, int]
) -> list[np.ndarray]:
    """Pack recorded routes into rows; return no array if none were recorded."""
    recorded = [s.completion.routes for s in segments if s.completion.routes is not None]
    if not recorded:
        return []
    packed = np.full((*shape, *recorded[0].shape[1:]), -1, recorded[0].dtype)
    for row, members in enumerate(rows):
        start = 0
        for segment in (segments[member] for member in members):
            routes = segment.completion.routes
            if routes is not None:
                packed[row, start : start + len(routes)] = routes
            start += segment.length
    return [packed]


def choose_rows(
    updates: Sequence[Sequence[Segment]],
    shortest: Packing,
    shards: int,
    longest: int,
    attention_tokens: float,
) -> Packing:
    """Return the row shape with the least computation for these minibatches, padding included.

    Rows are one to four times as long as the shortest, with the same number of tokens per
    microbatch or half of it, because the last microbatch is seldom full.

    Args:
        shards: divides the rows of a microbatch.
        longest: maximum row length, unless the shortest exceeds it.
        attention_tokens: row length at which attention costs as much as everything else.
    """
    best = shortest
    least = math.inf
    for times in ROW_FACTORS:
        row_tokens = times * shortest.row_tokens
        if times > 1 and row_tokens > longest:
            break
        filled = [len(assign_rows([s.length for s in part], row_tokens)) for part in updates]
        for parts in MICROBATCH_SPLITS:
            share = shortest.rows_per_microbatch // (times * parts) // shards
            if parts > 1 and share * row_tokens < MIN_DEVICE_TOKENS:
                break
            rows = max(1, share) * shards
            places = sum(math.ceil(count / rows) * rows * row_tokens for count in filled)
            cost = places * (1 + row_tokens / attention_tokens)
            if cost < MAX_COST_RATIO * least:
                best = Packing(row_tokens, rows)
                least = cost
    return best


def fill(rollouts: PackedRows, used: Sequence[int]) -> float:
    """Return the fraction of tokens that are not padding, in microbatches that are not empty."""
    segment_ids = np.asarray(rollouts.segment_ids)
    return float((segment_ids > 0).sum() / (sum(used) * math.prod(segment_ids.shape[2:])))


def pack_updates(
    updates: Sequence[Sequence[Segment]], packing: Packing
) -> tuple[PackedRows, list[int]]:
    """Pack all minibatches: arrays [U, M, R, T], and the microbatches that each uses."""
    shape = (packing.row_tokens, packing.rows_per_microbatch)
    microbatches = padded_microbatches(updates, *shape)
    packed, used = zip(*(pack(part, *shape, microbatches) for part in updates), strict=True)
    return jax.tree.map(lambda *parts: np.stack(parts), *packed), list(used)


def tree_index(tree: Any, index: int | slice | tuple[int | slice, ...]) -> Any:
    """Index the first axes of every array of a tree."""
    return jax.tree.map(lambda array: array[index], tree)


def place_tokens(per_token: Sequence[np.ndarray], response_index: np.ndarray) -> np.ndarray:
    """Put per-token arrays of responses, ordered by index, at their positions in packed rows."""
    flat = response_index.ravel()
    order = np.argsort(flat, kind="stable")
    placed = np.zeros(flat.shape)
    placed[order[np.count_nonzero(flat < 0) :]] = np.concatenate(per_token)
    return placed.reshape(response_index.shape)


def take_tokens(values: np.ndarray, response_index: np.ndarray) -> list[np.ndarray]:
    """Split packed values into one array per response, ordered by index."""
    flat = response_index.ravel()
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
    lengths = np.bincount(flat[order])
    return np.split(values.ravel()[order], np.cumsum(lengths)[:-1])
