"""Reader of a compiled program's text: what it keeps in memory, and what devices exchange."""

import collections
import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# They name memory that exists already, or hold none.
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "constant", "conditional")
FREE += ("send", "send-done", "recv-done")
# An array with its layout: S(1) and above are on the chip itself, not in its memory.
ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
# [groups, devices of one]; a mesh and which of its axes; or the first group itself.
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_FIRST = re.compile(r"replica_groups=\{\{([\d,]*)\}")


class Line(NamedTuple):
    """Instruction as written: `name = shapes operation(rest`."""

    root: str
    name: str
    shapes: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions that it reads."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> list[tuple[str, str]]:
        """Computations that it runs, each as (role, name); branches by number are left out."""
        return _CALLED.findall(self.rest)


class HloText:
    """Computations of a compiled program.

    Attributes:
        computations: lines by name, by computation.
        entry: the computation that runs first.
        fused: computations that are the insides of a fusion.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Line]] = {}
        self.entry, inside = "", None
        for written in text.splitlines():
            if header := _HEADER.match(written):
                inside = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif inside is not None and (match := _LINE.match(written)):
                line = Line(*match.groups(default=""))
                inside[line.name] = line
        self.fused = {
            name
            for lines in self.computations.values()
            for line in lines.values()
            if line.operation == "fusion"
            for _, name in line.called
        }


class Instruction(NamedTuple):
    """Array that a program writes to memory."""

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
    """Number of devices in a collective, in each of the forms that XLA writes; 0: all."""
    if match := _IOTA.search(line):
        return int(match[1])
    if match := _AXES.search(line):
        sizes = dict(re.findall(r"('\w+')=(\d+)", match[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'\w+'", match[2]))
    match = _FIRST.search(line)
    return len(match[1].split(",")) if match else 0


def shape_of(dimensions: str) -> tuple[int, ...]:
    """Shape as written: `8,64`."""
    return tuple(int(size) for size in dimensions.split(",") if size)


def instructions(text: str) -> list[Instruction]:
    """Arrays of a compiled program's text that are written to memory, so outside of fusions."""
    hlo, made = HloText(text), []
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    for computation, lines in hlo.computations.items():
        for line in lines.values():
            if computation in hlo.fused or line.operation in FREE:
                continue
            operation = line.operation
            if operation == "fusion" and "all-reduce-scatter" in line.name:
                operation = "reduce-scatter"  # TPU's form of one
            source = re.search(r'op_name="([^"]*)"', line.rest)
            path, group = source[1] if source else "", group_size(line.rest)
            for dtype, dimensions, _ in ARRAY.findall(line.shapes):
                shape, looped = shape_of(dimensions), computation in bodies
                made.append(Instruction(operation, dtype, shape, path, group, looped))
    return made


def kernels(text: str) -> list[str]:
    """Pallas kernels of a program, each with the number of its calls."""
    calls = re.findall(r"%([\w\-]+?)[.\d]* = .*custom_call_target=\"tpu_custom_call\"", text)
    return [f"{count} x {name}" for name, count in sorted(collections.Counter(calls).items())]


def largest(made: list[Instruction], count: int) -> list[str]:
    """Largest arrays of a program, by shape, each with where one comes from."""
    kinds = {str(array): array for array in made}
    first = sorted(kinds.values(), key=lambda array: -array.bytes)[:count]
    return [
        f"{array} {array.bytes / 2**30:.2f} GiB ({'/'.join(array.source.split('/')[-3:])})"
        for array in first
    ]


def square(made: list[Instruction], length: int) -> list[str]:
    """Arrays with two dimensions of that length."""
    return sorted({str(array) for array in made if array.shape.count(length) > 1})


def over(made: list[Instruction], sizes: set[int], lengths: set[int]) -> list[str]:
    """Arrays with a dimension in `sizes` and another in `lengths`."""

    def crosses(shape: tuple[int, ...]) -> bool:
        return bool(sizes & set(shape)) and bool(lengths & (set(shape) - sizes))

    return sorted({str(array) for array in made if crosses(array.shape)})


def copies(made: list[Instruction], elements: int) -> list[str]:
    """Copies and other layouts of arrays of at least so many elements, with how many.

    Matrices are left out: those are weights, fetched ahead.
    """
    moved = ("copy", "copy-start", "transpose")
    counts = collections.Counter(
        str(array)
        for array in made
        if array.operation in moved and len(array.shape) > 2 and math.prod(array.shape) >= elements
    )
    return [f"{count} x {name}" for name, count in sorted(counts.items())]


def collectives(
    made: list[Instruction],
    within: str = "",
    *,
    sizes: set[int] | None = None,
    looped: bool = False,
) -> list[str]:
    """Collectives between devices, by shape, each with how many.

    Args:
        within: a word in the name of its source.
        sizes: only arrays with one of these dimensions.
        looped: only what is in the body of a loop.
    """
    counts: collections.Counter = collections.Counter()
    for array in made:
        name = array.operation.removesuffix("-start")
        named = not within or re.search(rf"\b{within}\b", array.source)
        sized = sizes is None or sizes & set(array.shape)
        if name in COLLECTIVES and named and sized and array.looped >= looped:
            group = f" over {array.group}" if array.group else ""
            counts[f"{array._replace(operation=name)}{group}"] += 1
    return [f"{count} x {name}" for name, count in sorted(counts.items())]
