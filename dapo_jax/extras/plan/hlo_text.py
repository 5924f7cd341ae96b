"""Reader of a compiled program's text: the bytes that it sends and writes to memory.

The text has the body of a loop once. The loop's condition or a note at the loop says how often it
runs; a loop without either is the loop over microbatches.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

VERSION = 5  # of the reader; cached results of another version are ignored
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Operations without memory of their own.
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "conditional")
FREE += ("send", "send-done", "recv-done")
# An array and its layout: S(1) and above is memory on the chip itself, not HBM.
ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
# [groups, devices per group]; a mesh and its axes; or the first group itself.
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_FIRST = re.compile(r"replica_groups=\{\{([\d,]*)\}")


class Line(NamedTuple):
    """An instruction as written: `name = shapes operation(rest`."""

    root: str
    name: str
    shapes: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> list[tuple[str, str]]:
        """Computations that it runs as (role, name)."""
        branches = _BRANCHES.search(self.rest)
        names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return _CALLED.findall(self.rest) + [("branch", name) for name in names]


class HloText:
    """Lines of a compiled program by name, by computation.

    Attributes:
        entry: the computation that runs first.
        fused: computations inside a fusion.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Line]] = {}
        self.entry, self.fused, inside = "", set(), {}
        for written in text.splitlines():
            if header := _HEADER.match(written):
                inside = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif match := _LINE.match(written):
                line = Line(*match.groups(default=""))
                inside[line.name] = line
                if line.operation == "fusion":
                    self.fused |= {name for _, name in line.called}


@dataclasses.dataclass(frozen=True)
class Times:
    """An amount per call of a program: `once`, plus `each` for every microbatch."""

    once: float = 0.0
    each: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(self.once + other.once, self.each + other.each)

    def scaled(self, factor: float) -> "Times":
        return Times(self.once * factor, self.each * factor)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one chip: over links to its neighbours, to other slices, and to its memory."""

    sent: Times = Times()  # noqa: RUF009
    crossed: Times = Times()  # noqa: RUF009
    written: Times = Times()  # noqa: RUF009


def group_size(line: str) -> int:
    """Return the number of devices in a collective; 0 means all."""
    if match := _IOTA.search(line):
        return int(match[1])
    if match := _AXES.search(line):
        sizes = dict(re.findall(r"('\w+')=(\d+)", match[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'\w+'", match[2]))
    match = _FIRST.search(line)
    return len(match[1].split(",")) if match else 0


def shape_of(dimensions: str) -> tuple[int, ...]:
    """Parse a shape such as `8,64`."""
    return tuple(int(size) for size in dimensions.split(",") if size)


def _trips(condition: dict[str, Line]) -> int | None:
    """Return a loop's number of iterations from its condition; None if no constant gives it."""
    for line in condition.values():
        for name in line.operands[:2] if line.operation == "compare" else ():
            constant = condition.get(name)
            if constant and constant.operation == "constant" and "s32[]" in constant.shapes:
                return int(constant.rest.split(")")[0])
    return None


def _multiplicity(hlo: HloText) -> dict[str, Times]:
    """Return how often each computation runs."""
    callers: dict[str, list[tuple[str, int | None]]] = {name: [] for name in hlo.computations}
    for name, lines in hlo.computations.items():
        for line in lines.values():
            condition = _CONDITION.search(line.rest)
            for role, called in line.called:
                trips: int | None = 1
                if role == "body" and condition:
                    known = _KNOWN_TRIPS.search(line.rest)
                    trips = int(known[1]) if known else _trips(hlo.computations[condition[1]])
                callers.setdefault(called, []).append((name, trips))

    @functools.cache
    def times(name: str) -> Times:
        total = Times(1.0) if name == hlo.entry else Times()
        for caller, trips in callers[name]:
            outer = times(caller)
            in_loop = Times(0.0, outer.once + outer.each)
            total += in_loop if trips is None else outer.scaled(trips)
        return total

    return {name: times(name) for name in hlo.computations}


