"""Arrays, kernels and collectives in the text of a compiled program."""

import collections
import math
import re
from typing import NamedTuple

import jax

from dapo_jax.extras.plan.programs import SAMPLING, Layout, Program
from dapo_jax.runtime.sharding import DECODING, TRAINING, shards

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
    source: str  # path of names in the Python program
    group: int  # devices that exchange; 0: all, or none
    looped: bool  # in the body of a loop

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES.get(self.dtype, 1)

    def label(self, operation: str) -> str:
        return f"{operation} {self.dtype}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return self.label(self.operation)


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
        source = re.search(r'op_name="([^"]*)"', rest)
        path, looped = source[1] if source else "", computation in bodies
        for dtype, dimensions in ARRAY.findall(shapes):
            shape = tuple(int(size) for size in dimensions.split(",") if size)
            arrays.append(Instruction(operation, dtype, shape, path, group_size(rest), looped))
    return arrays


def _counted(names: list[str]) -> list[str]:
    counts = collections.Counter(names)
    return [f"{count} x {name}" for name, count in sorted(counts.items())]


def kernels(text: str) -> list[str]:
    call = r"%([\w\-]+?)[.\d]* = .*custom_call_target=\"tpu_custom_call\""
    return _counted(re.findall(call, text))


def largest(arrays: list[Instruction], count: int) -> list[str]:
    kinds = {str(array): array for array in arrays}
    return [
        f"{array} {array.bytes / 2**30:.2f} GiB ({'/'.join(array.source.split('/')[-3:])})"
        for array in sorted(kinds.values(), key=lambda array: -array.bytes)[:count]
    ]


def square(arrays: list[Instruction], length: int) -> list[str]:
    return sorted({str(array) for array in arrays if array.shape.count(length) > 1})


def over(arrays: list[Instruction], sizes: set[int], lengths: set[int]) -> list[str]:
    shapes = {str(array): set(array.shape) for array in arrays}
    return sorted(name for name, of in shapes.items() if sizes & of and lengths & (of - sizes))


def copies(arrays: list[Instruction], elements: int) -> list[str]:
    """Count copies and transposes of arrays of at least so many elements, but of no matrices."""
    moved = [x for x in arrays if x.operation in ("copy", "copy-start", "transpose")]
    large = [x for x in moved if len(x.shape) > 2 and math.prod(x.shape) >= elements]
    return _counted(list(map(str, large)))


def collectives(
    arrays: list[Instruction],
    within: str = "",
    *,
    sizes: set[int] | None = None,
    looped: bool = False,
) -> list[str]:
    """Count collectives by shape, of sources with the word `within`, of arrays with one of `sizes`.

    `looped`: only the bodies of loops.
    """
    names = []
    for array in arrays:
        operation = array.operation.removesuffix("-start")
        named = not within or re.search(rf"\b{within}\b", array.source)
        sized = sizes is None or sizes & set(array.shape)
        if operation in COLLECTIVES and named and sized and array.looped >= looped:
            group = f" over {array.group}" if array.group else ""
            names.append(f"{array.label(operation)}{group}")
    return _counted(names)


def contents(layout: Layout, program: Program, text: str) -> dict[str, list[str]]:
    """Return what matters in the compiled text of a program, as lists of short lines."""
    arrays, config = instructions(text), layout.config
    sampling = program.name in SAMPLING
    mesh = layout.sampling_mesh if sampling else layout.mesh
    pieces = shards(mesh, "vocab", DECODING if sampling else TRAINING)
    vocab = {layout.decoder.vocab, layout.decoder.vocab // pieces}
    row = config.rows().row_tokens
    rows = config.packing.rows_per_microbatch // shards(layout.mesh, "batch")
    lists = {
        "largest": largest(arrays, 5),
        "T x T": square(arrays, row),
        "P x P": square(arrays, config.data.max_prompt_tokens),
        "V x T": over(arrays, vocab, {row, rows * row}),
        "kernels": kernels(text),
    }
    if not sampling:
        lists["head exchanges"] = collectives(arrays, "head")
        lists["vocabulary exchanges"] = collectives(arrays, sizes=vocab)
    if program.name in ("insert", "decode"):
        cache = jax.tree.leaves(program.alive["cache"].caches)[0]
        elements = math.prod(cache.sharding.shard_shape(cache.shape))
        lists["copies of a cache"] = copies(arrays, elements)
    if program.name in ("load", "decode"):
        lists["exchanges"] = collectives(arrays, looped=program.name == "decode")
    return lists
