"""Responses to packed rows: the cost of an update follows the tokens that exist.

A segment is a prompt with one response; it never crosses a row, and a row never crosses a
microbatch. Every optimizer minibatch is packed by itself, because its loss weights are its own.
"""

import bisect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from dapo_jax.algorithms import Algorithm
from dapo_jax.config.compute import Packing
from dapo_jax.learner.advantages import broadcast_to_tokens
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.losses import response_weights
from dapo_jax.structs import Completion, Prompt

LONGER = (1, 2, 3, 4)  # times the shortest row that holds the longest response
SMALLER = (1, 2)  # microbatches in place of one
FEWEST_TOKENS = 512  # of a smaller microbatch on a device, whose products would else be small
WORTH_COMPILING = 0.97  # of what the shape before takes


class Segment(NamedTuple):
    """A prompt with one response, and the response's place in the rollout batch."""

    prompt: Prompt
    completion: Completion
    index: int
    correct: bool = True
    token_weights: np.ndarray | None = None  # [n], 0 without loss; None: all 1

    @property
    def length(self) -> int:
        return len(self.prompt.tokens) + len(self.completion.tokens)


def assign_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Best fit, longest first: rows as lists of segment numbers, each within `row_tokens`."""
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
    """Microbatches of the arrays that hold every one of these minibatches.

    A power of two: arrays are no wider than twice what is used, and few shapes are compiled.
    """
    rows = (len(assign_rows([s.length for s in part], row_tokens)) for part in updates)
    most = math.ceil(max(rows) / rows_per_microbatch)
    return 1 << (most - 1).bit_length() if most else 1


def pack(
    segments: Sequence[Segment],
    row_tokens: int,
    rows_per_microbatch: int,
    microbatches: int | None = None,
) -> tuple[PackedRows, int]:
    """Packs one minibatch into [microbatches, rows_per_microbatch, row_tokens] host arrays.

    Args:
        microbatches: None: as many as `padded_microbatches` says.

    Returns:
        the rows, padded to `microbatches`, and how many microbatches hold anything.

    Raises:
        ValueError: a segment longer than a row, or more rows than there is place for.
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
    response_index, logprobs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members, 1):
            prompt, completion, index, *_ = segments[member]
            response, end = start + len(prompt.tokens), start + lengths[member]
            tokens[row, start:response] = prompt.tokens
            tokens[row, response:end] = completion.tokens
            segment_ids[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
            response_index[row, response:end] = np.where(completion.drawn, index, -1)
            logprobs[row, response:end] = completion.sampler_logprobs
            start = end
    # Of the host, until a program takes them.
    arrays: list[Any] = [tokens, segment_ids, positions, response_index, logprobs]
    arrays += _pack_routes(segments, rows, shape)
    split = (microbatches, rows_per_microbatch)
    return PackedRows(*(array.reshape(*split, *array.shape[1:]) for array in arrays)), used


def _pack_routes(
    segments: Sequence[Segment], rows: Sequence[Sequence[int]], shape: tuple[int, int]
) -> list[np.ndarray]:
    """Routes in rows of that shape; none where none were recorded."""
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
    """The rows in which an update of these minibatches computes least, padding included.

    They are once to four times as long as the shortest, with about as many tokens a microbatch or
    half as many (the last microbatch is seldom full), where that saves something: each shape
    compiles once.

    Args:
        shards: the rows of a microbatch are a multiple of it.
        longest: a row may be, unless it is the shortest.
        attention_tokens: of a row in which attention takes as much as all else.
    """
    best, least = shortest, math.inf
    for times in LONGER:
        row_tokens = times * shortest.row_tokens
        if times > 1 and row_tokens > longest:
            break
        filled = [len(assign_rows([s.length for s in part], row_tokens)) for part in updates]
        for parts in SMALLER:
            share = shortest.rows_per_microbatch // (times * parts) // shards
            if parts > 1 and share * row_tokens < FEWEST_TOKENS:
                break
            rows = max(1, share) * shards
            places = sum(math.ceil(count / rows) * rows * row_tokens for count in filled)
            cost = places * (1 + row_tokens / attention_tokens)
            if cost < WORTH_COMPILING * least:
                best, least = Packing(row_tokens, rows), cost
    return best


def fill(rollouts: PackedRows, used: Sequence[int]) -> float:
    """Share of the places in microbatches that hold something which are no padding."""
    segment_ids = np.asarray(rollouts.segment_ids)
    return float((segment_ids > 0).sum() / (sum(used) * math.prod(segment_ids.shape[2:])))


def pack_updates(
    updates: Sequence[Sequence[Segment]], packing: Packing
) -> tuple[PackedRows, list[int]]:
    """Packs the minibatches of one rollout batch: [U, M, R, T] and the microbatches each uses."""
    shape = packing.row_tokens, packing.rows_per_microbatch
    microbatches = padded_microbatches(updates, *shape)
    packed, used = zip(*(pack(part, *shape, microbatches) for part in updates), strict=True)
    return jax.tree.map(lambda *parts: np.stack(parts), *packed), list(used)


def tree_index(tree: Any, index: int | slice | tuple[int | slice, ...]) -> Any:
    """Entry `index` of the first axis of every array, or some of them."""
    return jax.tree.map(lambda array: array[index], tree)


def trained_tokens(
    segments: Sequence[Segment], algorithm: Algorithm
) -> list[Bool[np.ndarray, "n"]]:
    """Which tokens of each response may carry loss: not filtered as overlong, not weighed 0."""

    def of_response(segment: Segment) -> np.ndarray:
        if segment.completion.truncated and algorithm.overlong_filtering:
            return np.zeros(len(segment.completion), bool)
        if segment.token_weights is None:
            return np.ones(len(segment.completion), bool)
        return np.asarray(segment.token_weights) > 0

    return [of_response(segment) for segment in segments]


def place_tokens(per_token: Sequence[np.ndarray], response_index: np.ndarray) -> np.ndarray:
    """Arrays of the responses' tokens, in the order of their indices, at their places in rows."""
    flat = response_index.ravel()
    order = np.argsort(flat, kind="stable")
    placed = np.zeros(flat.shape)
    placed[order[np.count_nonzero(flat < 0) :]] = np.concatenate(per_token)
    return placed.reshape(response_index.shape)


def take_tokens(values: np.ndarray, response_index: np.ndarray) -> list[np.ndarray]:
    """Values at the places of each response, in the order of the response indices."""
    flat = response_index.ravel()
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
    lengths = np.bincount(flat[order])
    return np.split(values.ravel()[order], np.cumsum(lengths)[:-1])


def make_batch(
    scored: ScoredBatch,
    segments: Sequence[Segment],
    advantages: np.ndarray,
    returns: np.ndarray | None,
    algorithm: Algorithm,
    budget: int,
    planned_groups: int | None = None,
) -> TrainBatch:
    """Train batch of a minibatch, with loss weights from its own counts; arrays are [M, R, T].

    Where a starved step leaves fewer groups than planned, each weighs as much as one of a whole
    minibatch: all weights are multiplied by groups present / groups planned.

    Args:
        planned_groups: of a whole minibatch; None: as many as there are.
    """
    index = np.asarray(scored.rollouts.response_index)
    correct = np.array([segment.correct for segment in segments], bool)
    groups = np.array([segment.prompt.index for segment in segments])
    tokens = np.array([mask.sum() for mask in trained_tokens(segments, algorithm)], int)
    per_response = response_weights(algorithm, tokens, groups, correct, budget)

    def of_responses(values: np.ndarray) -> np.ndarray:
        whole = np.zeros(1 + max((segment.index for segment in segments), default=0))
        whole[[segment.index for segment in segments]] = values
        return broadcast_to_tokens(whole, index)

    present = len(np.unique(groups))
    share = present / (planned_groups or present)
    weights = share * of_responses(per_response)
    given = [s.token_weights for s in segments if s.token_weights is not None]
    if given:  # then all have some
        weights *= place_tokens(given, index)
    trained = weights > 0
    # Host arrays as well: what makes the batch one of the devices' is the program that takes it.
    host: dict[str, Any] = {"advantages": advantages, "loss_weights": weights.astype(np.float32)}
    if algorithm.positive_nll_coefficient:
        right = trained & (of_responses(correct) > 0)
        coefficient = share * algorithm.positive_nll_coefficient
        host["nll_weights"] = (coefficient * right / max(1, right.sum())).astype(np.float32)
    if returns is not None:
        host["returns"] = returns
        host["value_weights"] = (share * trained / max(1, trained.sum())).astype(np.float32)
    return TrainBatch(scored, **host)
