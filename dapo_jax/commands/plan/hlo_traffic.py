"""What a compiled program moves: over the links between chips, and through a chip's memory.

The text of a program has the body of a loop once. How often it runs is in the loop's condition;
where neither that nor a note at the loop says, it is the loop over microbatches.
"""

import dataclasses
import functools
import math
import re

from dapo_jax.commands.plan.hlo_text import BYTES, COLLECTIVES, FREE, group_size

VERSION = 3  # of what is read from a text; kept results of another are not used
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# With its layout: S(1) and above are on the chip itself, not in its memory.
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r" compare\(%?([\w.\-]+), %?([\w.\-]+)\)")
_KNOWN = re.compile(r"known_trip_count\W+n\W+(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Times:
    """How often something runs: `once` outside of the microbatches, `each` in every one."""

    once: float = 0.0
    each: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(self.once + other.once, self.each + other.each)

    def scaled(self, factor: float) -> "Times":
        return Times(self.once * factor, self.each * factor)

    def inside(self) -> "Times":
        """The same, in the loop over microbatches."""
        return Times(0.0, self.once + self.each)

    def total(self, microbatches: int) -> float:
        return self.once + microbatches * self.each


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one chip: `sent` over its links by operation, `written` to its memory."""

    sent: dict[str, Times]
    written: Times


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each, and which comes first."""
    found, inside, entry = {}, "", ""
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _HEADER.match(line)
            if header:
                inside = header[1]
                found[inside] = []
                entry = inside if line.startswith("ENTRY") else entry
        elif inside:
            found[inside].append(line)
    return found, entry


def _trips(condition: list[str]) -> int | None:
    """How often a loop runs; None where no constant says."""
    constants = dict(_CONSTANT.findall("\n".join(condition)))
    for line in condition:
        compared = _COMPARED.search(line)
        for name in compared.groups() if compared else ():
            if name in constants:
                return int(constants[name])
    return None


def _multiplicity(computations: dict[str, list[str]], entry: str) -> dict[str, Times]:
    """How often each computation runs in one call of the program."""
    callers: dict[str, list[tuple[str, int | None]]] = {name: [] for name in computations}
    for name, lines in computations.items():
        for line in lines:
            condition = _CONDITION.search(line)
            for role, called in _CALLED.findall(line):
                trips: int | None = 1
                if role == "body" and condition:
                    known = _KNOWN.search(line)
                    trips = int(known[1]) if known else _trips(computations[condition[1]])
                if called in callers:
                    callers[called].append((name, trips))
            branches = _BRANCHES.search(line)
            for called in re.findall(r"[\w.\-]+", branches[1]) if branches else ():
                callers[called].append((name, 1))

    @functools.cache
    def times(name: str) -> Times:
        total = Times(1.0) if name == entry else Times()
        for caller, trips in callers[name]:
            outer = times(caller)
            total += outer.inside() if trips is None else outer.scaled(trips)
        return total

    return {name: times(name) for name in computations}


def _bytes(shapes: str, *, in_memory: bool) -> int:
    total = 0
    for dtype, dims, layout in _ARRAY.findall(shapes):
        if not (in_memory and re.search(r"S\([1-9]", layout)):
            sizes = [int(size) for size in dims.split(",") if size]
            total += math.prod(sizes) * BYTES.get(dtype, 1)
    return total


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


class _Reader:
    """A program's computations, each as its instructions by name."""

    def __init__(self, text: str):
        self.computations, self.entry = _computations(text)
        self._made = {
            name: {found[1]: found for line in lines if (found := _LINE.match(line))}
            for name, lines in self.computations.items()
        }
        self._roots = {
            name: found[1]
            for name, lines in self.computations.items()
            for line in lines
            if line.lstrip().startswith("ROOT") and (found := _LINE.match(line))
        }
        self.fused = {
            called
            for made in self._made.values()
            for one in made.values()
            if one[3] == "fusion"
            for _, called in _CALLED.findall(one[4])
        }

    def written(self, computation: str, name: str) -> int:
        """Bytes that an instruction writes to memory: of an update in place, the update's."""
        one = self._made[computation].get(name)
        if one is None:
            return 0
        _, shapes, operation, rest = one.groups()
        if operation == "dynamic-update-slice":
            update = self._made[computation].get(_operands(rest)[1])
            return _bytes(update[2], in_memory=True) if update else 0
        if operation == "fusion":
            called = next((c for role, c in _CALLED.findall(rest) if role == "calls"), None)
            changed = self._updates(called) if called else None
            if changed is not None:
                return changed
        return _bytes(shapes, in_memory=True)

    def _updates(self, fusion: str) -> int | None:
        """Of a fusion that ends in updates in place; None where it writes its result anew."""
        made, root = self._made[fusion], self._roots.get(fusion)
        if root is None:
            return None
        last = made[root]
        ends = _operands(last[4]) if last[3] == "tuple" else [root]
        total, found = 0, False
        for end in ends:
            one = made.get(end)
            while one is not None and one[3] in ("bitcast", "convert", "copy"):
                one = made.get(_operands(one[4])[0])
            if one is not None and one[3] == "dynamic-update-slice":
                update = made.get(_operands(one[4])[1])
                total, found = total + (_bytes(update[2], in_memory=False) if update else 0), True
            elif one is not None:
                total += _bytes(one[2], in_memory=True)
        return total if found else None

    def instructions(self, computation: str) -> list[re.Match]:
        return list(self._made[computation].values())


def _operands(rest: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", rest.split(")")[0])


def read(text: str, devices: int) -> Traffic:
    """The traffic of a program's text, as compiled for `devices` chips."""
    reader = _Reader(text)
    times = _multiplicity(reader.computations, reader.entry)
    sent: dict[str, Times] = {}
    written, channels = Times(), set()
    for name in reader.computations:
        for match in reader.instructions(name):
            label, shapes, operation, rest = match.groups()
            if operation not in FREE and name not in reader.fused:
                written += times[name].scaled(reader.written(name, label))
            kind = operation.removesuffix("-start")
            channel = _CHANNEL.search(rest)
            # Parts of one collective stand in several fusions, with the same channel.
            if kind not in COLLECTIVES or (channel and channel[1] in channels):
                continue
            channels |= {channel[1]} if channel else set()
            group = group_size(rest) or devices
            started = operation.endswith("-start")
            result = _largest(shapes) if started else _bytes(shapes, in_memory=False)
            if kind == "all-reduce" and "all-reduce-scatter" in name:
                result //= group  # TPU's form of one: reduced and sliced in one fusion
                kind = "reduce-scatter"
            moved = times[name].scaled(_sent(kind, result, group))
            sent[kind] = sent.get(kind, Times()) + moved
    return Traffic(sent, written)


def _largest(shapes: str) -> int:
    """Of a started collective's operands and results."""
    sizes = [
        _bytes(f"{dtype}[{dims}]", in_memory=False) for dtype, dims, _ in _ARRAY.findall(shapes)
    ]
    return max(sizes, default=0)