def _sizes(shapes: str, *, in_memory: bool) -> list[int]:
    """Return the bytes of a shape's arrays; `in_memory` leaves out those on the chip itself."""
    return [
        math.prod(shape_of(dimensions)) * BYTES.get(dtype, 1)
        for dtype, dimensions, layout in ARRAY.findall(shapes)
        if not (in_memory and re.search(r"S\([1-9]", layout))
    ]


def _updated(lines: dict[str, Line], line: Line, *, in_memory: bool) -> int:
    """Return the bytes that an in-place update writes."""
    update = lines.get(line.operands[1])
    return sum(_sizes(update.shapes, in_memory=in_memory)) if update else 0


def _passed_on(line: Line) -> set[int]:
    """Return the results of a fusion that are buffers of an exchange in the background.

    All fusions that run meanwhile take and return them, in a loop in every iteration.
    """
    aliases = re.search(r"output_to_operand_aliasing=(.*) calls=%async_collective", line.rest)
    return set(map(int, re.findall(r"\{(\d+)\}: ", aliases[1]))) if aliases else set()


def _written(hlo: HloText, computation: str, line: Line) -> int:
    """Return the bytes that an instruction writes to memory.

    One that starts a copy lists the copy's source too; the one that ends it has the result alone.
    """
    if line.operation.endswith("-start"):
        return 0
    if line.operation == "dynamic-update-slice":
        return _updated(hlo.computations[computation], line, in_memory=True)
    if line.operation != "fusion":
        return sum(_sizes(line.shapes, in_memory=True))
    called = next((hlo.computations[name] for role, name in line.called if role == "calls"), {})
    root = next((inner for inner in called.values() if inner.root), line)
    passed = _passed_on(line)
    total, in_place = 0, bool(passed)  # in-place updates at the fusion's end
    results = [match[0] for match in ARRAY.finditer(line.shapes)]
    ends = root.operands if root.operation == "tuple" else [root.name]
    for number, (name, shapes) in enumerate(zip(ends, results, strict=False)):
        end = called.get(name)
        while end is not None and end.operation in ("bitcast", "convert", "copy"):
            end = called.get(end.operands[0])
        if end is not None and end.operation == "dynamic-update-slice":
            in_place = True
            total += _updated(called, end, in_memory=False)
        elif end is not None and number not in passed:
            total += sum(_sizes(shapes, in_memory=True))
    return total if in_place else sum(_sizes(line.shapes, in_memory=True))


def _sent(computation: str, line: Line, devices: int) -> float:
    """Return the bytes that a chip sends in a collective, over a ring of its group."""
    kind = line.operation.removesuffix("-start")
    group, sizes = group_size(line.rest) or devices, _sizes(line.shapes, in_memory=False)
    # A started collective lists its operands beside its results.
    result = max(sizes, default=0) if line.operation.endswith("-start") else sum(sizes)
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        # A TPU writes a reduce-scatter as a fusion that reduces and slices.
        kind = "reduce-scatter"
        result //= group
    fraction = (group - 1) / group
    return {
        "all-gather": result * fraction,
        "all-reduce": 2 * result * fraction,
        "reduce-scatter": result * (group - 1),
        "all-to-all": result * fraction,
        "collective-permute": result,
    }[kind]


def read(text: str, devices: int) -> Traffic:
    """Return the traffic of a program, from its text as compiled for `devices` chips."""
    hlo = HloText(text)
    times = _multiplicity(hlo)
    sent, crossed, written, channels = Times(), Times(), Times(), set()
    for name, lines in hlo.computations.items():
        for line in lines.values():
            if line.operation not in FREE and name not in hlo.fused:
                written += times[name].scaled(_written(hlo, name, line))
            channel = _CHANNEL.search(line.rest)
            if line.operation == "send" and "megascale" in line.rest:
                crossed += times[name].scaled(max(_sizes(line.shapes, in_memory=False)))
            elif line.operation.removesuffix("-start") not in COLLECTIVES:
                continue
            elif not (channel and channel[1] in channels):
                # One collective may be split over several fusions, with the same channel.
                channels |= {channel[1]} if channel else set()
                sent += times[name].scaled(_sent(name, line, devices))
    return Traffic(sent, crossed, written)
