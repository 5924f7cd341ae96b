"""The programs of a run, with shapes instead of arrays, compiled for a topology."""

import copy
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan.chips import Topology, compiler_options, target_devices
from dapo_jax.extras.plan.published_shapes import read_shape
from dapo_jax.learner.batches import REFERENCE, TEACHER, PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.update import Learner, LearnerPrograms, Model
from dapo_jax.model import decoder as decoders
from dapo_jax.model import param_paths
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.trainable import choose_trained, is_trained, without
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.engine_programs import Starts
from dapo_jax.run import build
from dapo_jax.runtime import sharding
from dapo_jax.runtime.registry import feature
from dapo_jax.types.structs import SamplingRule

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Messages of a TPU's compiler about all memory needed, or about temporaries only.
_ALL = re.compile(r"Used ([\d.]+)([KMGT]?) of")
_TEMPORARIES = re.compile(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds")
PACKAGES = "dapo_jax jax jaxlib jax-cuda12-plugin jax-cuda13-plugin libtpu flax optax".split()
SAMPLING = ("load", "prefill", "insert", "decode")


class Program(NamedTuple):
    """A program of the run, and the trees of all arrays that exist while it runs."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    alive: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Learners and engine of a run, on devices that may not exist."""

    config: Config
    topology: Topology
    decoder: DecoderConfig
    mesh: jax.sharding.Mesh
    sampling_mesh: jax.sharding.Mesh  # the same as `mesh`, or separate devices
    learners: LearnerPrograms
    engine: PolicyEngine
    frozen: Any  # shapes of parameters


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings,
    )


