"""Compiler for devices that are not here, with a cache of results."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.commands.plan import hlo_text
from dapo_jax.commands.plan import hlo_traffic as traffic
from dapo_jax.commands.plan.chips import GIB
from dapo_jax.commands.plan.hlo_traffic import Times, Traffic
from dapo_jax.commands.plan.programs import Layout, Program, cache_elements
from dapo_jax.commands.plan.run_flags import compiler_options
from dapo_jax.runtime.sharding import DECODING, TRAINING, shards

RESERVED_GIB = 0.26  # of a TPU's memory, kept by the compiler for itself
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# What a TPU's compiler says that it would take: all, or what it adds to arguments and results.
_ALL = re.compile(r"Used ([\d.]+)([KMGT]?) of")
_TEMPORARIES = re.compile(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds")
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Memory, traffic and contents of a compiled program; bytes are of one chip.

    Attributes:
        peak: what the program takes at its worst, arguments and results among it; None where the
            compiler gave up.
        needs: the same where the compiler gave up, as far as it says; else `peak`.
        alive: what exists while it runs, by part.
        beside: of that, what the program itself does not know of.
        contents: of its text, as lists of short lines.
    """

    name: str
    peak: int | None
    needs: int
    host: int
    alive: dict[str, int]
    beside: int
    traffic: Traffic
    contents: dict[str, list[str]]
    compile_seconds: float

    def fits(self, limit: int) -> bool:
        """True where the program fits beside what stays, in `limit` bytes of a chip."""
        return self.peak is not None and self.together <= limit

    @property
    def together(self) -> int:
        """Bytes of the program with all that is there meanwhile."""
        return self.needs + self.beside

    def parts(self) -> dict[str, int]:
        """Parts of `together`: what is there by name, and what the program adds of its own."""
        return self.alive | {"temporary": max(0, self.together - sum(self.alive.values()))}


def versions() -> str:
    """Versions of the compilers."""
    installed = ((name, importlib.metadata.distributions(name=name)) for name in COMPILERS)
    return ", ".join(
        f"{name} {copy.version}" for name, copies in installed for copy in [*copies][:1]
    )


def cache_folder() -> pathlib.Path:
    """Default folder of results: in `$XDG_CACHE_HOME`, or `.cache` of the home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "dapo_jax" / "plan"


class Compiler:
    """Compiles programs, or reads the result where the same text was compiled before.

    Args:
        folder: of the results; None: nothing is kept.
    """

    def __init__(self, layout: Layout, folder: pathlib.Path | None):
        self._layout, self._folder = layout, folder
        topology = layout.topology
        self._key = f"{topology} {versions()} {traffic.VERSION}"
        self._options: dict[str, Any] | None = compiler_options(topology)
        if self._options is not None and topology.chip.platform == "cuda":
            # Without a device nothing can be tried out; other levels would.
            self._options["xla_gpu_autotune_level"] = 0

    def measure(self, program: Program) -> CompiledProgram:
        """Compiled program, from the cache where it was compiled before."""
        started = time.perf_counter()
        facts = self._facts(program.lower(), program.name)
        alive, shared = {}, set()
        for name, tree in program.alive.items():
            leaves = [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in shared]
            shared |= set(map(id, leaves))
            alive[name] = self._size(leaves)
        beside = max(0, sum(alive.values()) - facts["arguments"] - facts["results"])
        if facts["peak"] is None:
            beside = sum(alive.values()) - (0 if facts["temporaries"] else facts["needs"])
            beside = max(0, beside)
        sent = {name: Times(**times) for name, times in facts["sent"].items()}
        return CompiledProgram(
            program.name,
            facts["peak"],
            facts["needs"],
            facts["host"],
            alive,
            beside,
            Traffic(sent, Times(**facts["written"])),
            facts["contents"],
            time.perf_counter() - started,
        )

    def _size(self, leaves: list[Any]) -> int:
        """Bytes on a chip of arrays of these shapes, places and layouts, as padded there."""
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
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(facts))
            temporary.replace(path)
        return facts

    def _compile(self, lowered: jax.stages.Lowered, name: str) -> dict[str, Any]:
        empty = {"arguments": 0, "results": 0, "host": 0, "contents": {}, "sent": {}}
        empty |= {"written": dataclasses.asdict(Times())}
        try:
            done = lowered.compile(compiler_options=self._options)
        except jax.errors.JaxRuntimeError as error:
            return empty | {"peak": None} | _missing(error)
        memory: Any = done.memory_analysis()  # every compiler that a plan asks has one
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
        moved = traffic.read(text, self._layout.topology.chips)
        return facts | {
            "contents": contents(self._layout, name, text),
            "sent": {kind: dataclasses.asdict(times) for kind, times in moved.sent.items()},
            "written": dataclasses.asdict(moved.written),
        }


def _missing(error: RuntimeError) -> dict[str, Any]:
    """Memory that a program which does not fit would take; raises an error about anything else."""
    text = str(error)
    match = _TEMPORARIES.search(text) or _ALL.search(text)
    if "RESOURCE_EXHAUSTED" not in text or not match:
        raise error
    return {
        "needs": int(float(match[1]) * _UNITS[match[2]]),
        "temporaries": match.re is _TEMPORARIES,
    }


def contents(layout: Layout, name: str, text: str, count: int = 5) -> dict[str, list[str]]:
    """Contents of a compiled text, as lists of short lines.

    Args:
        count: how many of the largest arrays.
    """
    made, config, decoder = hlo_text.instructions(text), layout.config, layout.decoder
    sampling = name in ("load", "prefill", "insert", "decode")
    mesh = layout.sampling_mesh if sampling else layout.mesh
    column = DECODING if sampling else TRAINING
    row, prompt = config.rows().row_tokens, config.data.max_prompt_tokens
    vocab = {decoder.vocab, decoder.vocab // shards(mesh, "vocab", column)}
    rows = config.packing.rows_per_microbatch // shards(layout.mesh, "batch")
    lists = {
        "largest": hlo_text.largest(made, count),
        "T x T": hlo_text.square(made, row),
        "P x P": hlo_text.square(made, prompt),
        "V x T": hlo_text.over(made, vocab, {row, rows * row}),
        "kernels": hlo_text.kernels(text),
    }
    if not sampling:
        return lists | {
            "head exchanges": hlo_text.collectives(made, "head"),
            "vocabulary exchanges": hlo_text.collectives(made, sizes=vocab),
        }
    if name in ("insert", "decode"):
        lists["copies of a cache"] = hlo_text.copies(made, cache_elements(layout))
    if name in ("load", "decode"):
        lists["exchanges"] = hlo_text.collectives(made, looped=name == "decode")
    return lists


def limit(layout: Layout) -> int:
    """Bytes of a chip that programs may use."""
    reserved = RESERVED_GIB if layout.topology.chip.platform == "tpu" else 0.0
    return int((layout.topology.chip.hbm_gib - reserved) * GIB)
