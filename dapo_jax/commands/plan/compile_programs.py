"""Compiler for devices that this machine lacks, with a cache of results."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.commands.plan import hlo_text
from dapo_jax.commands.plan.chips import GIB
from dapo_jax.commands.plan.hlo_text import Times, Traffic
from dapo_jax.commands.plan.programs import Layout, Program
from dapo_jax.commands.plan.targets import compiler_options

RESERVED_GIB = 0.26  # of a TPU's memory, reserved by its compiler
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Messages of a TPU's compiler about all memory needed, or about temporaries only.
_ALL = re.compile(r"Used ([\d.]+)([KMGT]?) of")
_TEMPORARIES = re.compile(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds")
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Memory and traffic of a compiled program; bytes are per chip.

    Attributes:
        peak: peak of the program with arguments and results; None if it does not compile.
        needs: `peak`, or the memory that the compiler's error names.
        host: bytes of host memory.
        alive: bytes of all arrays that exist while it runs, by name.
        beside: bytes of those arrays that are not the program's arguments or results.
    """

    name: str
    peak: int | None
    needs: int
    host: int
    alive: dict[str, int]
    beside: int
    traffic: Traffic
    compile_seconds: float

    def fits(self, limit: int) -> bool:
        """Return True if the program and all other arrays fit in `limit` bytes."""
        return self.peak is not None and self.together <= limit

    @property
    def together(self) -> int:
        """Bytes of the program and all other arrays."""
        return self.needs + self.beside

    def parts(self) -> dict[str, int]:
        """Return the parts of `together`: arrays by name, and the program's temporary memory."""
        return self.alive | {"temporary": max(0, self.together - sum(self.alive.values()))}


def versions() -> str:
    """Return the versions of the compilers."""
    installed = ((name, importlib.metadata.distributions(name=name)) for name in COMPILERS)
    return ", ".join(
        f"{name} {copy.version}" for name, copies in installed for copy in [*copies][:1]
    )


def cache_folder() -> pathlib.Path:
    """Return the default folder of cached results."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "dapo_jax" / "plan"


class Compiler:
    """Compiler of a layout's programs.

    Args:
        folder: of cached results by program text; None: no cache.
        inspect: called with the name and the compiled text of a program that was not cached.
    """

    def __init__(
        self,
        layout: Layout,
        folder: pathlib.Path | None,
        inspect: Callable[[str, str], None] = lambda name, text: None,
    ):
        self._layout, self._folder, self._inspect = layout, folder, inspect
        topology = layout.topology
        self._key = f"{topology} {versions()} {hlo_text.VERSION}"
        self._options: dict[str, Any] | None = compiler_options(topology)
        if self._options is not None and topology.chip.platform == "cuda":
            # Higher levels time kernels, which needs a device.
            self._options["xla_gpu_autotune_level"] = 0

    def measure(self, program: Program) -> CompiledProgram:
        """Compile a program, or read its cached result."""
        started = time.perf_counter()
        facts = self._facts(program.lower(), program.name)
        alive, counted = {}, set()
        for name, tree in program.alive.items():
            leaves = [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in counted]
            counted |= set(map(id, leaves))
            alive[name] = self._size(leaves)
        known = facts["arguments"] + facts["results"]
        if facts["peak"] is None:
            known = 0 if facts["temporaries"] else facts["needs"]
        sent = {name: Times(**times) for name, times in facts["sent"].items()}
        return CompiledProgram(
            name=program.name,
            peak=facts["peak"],
            needs=facts["needs"],
            host=facts["host"],
            alive=alive,
            beside=max(0, sum(alive.values()) - known),
            traffic=Traffic(sent, Times(**facts["written"])),
            compile_seconds=time.perf_counter() - started,
        )

    def _size(self, leaves: list[Any]) -> int:
        """Return the bytes of arrays on a chip, with the compiler's padding."""
        if self._layout.topology.chip.platform != "tpu" or not leaves:  # nothing is padded
            shapes = (leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
            sizes = (leaf.dtype.itemsize for leaf in leaves)
            return sum(math.prod(s) * size for s, size in zip(shapes, sizes, strict=True))
        nothing = jax.jit(lambda arrays: jnp.zeros(()), keep_unused=True)
        return self._facts(nothing.lower(leaves), "")["arguments"]

    def _facts(self, lowered: jax.stages.Lowered, name: str) -> dict[str, Any]:
        text = f"{self._key}\n{name}\n{self._options}\n{lowered.as_text()}"
        path = None
        if self._folder is not None:
            path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
            if path.exists():
                return json.loads(path.read_text())
        facts = self._compile(lowered, name)
        if path is not None:
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(facts))
            temporary.replace(path)
        return facts

    def _compile(self, lowered: jax.stages.Lowered, name: str) -> dict[str, Any]:
        empty = {"arguments": 0, "results": 0, "host": 0, "sent": {}}
        empty |= {"written": dataclasses.asdict(Times())}
        try:
            done = lowered.compile(compiler_options=self._options)
        except jax.errors.JaxRuntimeError as error:
            return empty | {"peak": None} | missing_memory(error)
        memory: Any = done.memory_analysis()  # exists for every platform of a plan
        facts = empty | {
            "peak": memory.peak_memory_in_bytes,
            "needs": memory.peak_memory_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "host": memory.host_temp_size_in_bytes,
        }
        if not name:
            return facts
        text = done.as_text() or ""
        self._inspect(name, text)
        moved = hlo_text.read(text, self._layout.topology.chips)
        return facts | {
            "sent": {kind: dataclasses.asdict(times) for kind, times in moved.sent.items()},
            "written": dataclasses.asdict(moved.written),
        }


def missing_memory(error: RuntimeError) -> dict[str, Any]:
    """Return the memory that an out-of-memory error names. Raises any other error again."""
    text = str(error)
    match = _TEMPORARIES.search(text) or _ALL.search(text)
    if "RESOURCE_EXHAUSTED" not in text or not match:
        raise error
    return {
        "needs": int(float(match[1]) * _UNITS[match[2]]),
        "temporaries": match.re is _TEMPORARIES,
    }


def limit(layout: Layout) -> int:
    """Return the bytes of a chip that programs may use."""
    reserved = RESERVED_GIB if layout.topology.chip.platform == "tpu" else 0.0
    return int((layout.topology.chip.hbm_gib - reserved) * GIB)
