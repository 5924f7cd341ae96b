"""Arrays and collectives in the text of a compiled program."""

import collections
import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Operations without memory of their own.
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "conditional")
FREE += ("send", "send-done", "recv-done")
ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")  # of a computation
# name = shapes operation(rest
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# [groups, devices per group]; a mesh and its axes; or the first group itself.
IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
FIRST = re.compile(r"replica_groups=\{\{([\d,]*)\}")


class Instruction(NamedTuple):
    """An array that a program writes to memory."""

    operation: str
    dtype: str
    shape: tuple[int, ...]
    group: int  # devices that exchange; 0: all, or none
    looped: bool  # in the body of a loop

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES.get(self.dtype, 1)

    def label(self) -> str:
        operation = self.operation.removesuffix("-start")
        return f"{operation} {self.dtype}[{','.join(map(str, self.shape))}]"


def group_size(line: str) -> int:
    """Return the number of devices in a collective; 0 means all."""
    if match := IOTA.search(line):
        return int(match[1])
    if match := AXES.search(line):
        sizes = dict(re.findall(r"('\w+')=(\d+)", match[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'\w+'", match[2]))
    match = FIRST.search(line)
    return len(match[1].split(",")) if match else 0


def instructions(text: str) -> list[Instruction]:
    """Return the arrays that a program writes to memory, so those outside of fusions."""
    arrays, computation = [], ""
    fused = set(re.findall(r" fusion\(.*\bcalls=%?([\w.\-]+)", text))
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    for written in text.splitlines():
        if header := HEADER.match(written):
            computation = header[1]
        line = LINE.match(written)
        if not line or computation in fused or line[3] in FREE:
            continue
        name, shapes, operation, rest = line.groups()
        if operation == "fusion" and "all-reduce-scatter" in name:
            operation = "reduce-scatter"  # as TPUs write one
        looped = computation in bodies
        for dtype, dimensions in ARRAY.findall(shapes):
            shape = tuple(int(size) for size in dimensions.split(",") if size)
            arrays.append(Instruction(operation, dtype, shape, group_size(rest), looped))
    return arrays


def looped_collectives(arrays: list[Instruction]) -> list[str]:
    """Count the collectives in the bodies of loops, by shape."""
    names = collections.Counter(
        f"{array.label()} over {array.group}"
        for array in arrays
        if array.looped and array.operation.removesuffix("-start") in COLLECTIVES
    )
    return [f"{count} x {name}" for name, count in sorted(names.items())]
