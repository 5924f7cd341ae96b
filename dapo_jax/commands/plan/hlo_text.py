"""What a compiled program's text says: what it keeps in memory, and what devices exchange."""

import collections
import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# They name memory that exists already, or hold none.
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "conditional")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.\-]+)")
# [groups, devices of one]; a mesh and which of its axes; or the first group itself.
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_FIRST = re.compile(r"replica_groups=\{\{([\d,]*)\}")


class Instruction(NamedTuple):
    """One array that a program makes, outside of fusions."""

    operation: str
    dtype: str
    shape: tuple[int, ...]
    source: str  # the path of names in the Python program
    group: int  # devices that exchange; 0: all, or none
    looped: bool  # in the body of a loop

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES.get(self.dtype, 1)

    def __str__(self) -> str:
        return f"{self.operation} {self.dtype}[{','.join(map(str, self.shape))}]"


def group_size(line: str) -> int:
    """How many devices take part in a collective, in each of the forms that XLA writes; 0: all."""
    if found := _IOTA.search(line):
        return int(found[1])
    if found := _AXES.search(line):
        sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'\w+'", found[2]))
    found = _FIRST.search(line)
    return len(found[1].split(",")) if found else 0


def instructions(text: str) -> list[Instruction]:
    """Every array of a compiled program's text that is written to memory."""
    fused, bodies = set(_FUSED.findall(text)), set(re.findall(r"body=%?([\w.\-]+)", text))
    inside, found = "", []
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _COMPUTATION.match(line)
            inside = header[1] if header else inside
            continue
        match = _INSTRUCTION.match(line)
        if not match or inside in fused or match[3] in FREE:
            continue
        name, shapes, operation, rest = match.groups()
        if operation == "fusion" and "all-reduce-scatter" in name:
            operation = "reduce-scatter"  # TPU's form of one
        source = re.search(r'op_name="([^"]*)"', rest)
        for dtype, dims in _ARRAY.findall(shapes):
            shape = tuple(int(size) for size in dims.split(",") if size)
            path = source[1] if source else ""
            group, looped = group_size(rest), inside in bodies
            found.append(Instruction(operation, dtype, shape, path, group, looped))
    return found


def kernels(text: str) -> list[str]:
    """Pallas kernels that a program calls, each with in how many places."""
    calls = re.findall(r"%([\w\-]+?)[.\d]* = .*custom_call_target=\"tpu_custom_call\"", text)
    return [f"{count} x {name}" for name, count in sorted(collections.Counter(calls).items())]


def largest(made: list[Instruction], count: int) -> list[str]:
    """The largest arrays of a program, by shape, each with where one comes from."""
    kinds = {str(one): one for one in made}
    first = sorted(kinds.values(), key=lambda one: -one.bytes)[:count]
    return [
        f"{one} {one.bytes / 2**30:.2f} GiB ({'/'.join(one.source.split('/')[-3:])})"
        for one in first
    ]


def square(made: list[Instruction], length: int) -> list[str]:
    """Arrays with two dimensions of that length."""
    return sorted({str(one) for one in made if one.shape.count(length) > 1})


def over(made: list[Instruction], sizes: set[int], lengths: set[int]) -> list[str]:
    """Arrays with a dimension in `sizes` and another in `lengths`."""

    def crosses(shape: tuple[int, ...]) -> bool:
        return bool(sizes & set(shape)) and bool(lengths & (set(shape) - sizes))

    return sorted({str(one) for one in made if crosses(one.shape)})


def copies(made: list[Instruction], elements: int) -> list[str]:
    """Copies and other layouts of arrays of at least so many elements, with how many.

    Matrices are left out: those are weights, fetched ahead.
    """
    moved = ("copy", "copy-start", "transpose")
    counts = collections.Counter(
        str(one)
        for one in made
        if one.operation in moved and len(one.shape) > 2 and math.prod(one.shape) >= elements
    )
    return [f"{count} x {name}" for name, count in sorted(counts.items())]


def collectives(
    made: list[Instruction],
    within: str = "",
    *,
    sizes: set[int] | None = None,
    looped: bool = False,
) -> list[str]:
    """What devices exchange, with how many.

    Args:
        within: a word in the name of its source.
        sizes: only arrays with one of these dimensions.
        looped: only what is in the body of a loop.
    """
    counts: collections.Counter = collections.Counter()
    for one in made:
        name = one.operation.removesuffix("-start")
        named = not within or re.search(rf"\b{within}\b", one.source)
        sized = sizes is None or sizes & set(one.shape)
        if name in COLLECTIVES and named and sized and one.looped >= looped:
            shape = f"{one.dtype}[{','.join(map(str, one.shape))}]"
            over = f" over {one.group}" if one.group else ""
            counts[f"{name} {shape}{over}"] += 1
    return [f"{count} x {name}" for name, count in sorted(counts.items())]