def _abstract(decoder: DecoderConfig, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Return shapes and shardings of all parameters in their forward dtype, by path."""
    boxed = decoders.abstract_params(decoder)
    placed = _placed(sharding.unbox(boxed), sharding.tree_shardings(mesh, boxed))
    return {
        path: leaf.update(dtype=param_paths.forward_dtype(path, decoder))
        for path, leaf in sharding.flatten(placed).items()
    }


def lay_out(config: Config, topology: Topology, devices: list | None = None) -> Layout:
    """Lay a config out for a topology, or given devices of one. Raises `ConfigError`."""
    devices = target_devices(topology) if devices is None else devices
    rows = config.packing.rows_per_microbatch
    mesh, sampling_mesh = build.open_meshes(config.mesh, rows, devices=devices)
    numbers = build.numerics(config.compute, mesh, config.rows().row_tokens)
    decoder = read_shape(config.model.folder, **numbers)
    decoder = choose_trained(decoder, config.model.freeze_layers, config.lora)
    build.check_divisible(decoder, mesh)
    flat = _abstract(decoder, mesh)
    untrained = {path: leaf for path, leaf in flat.items() if not is_trained(path, decoder)}
    frozen = unflatten_dict(untrained, sep="/")
    others = {}
    if config.algorithm.distils:
        teacher = feature("teacher").read_shape(config, decoder, mesh, read_shape)
        teacher = dataclasses.replace(teacher, vocab=decoder.vocab)
        others[TEACHER] = Model(teacher, unflatten_dict(_abstract(teacher, mesh), sep="/"))
    if config.algorithm.reference:
        others[REFERENCE] = Model(decoder, unflatten_dict(flat, sep="/"))
    learners = build.open_learners(config, decoder, mesh, frozen, others)
    engine = build.open_engine(config, decoder, mesh, sampling_mesh, (1,), frozen)
    return Layout(config, topology, decoder, mesh, sampling_mesh, learners, engine, frozen)


def _batch(layout: Layout, microbatches: int, scores_old: bool) -> TrainBatch:
    """Return the shapes of one update's rows [M, R, T]."""
    algorithm, packing = layout.config.algorithm, layout.config.rows()
    shape = (microbatches, packing.rows_per_microbatch, packing.row_tokens)
    whole: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    real: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    critic = real if algorithm.critic else None
    scored = ScoredBatch(
        PackedRows(whole, whole, whole, whole, real),
        real if scores_old or algorithm.old_logprobs == "sampler" else None,
        {name: real for name, model in layout.learners.scorers.items() if model.learner},
    )
    correct = real if algorithm.positive_nll_coefficient else None
    return TrainBatch(scored, real, real, correct, critic, critic)


def _resident(layout: Layout) -> dict[str, Any]:
    """Return the shapes of the arrays that stay on the learning chips."""
    learners = layout.learners
    state = learners.policy.abstract_state
    held = {"parameters": state.params, "optimizer": state.opt_state, "frozen": layout.frozen}
    for name, model in learners.scorers.items():
        if model.params is not None:
            held[name] = without(model.params, layout.frozen if name == REFERENCE else {})
        elif model.learner:
            trained = model.learner.abstract_state
            held |= {name: trained.params, f"{name}'s optimizer": trained.opt_state}
    if layout.config.rollout.staleness:
        held["policy before the update"] = jax.tree.map(copy.copy, state.params)
    return {name: tree for name, tree in held.items() if jax.tree.leaves(tree)}


def training_programs(layout: Layout, microbatches: int) -> Iterator[Program]:
    """Yield the updates and score passes of policy, reference, teacher and critic."""
    learners, alive = layout.learners, _resident(layout)
    policy = learners.policy
    updates = layout.config.rollout.updates_per_rollout
    scores_old = bool(layout.config.algorithm.scored_minibatches(updates))
    batch = _batch(layout, microbatches, scores_old)
    rollouts = batch.scored.rollouts
    yield Program("update", lambda: policy.lower("update", batch), alive)
    if scores_old:
        yield Program("score", lambda: policy.lower("score", rollouts), alive)
    for name, model in learners.scorers.items():
        if not model.learner:
            continue
        lower = functools.partial(model.learner.lower, "score", rollouts, model.params)
        yield Program(f"{name} score", lower, alive)
        if model.params is None and isinstance(model.learner, Learner):
            lower = functools.partial(model.learner.lower, "update", batch)
            yield Program(f"{name} update", lower, alive)


def sampling_programs(layout: Layout) -> Iterator[Program]:
    """Yield the engine's programs; the trainer's state stays on the chips meanwhile."""
    engine, trained = layout.engine, layout.learners.policy.abstract_state.params
    compiled, resident = engine.programs, _resident(layout)
    weights = compiled.weights
    held = weights.load_frozen.abstract(layout.frozen) if layout.frozen else {}
    held = held | weights.load_trained.abstract(trained)
    params = decoders.for_decoding(held, engine.config)
    shared = layout.sampling_mesh is layout.mesh
    loading = resident | ({"decoding weights": params} if shared else {})
    yield Program("load", lambda: weights.load_trained.lower(trained), loading)
    window = engine.layout.window(engine.cache_tokens)  # caches of full length
    empty = jax.eval_shape(functools.partial(compiled.empty, window=window))
    state = _placed(empty, compiled.state_shardings.replace(rules=None))
    prompts = {"prompts": engine.prefill_width, "time": layout.config.data.max_prompt_tokens}
    tokens = jax.ShapeDtypeStruct(tuple(prompts.values()), jnp.int32)
    lengths = jax.ShapeDtypeStruct(tokens.shape[:1], jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), engine.prefill_width))
    prefill = params, tokens, lengths, keys, lengths
    prefix = jax.eval_shape(compiled.prefill, *prefill)
    prefix = prefix.replace(caches=_placed(prefix.caches, compiled.prompt_shardings))
    alive = {"decoding weights": params, "cache": state, "prompts": prefix}
    alive = (resident if shared else {}) | alive
    yield Program("prefill", lambda: compiled.prefill.lower(*prefill), alive)
    pages, width = engine.pages, engine.max_insert_width
    ints = jax.ShapeDtypeStruct((width,), jnp.int32)
    fills = pages.fills([], [], width=width, **prompts) if pages else None
    starts = Starts(ints, ints, ints, fills)
    yield Program("insert", lambda: compiled.insert.lower(prefix, state, starts), alive)
    rule = {"rule": SamplingRule(), "columns": engine.layout.columns(engine.cache_tokens)}
    yield Program("decode", lambda: compiled.generate.lower(params, state, **rule), alive)


