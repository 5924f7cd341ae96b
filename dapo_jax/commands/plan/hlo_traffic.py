"""Traffic of a compiled program: over the links between chips, and through a chip's memory.

The text of a program has the body of a loop once. How often it runs is in the loop's condition;
where neither that nor a note at the loop says, it is the loop over microbatches.
"""

import dataclasses
import functools
import math
import re

from dapo_jax.commands.plan.hlo_text import (
    ARRAY,
    BYTES,
    COLLECTIVES,
    FREE,
    HloText,
    Line,
    group_size,
    shape_of,
)

VERSION = 3  # of what is read from a text; kept results of another are not used
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_KNOWN = re.compile(r"known_trip_count\W+n\W+(\d+)")
BETWEEN_SLICES = "between slices"  # by the data centre's network, once summed within a slice
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Times:
    """Amount per call of a program: `once` outside of the microbatches, `each` in every one."""

    once: float = 0.0
    each: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(self.once + other.once, self.each + other.each)

    def scaled(self, factor: float) -> "Times":
        return Times(self.once * factor, self.each * factor)

    def inside(self) -> "Times":
        """Amount where all of it is in the loop over microbatches."""
        return Times(0.0, self.once + self.each)

    def total(self, microbatches: int) -> float:
        return self.once + microbatches * self.each


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one chip: `sent` by operation, or `BETWEEN_SLICES`; `written` to its memory."""

    sent: dict[str, Times]
    written: Times


def _trips(condition: dict[str, Line]) -> int | None:
    """Number of turns of a loop, from its condition; None where no constant says."""
    for line in condition.values():
        for name in line.operands[:2] if line.operation == "compare" else ():
            constant = condition.get(name)
            if constant and constant.operation == "constant" and "s32[]" in constant.shapes:
                return int(constant.rest.split(")")[0])
    return None


def _multiplicity(hlo: HloText) -> dict[str, Times]:
    """Number of runs of each computation in one call of the program."""
    callers: dict[str, list[tuple[str, int | None]]] = {name: [] for name in hlo.computations}
    for name, lines in hlo.computations.items():
        for line in lines.values():
            condition = _CONDITION.search(line.rest)
            for role, called in line.called:
                trips: int | None = 1
                if role == "body" and condition:
                    known = _KNOWN.search(line.rest)
                    trips = int(known[1]) if known else _trips(hlo.computations[condition[1]])
                if called in callers:
                    callers[called].append((name, trips))
            branches = _BRANCHES.search(line.rest)
            for called in re.findall(r"[\w.\-]+", branches[1]) if branches else ():
                callers[called].append((name, 1))

    @functools.cache
    def times(name: str) -> Times:
        total = Times(1.0) if name == hlo.entry else Times()
        for caller, trips in callers[name]:
            outer = times(caller)
            total += outer.inside() if trips is None else outer.scaled(trips)
        return total

    return {name: times(name) for name in hlo.computations}


def _sizes(shapes: str, *, in_memory: bool) -> list[int]:
    """Bytes of the arrays of a shape; `in_memory`: without those that stay on the chip itself."""
    return [
        math.prod(shape_of(dimensions)) * BYTES.get(dtype, 1)
        for dtype, dimensions, layout in ARRAY.findall(shapes)
        if not (in_memory and re.search(r"S\([1-9]", layout))
    ]


def _sent(operation: str, result: int, group: int) -> float:
    """Bytes that a chip sends in a ring of `group`, for a result of so many bytes."""
    share = (group - 1) / group
    return {
        "all-gather": result * share,
        "all-reduce": 2 * result * share,
        "reduce-scatter": result * (group - 1),
        "all-to-all": result * share,
        "collective-permute": result,
    }[operation]


def _updated(lines: dict[str, Line], line: Line, *, in_memory: bool) -> int:
    """Bytes of the update that an update in place writes."""
    update = lines.get(line.operands[1])
    return sum(_sizes(update.shapes, in_memory=in_memory)) if update else 0


def _written(hlo: HloText, computation: str, line: Line) -> int:
    """Bytes that an instruction writes to memory: of an update in place, only the update."""
    if line.operation == "dynamic-update-slice":
        return _updated(hlo.computations[computation], line, in_memory=True)
    if line.operation == "fusion":
        called = next((name for role, name in line.called if role == "calls"), None)
        changed = _updated_by_fusion(hlo.computations[called]) if called else None
        if changed is not None:
            return changed
    return sum(_sizes(line.shapes, in_memory=True))


def _updated_by_fusion(lines: dict[str, Line]) -> int | None:
    """Bytes that updates in place at the end of a fusion write; None where there are none."""
    root = next((line for line in lines.values() if line.root), None)
    if root is None:
        return None
    total, in_place = 0, False
    for name in root.operands if root.operation == "tuple" else [root.name]:
        line = lines.get(name)
        while line is not None and line.operation in ("bitcast", "convert", "copy"):
            line = lines.get(line.operands[0])
        if line is not None and line.operation == "dynamic-update-slice":
            total, in_place = total + _updated(lines, line, in_memory=False), True
        elif line is not None:
            total += sum(_sizes(line.shapes, in_memory=True))
    return total if in_place else None


def read(text: str, devices: int) -> Traffic:
    """Traffic of a program's text, as compiled for `devices` chips."""
    hlo = HloText(text)
    times = _multiplicity(hlo)
    sent: dict[str, Times] = {}
    written, channels = Times(), set()
    for name, lines in hlo.computations.items():
        for line in lines.values():
            if line.operation not in FREE and name not in hlo.fused:
                written += times[name].scaled(_written(hlo, name, line))
            kind = line.operation.removesuffix("-start")
            if kind == "send" and "megascale" in line.rest:
                moved = times[name].scaled(max(_sizes(line.shapes, in_memory=False)))
                sent[BETWEEN_SLICES] = sent.get(BETWEEN_SLICES, Times()) + moved
            channel = _CHANNEL.search(line.rest)
            # Parts of one collective stand in several fusions, with the same channel.
            if kind not in COLLECTIVES or (channel and channel[1] in channels):
                continue
            channels |= {channel[1]} if channel else set()
            group, sizes = group_size(line.rest) or devices, _sizes(line.shapes, in_memory=False)
            # A started collective names its operands beside its results.
            started = line.operation.endswith("-start")
            result = max(sizes, default=0) if started else sum(sizes)
            if kind == "all-reduce" and "all-reduce-scatter" in name:
                result //= group  # TPU's form of one: reduced and sliced in one fusion
                kind = "reduce-scatter"
            moved = times[name].scaled(_sent(kind, result, group))
            sent[kind] = sent.get(kind, Times()) + moved
    return Traffic(sent, written)
