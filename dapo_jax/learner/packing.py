"""Packing of responses into rows of one length, so that padding costs little.

A segment is a prompt with one response. It never crosses a row, and a row never crosses a
microbatch. Each optimizer minibatch is packed separately. Responses to one prompt can share it: the
prompt is packed once in a row, and the responses behind it attend to it and to themselves.
"""

import bisect
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dapo_jax.config.experiment import Packing
from dapo_jax.learner.batches import OBSERVED, PackedRows
from dapo_jax.types.structs import Completion, Prompt

# Row shapes that `choose_rows` tries.
ROW_FACTORS = (1, 2, 3, 4)  # times the shortest row that holds the longest response
MICROBATCH_SPLITS = (1, 2)
MIN_DEVICE_TOKENS = 512  # per device in a split microbatch; below, matrix products are inefficient
MAX_COST_RATIO = 0.97  # of a shape that is taken instead of the best one before it ...
MAX_NEW_COST_RATIO = 0.9  # ... and of one that has to be compiled instead of one that is


class RowShape(NamedTuple):
    """Shape of packed rows, for which programs are compiled."""

    packing: Packing
    microbatches: int


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

    def behind(self, tokens: np.ndarray) -> "Segment":
        """Return the segment with other prompt tokens; recorded experts no longer apply."""
        prompt = dataclasses.replace(self.prompt, tokens=tokens)
        return self._replace(
            prompt=prompt, completion=dataclasses.replace(self.completion, routes=None)
        )


class Member(NamedTuple):
    """A response within a `PromptGroup`."""

    tokens: int  # that no other member shares
    segment: int  # its number


class PromptGroup(NamedTuple):
    """Responses that share the first tokens of their prompt within a row, longest first.

    A response that shares nothing is a group of its own.
    """

    shared: int  # tokens that are packed once
    members: tuple[Member, ...]

    @property
    def tokens(self) -> int:
        return self.shared + sum(member.tokens for member in self.members)

    def split(self, free: int) -> tuple["PromptGroup", "PromptGroup"]:
        """Return the part that fits into `free` tokens of a row, and the rest."""
        parts: tuple[list[Member], ...] = [], []
        free -= self.shared
        for member in self.members:
            fits = member.tokens <= free
            parts[not fits].append(member)
            free -= member.tokens * fits
        return self._replace(members=tuple(parts[0])), self._replace(members=tuple(parts[1]))


def prompt_groups(segments: Sequence[Segment], share_prompts: bool) -> list[PromptGroup]:
    """Return the groups of segments that can share a prompt.

    The last token of a prompt belongs to each response: its hidden state predicts the first sampled
    token, so that a log-prob stays one position behind its hidden state inside every segment.
    """
    together: dict[Any, list[int]] = {}
    for number, segment in enumerate(segments):
        shared = len(segment.prompt.tokens) - 1
        key: Any = (number,)
        if share_prompts and shared > 0:
            routes = segment.completion.routes  # replayed experts have to be the same
            key = (segment.prompt.index, None if routes is None else routes[:shared].tobytes())
        together.setdefault(key, []).append(number)
    groups = []
    for numbers in together.values():
        shared = len(segments[numbers[0]].prompt.tokens) - 1 if len(numbers) > 1 else 0
        members = [Member(segments[number].length - shared, number) for number in numbers]
        longest_first = sorted(members, key=lambda member: (-member.tokens, member.segment))
        groups.append(PromptGroup(shared, tuple(longest_first)))
    return groups