def programs(layout: Layout, microbatches: int) -> Iterator[Program]:
    """Yield the programs of a run in the order of a step."""
    yield from sampling_programs(layout)
    yield from training_programs(layout, microbatches)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """Memory of a compiled program; bytes are per chip."""

    name: str
    peak: int | None  # with arguments and results; None if it does not compile
    needs: int  # `peak`, or the memory that the compiler's error names
    host: int
    alive: dict[str, int]  # all arrays that exist while it runs, by name
    beside: int  # those of them that are not the program's arguments or results
    compile_seconds: float

    def fits(self, limit: int) -> bool:
        return self.peak is not None and self.together <= limit

    @property
    def together(self) -> int:
        """Bytes of the program and all other arrays."""
        return self.needs + self.beside

    def record(self, limit: int) -> dict[str, Any]:
        """Return the figures; parts are arrays by name, and the program's temporary memory."""
        temporary = max(0, self.together - sum(self.alive.values()))
        return {
            "fits": self.fits(limit),
            "peak_bytes": self.peak,
            "together_bytes": self.together,
            "host_bytes": self.host,
            "parts": self.alive | {"temporary": temporary},
        }


def versions(names: Iterable[str] = ("jax", "jaxlib", "libtpu")) -> str:
    """Return the versions of those packages that are installed."""
    installed = ((name, [*importlib.metadata.distributions(name=name)]) for name in names)
    return ", ".join(f"{name} {copies[0].version}" for name, copies in installed if copies)


class Compiler:
    """Compiler of a layout's programs, with a cache of results in `folder`, if there is one."""

    def __init__(self, layout: Layout, folder: pathlib.Path | None):
        self._layout, self._folder = layout, folder
        self._options = compiler_options(layout.topology)

    def measure(self, program: Program) -> CompiledProgram:
        """Compile a program, or read its cached result."""
        started = time.perf_counter()
        facts = self._facts(program.lower())
        alive, counted = {}, set()
        for name, tree in program.alive.items():
            leaves = [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in counted]
            counted |= set(map(id, leaves))
            alive[name] = self._size(leaves)
        return CompiledProgram(
            name=program.name,
            peak=facts["peak"],
            needs=facts["needs"],
            host=facts["host"],
            alive=alive,
            beside=max(0, sum(alive.values()) - facts["known"]),
            compile_seconds=time.perf_counter() - started,
        )

    def _size(self, leaves: list[Any]) -> int:
        """Return the bytes of arrays on a chip, with the compiler's padding."""
        if self._layout.topology.chip.platform != "tpu" or not leaves:  # nothing is padded
            shapes = (leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
            sizes = (leaf.dtype.itemsize for leaf in leaves)
            return sum(math.prod(s) * size for s, size in zip(shapes, sizes, strict=True))
        nothing = jax.jit(lambda arrays: jnp.zeros(()), keep_unused=True)
        return self._facts(nothing.lower(leaves))["arguments"]

    def _facts(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        """Return the cached result of `_compile`; compile on a miss."""
        if self._folder is None:
            return self._compile(lowered)
        text = f"{self._layout.topology} {versions()}\n{self._options}\n{lowered.as_text()}"
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        if path.exists():
            return json.loads(path.read_text())
        facts = self._compile(lowered)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(facts))
        temporary.replace(path)
        return facts

    def compiled(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Return a program, compiled with the options of a run."""
        return lowered.compile(compiler_options=self._options)

    def _compile(self, lowered: jax.stages.Lowered) -> dict[str, Any]:
        try:
            memory: Any = self.compiled(lowered).memory_analysis()  # every platform has it
        except jax.errors.JaxRuntimeError as error:
            missing = missing_memory(error)
            return {"peak": None, "host": 0, "arguments": missing["needs"]} | missing
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return {
            "peak": memory.peak_memory_in_bytes,
            "needs": memory.peak_memory_in_bytes,
            "arguments": memory.argument_size_in_bytes,
            "known": memory.argument_size_in_bytes + results,
            "host": memory.host_temp_size_in_bytes,
        }


def missing_memory(error: RuntimeError) -> dict[str, Any]:
    """Return the memory that an out-of-memory error names, and the part known as the program's."""
    text = str(error)
    match = _TEMPORARIES.search(text) or _ALL.search(text)
    if "RESOURCE_EXHAUSTED" not in text or not match:
        raise error
    needs = int(float(match[1]) * _UNITS[match[2]])
    return {"needs": needs, "known": 0 if match.re is _TEMPORARIES else needs}