def assign_rows(
    segments: Sequence[Segment], row_tokens: int, share_prompts: bool = False, single: bool = False
) -> list[list[PromptGroup]]:
    """Assign segments to rows of `row_tokens`, best fit decreasing; return the groups of each row.

    With `single` each has a row. Else a group that fits into no open row is split between several.
    """
    groups = prompt_groups(segments, share_prompts)
    if single:
        return [[group] for group in groups]
    rows: list[list[PromptGroup]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in sorted(range(len(groups)), key=lambda i: (-groups[i].tokens, i)):
        rest = groups[i]
        while rest.members:
            place = bisect.bisect_left(room, (rest.tokens, -1))
            place -= place == len(room)
            part, _ = rest.split(room[place][0]) if room else (rest._replace(members=()), rest)
            if not part.members:
                rows.append([])
                room.append((row_tokens, len(rows) - 1))  # the emptiest
                place = len(room) - 1
            free, row = room.pop(place)
            part, rest = rest.split(free)
            rows[row].append(part)
            bisect.insort(room, (free - part.tokens, row))
    return rows


def padded_microbatches(rows: Sequence[int], rows_per_microbatch: int) -> int:
    """Return the number of microbatches of arrays that hold any of these numbers of rows.

    It is a power of two, so that few shapes are compiled.
    """
    largest = math.ceil(max(rows) / rows_per_microbatch)
    return 1 << (largest - 1).bit_length() if largest else 1


def pack(
    segments: Sequence[Segment],
    row_tokens: int,
    rows_per_microbatch: int,
    microbatches: int | None = None,  # default: as `padded_microbatches` returns
    share_prompts: bool = False,
    single: bool = False,
) -> tuple[PackedRows, int]:
    """Pack a minibatch into [microbatches, rows_per_microbatch, row_tokens] host arrays.

    Raises ValueError if a segment is longer than a row, or there are too many rows.
    """
    longest = max((segment.length for segment in segments), default=0)
    if longest > row_tokens:
        raise ValueError(f"a segment of {longest} tokens exceeds row_tokens = {row_tokens}")
    rows = assign_rows(segments, row_tokens, share_prompts, single)
    used = math.ceil(len(rows) / rows_per_microbatch)
    microbatches = microbatches or padded_microbatches([len(rows)], rows_per_microbatch)
    if used > microbatches:
        raise ValueError(f"{len(rows)} rows exceed {microbatches} x {rows_per_microbatch}")
    shape = (microbatches * rows_per_microbatch, row_tokens)
    names = ["tokens", "segment_ids", "positions", *["prompt_ids"] * share_prompts]
    arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
    arrays["response_index"] = np.full(shape, -1, np.int32)
    arrays["sampler_logprobs"] = np.zeros(shape, np.float32)
    if any(segment.completion.supports is not None for segment in segments):
        arrays["edges"] = np.full(shape, -np.inf, np.float32)
    recorded = [s.completion.routes for s in segments if s.completion.routes is not None]
    if recorded:
        arrays["routes"] = np.full((*shape, *recorded[0].shape[1:]), -1, recorded[0].dtype)
    for row, groups in enumerate(rows):
        _pack_row({name: array[row] for name, array in arrays.items()}, segments, groups)
    split = (microbatches, rows_per_microbatch)
    fields = {name: array.reshape(*split, *array.shape[1:]) for name, array in arrays.items()}
    return PackedRows(**fields), used


def _pack_row(
    row: dict[str, np.ndarray], segments: Sequence[Segment], groups: Sequence[PromptGroup]
) -> None:
    """Write the segments of a row into its arrays [T]."""
    start = number = 0  # the number is the last segment's

    def put(segment: Segment, first: int, last: int) -> slice:
        """Write tokens first to last of a prompt with its response."""
        nonlocal start, number
        place = slice(start, start + last - first)
        number += 1
        start = place.stop
        completion = segment.completion
        both = np.concatenate([segment.prompt.tokens, completion.tokens])
        row["tokens"][place] = both[first:last]
        row["segment_ids"][place] = number
        row["positions"][place] = np.arange(first, last)
        if completion.routes is not None:
            routes = completion.routes[first:last]
            row["routes"][place.start : place.start + len(routes)] = routes
        return place

    for group in groups:
        prompt = None
        if group.shared:
            place = put(segments[group.members[0].segment], 0, group.shared)
            prompt = number
            row["prompt_ids"][place] = prompt
        for segment in (segments[member.segment] for member in group.members):
            place = put(segment, group.shared, segment.length)
            completion = segment.completion
            response = slice(place.stop - len(completion.tokens), place.stop)
            row["response_index"][response] = np.where(
                completion.is_sampled, segment.index, OBSERVED
            )
            row["sampler_logprobs"][response] = completion.sampler_logprobs
            if completion.supports is not None:
                mass, row["edges"][response] = completion.supports.T
                row["sampler_logprobs"][response] -= mass
            if "prompt_ids" in row:
                row["prompt_ids"][place] = number if prompt is None else prompt


def row_shapes(shortest: Packing, shards: int, longest: int) -> list[Packing]:
    """Return the rows that `choose_rows` may take if their length is free.

    They are one to four times as long as the shortest, up to `longest`, with the same number of
    tokens per microbatch or half of it, because the last microbatch is seldom full. `shards`
    divides the rows of a microbatch.
    """
    shapes = []
    for times in ROW_FACTORS:
        row_tokens = times * shortest.row_tokens
        if times > 1 and row_tokens > longest:
            break
        for parts in MICROBATCH_SPLITS:
            share = shortest.rows_per_microbatch // (times * parts) // shards
            if parts > 1 and share * row_tokens < MIN_DEVICE_TOKENS:
                break
            shapes.append(Packing(row_tokens, max(1, share) * shards, shortest.share_prompts))
    return shapes


def choose_rows(
    updates: Sequence[Sequence[Segment]],
    shapes: Sequence[Packing],
    attention_tokens: float,  # row length at which attention costs as much as everything else
    shared_cost: float = 1.0,  # of attention with shared prompts, relative to separate ones
    compiled: Collection[Packing] = (),
) -> Packing:
    """Return the rows with the least computation for these minibatches, padding included.

    A shape with `share_prompts` is also tried without. A shape that is not compiled yet has to be
    `MAX_NEW_COST_RATIO` as much work as those that are.
    """
    separate = [dataclasses.replace(shape, share_prompts=False) for shape in shapes]
    tried = [*separate, *(shape for shape in shapes if shape.share_prompts)]
    best, least = separate[0], math.inf
    for shape in sorted(tried, key=lambda shape: shape not in compiled):
        places = 0
        for part in updates:
            rows = assign_rows(part, shape.row_tokens, shape.share_prompts)
            microbatches = math.ceil(len(rows) / shape.rows_per_microbatch)
            places += microbatches * shape.rows_per_microbatch * shape.row_tokens
        factor = shared_cost if shape.share_prompts else 1.0
        cost = places * (1 + factor * shape.row_tokens / attention_tokens)
        compiles = best in compiled and shape not in compiled
        if cost < (MAX_NEW_COST_RATIO if compiles else MAX_COST_RATIO) * least:
            best, least = shape, cost
    return best


def fill(rollouts: PackedRows, microbatches: Sequence[int]) -> float:
    """Return the fraction of tokens that are not padding, in microbatches that are not empty."""
    segment_ids = np.asarray(rollouts.segment_ids)
    return float((segment_ids > 0).sum() / (sum(microbatches) * math.prod(segment_ids.shape[2:])))


def pack_updates(
    updates: Sequence[Sequence[Segment]], packing: Packing, least: int = 1
) -> tuple[PackedRows, list[int]]:
    """Pack all minibatches: arrays [U, M, R, T], and the microbatches that each uses.

    The arrays have at least the `least` microbatches.
    """
    row_tokens, rows, *how = dataclasses.astuple(packing)
    filled = [len(assign_rows(part, row_tokens, *how)) for part in updates]
    microbatches = max(least, padded_microbatches(filled, rows))
    packs = [pack(part, row_tokens, rows, microbatches, *how) for part in updates]
    packed, used = zip(*packs, strict=True)
    return jax.tree.map(lambda *parts: np.stack(parts), *packed), list(used)


def tree_index(tree: Any, index: int | slice | tuple[int | slice, ...]) -> Any:
    """Index the first axes of every array of a tree."""
    return jax.tree.map(lambda array: array[index], tree)


def place_tokens(per_token: Sequence[np.ndarray], response_index: np.ndarray) -> np.ndarray:
    """Put per-token arrays of responses, ordered by index, at their positions in packed rows."""
    flat, values = response_index.ravel(), np.concatenate(per_token)
    order = np.argsort(flat, kind="stable")
    placed = np.zeros((len(flat), *values.shape[1:]))
    placed[order[np.count_nonzero(flat < 0) :]] = values
    return placed.reshape(*response_index.shape, *values.shape[1:])


def move_tokens(
    values: np.ndarray, source: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Move values of sampled tokens from packed rows to others, by the `response_index` of both.

    Returns the values, and a mask of the tokens whose response `source` has.
    """
    index = np.where(np.isin(target, source), target, -1)
    order = np.argsort(source, axis=None, kind="stable")[np.count_nonzero(source < 0) :]
    return place_tokens([values.ravel()[order]], index), index >= 0


def take_tokens(values: np.ndarray, response_index: np.ndarray) -> list[np.ndarray]:
    """Split packed values into one array per response, ordered by index."""
    flat = response_index.ravel()
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
    lengths = np.bincount(flat[order])
    values = values.reshape(len(flat), *values.shape[response_index.ndim :])
    return np.split(values[order], np.cumsum(lengths)[:-1])
