"""The programs of a run to compile, with shapes instead of arrays."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from dapo_jax.commands.plan.chips import Topology
from dapo_jax.commands.plan.published_shapes import read_shape
from dapo_jax.commands.plan.targets import target_devices
from dapo_jax.config.experiment import Config
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.learners import LearnerPrograms
from dapo_jax.model import decoder as decoders
from dapo_jax.model import param_paths
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.trainable import choose_trained, is_trained, join, without
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.engine_programs import EnginePrograms, Starts
from dapo_jax.run.compute import (
    check_divisible,
    check_rotations,
    numerics,
    open_engine,
    open_meshes,
)
from dapo_jax.run.teacher import abstract_teacher, has_teacher, open_programs
from dapo_jax.runtime import sharding
from dapo_jax.structs import SamplingRule

SAMPLING = ("load", "prefill", "insert", "decode")


class Program(NamedTuple):
    """A program of the run, and the trees of all arrays that exist while it runs."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    alive: dict[str, Any]


class _Ends:
    """Tokenizer of an engine that decodes nothing."""

    end_ids, pad_id = (0,), 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """Learners and engine of a run, on devices that may not exist.

    Attributes:
        sampling_mesh: the same as `mesh`, or separate devices.
        frozen: shapes of the parameters that are never trained.
        reference: shapes of the reference policy's parameters; None without one.
    """

    config: Config
    topology: Topology
    decoder: DecoderConfig
    mesh: jax.sharding.Mesh
    sampling_mesh: jax.sharding.Mesh
    learners: LearnerPrograms
    engine: PolicyEngine
    frozen: Any
    reference: Any


def _abstract(
    decoder: DecoderConfig, mesh: jax.sharding.Mesh, selected: Callable[[str], bool]
) -> Any:
    """Return shapes and shardings of the selected parameters in their forward dtype."""
    boxed = decoders.abstract_params(decoder)
    shardings = sharding.flatten(sharding.tree_shardings(mesh, boxed))
    flat = sharding.flatten(sharding.unbox(boxed))
    return unflatten_dict(
        {
            path: jax.ShapeDtypeStruct(
                leaf.shape, param_paths.forward_dtype(path, decoder), sharding=shardings[path]
            )
            for path, leaf in flat.items()
            if selected(path)
        },
        sep="/",
    )


def lay_out(config: Config, topology: Topology, devices: list | None = None) -> Layout:
    """Lay a config out for a topology. Raises `ConfigError`.

    Args:
        devices: the topology's devices; None: as its compiler describes them.
    """
    devices = target_devices(topology) if devices is None else devices
    rows = config.packing.rows_per_microbatch
    mesh, sampling_mesh = open_meshes(config.mesh, rows, devices=devices)
    numbers = numerics(config.compute, mesh, config.rows().row_tokens)
    decoder = read_shape(config.model.folder, **numbers)
    decoder = choose_trained(decoder, config.model.freeze_layers, config.lora)
    check_divisible(decoder, mesh)
    check_rotations(decoder, config.longest_tokens(), "model.folder", config.model.folder)
    frozen = {}
    if decoder.adapters or decoder.frozen_layers:
        frozen = _abstract(decoder, mesh, lambda path: not is_trained(path, decoder))
    teacher = abstract_teacher(config, decoder, mesh, read_shape) if has_teacher(config) else None
    reference = None
    if config.algorithm.reference:
        trained = _abstract(decoder, mesh, lambda path: is_trained(path, decoder))
        reference = join(frozen, trained)
    return Layout(
        config,
        topology,
        decoder,
        mesh,
        sampling_mesh,
        learners=open_programs(config, decoder, mesh, frozen, teacher),
        engine=open_engine(config, decoder, mesh, sampling_mesh, _Ends(), frozen),
        frozen=frozen,
        reference=reference,
    )


def _batch(layout: Layout, microbatches: int) -> TrainBatch:
    """Return the shapes of one update's rows [M, R, T]."""
    config, algorithm = layout.config, layout.config.algorithm
    packing = config.rows()
    shape = (microbatches, packing.rows_per_microbatch, packing.row_tokens)
    whole: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    real: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    old = algorithm.scores_old_policy(config.rollout.updates_per_rollout)
    critic = real if algorithm.critic else None
    scored = ScoredBatch(
        PackedRows(whole, whole, whole, whole, real),
        real if old or algorithm.old_logprobs == "sampler" else None,
        real if algorithm.reference else None,
        critic,
        real if layout.learners.teacher else None,
    )
    correct = real if algorithm.positive_nll_coefficient else None
    return TrainBatch(scored, real, real, correct, critic, critic)


def _resident(layout: Layout) -> dict[str, Any]:
    """Return the shapes of the arrays that stay on the learning chips."""
    learners = layout.learners
    state = learners.policy.abstract_state
    held = {"parameters": state.params, "optimizer": state.opt_state, "frozen": layout.frozen}
    if layout.reference is not None:
        held["reference"] = without(layout.reference, layout.frozen)
    if learners.teacher_params is not None:
        held["teacher"] = learners.teacher_params
    if learners.critic:
        held["critic"] = learners.critic.abstract_state.params
        held["critic's optimizer"] = learners.critic.abstract_state.opt_state
    if layout.config.rollout.lag:
        held["policy before the update"] = jax.tree.map(copy.copy, state.params)
    return {name: tree for name, tree in held.items() if jax.tree.leaves(tree)}


def training_programs(layout: Layout, microbatches: int) -> Iterator[Program]:
    """Yield the updates and score passes of policy, reference, teacher and critic."""
    learners, alive = layout.learners, _resident(layout)
    policy, critic, teacher = learners.policy, learners.critic, learners.teacher
    batch = _batch(layout, microbatches)
    rollouts = batch.scored.rollouts
    yield Program("update", lambda: policy.lower("update", batch), alive)
    if layout.config.algorithm.scores_old_policy(layout.config.rollout.updates_per_rollout):
        yield Program("score", lambda: policy.lower("score", rollouts), alive)
    if layout.reference is not None:
        lower = functools.partial(policy.lower, "score", rollouts, layout.reference)
        yield Program("reference score", lower, alive)
    if teacher:
        lower = functools.partial(teacher.lower, "score", rollouts, learners.teacher_params)
        yield Program("teacher score", lower, alive)
    if critic:
        yield Program("critic score", lambda: critic.lower("score", rollouts), alive)
        yield Program("critic update", lambda: critic.lower("update", batch), alive)


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings,
    )


def _empty_state(layout: Layout) -> Any:
    """Return shapes and shardings of a decode state with caches of full length."""
    engine = layout.engine
    programs = cast(EnginePrograms, engine.programs)
    window = engine.layout.window(engine.cache_tokens)
    empty = jax.eval_shape(functools.partial(programs.empty, window=window))
    return _placed(empty, programs.state_shardings)


def sampling_programs(layout: Layout) -> Iterator[Program]:
    """Yield the engine's programs; the trainer's state stays on the chips meanwhile."""
    engine, trained = layout.engine, layout.learners.policy.abstract_state.params
    compiled = cast(EnginePrograms, engine.programs)
    held = compiled.weights.load_frozen.abstract(layout.frozen) if layout.frozen else {}
    weights = held | compiled.weights.load_trained.abstract(trained)
    params = decoders.for_decoding(weights, engine.config)
    shared = layout.sampling_mesh is layout.mesh
    loading = _resident(layout) | ({"decoding weights": params} if shared else {})
    yield Program("load", lambda: compiled.weights.load_trained.lower(trained), loading)
    alive = (_resident(layout) if shared else {}) | {"decoding weights": params}
    state = _empty_state(layout)
    prompts = {"prompts": engine.prefill_width, "time": layout.config.data.max_prompt_tokens}
    tokens = jax.ShapeDtypeStruct(tuple(prompts.values()), jnp.int32)
    lengths = jax.ShapeDtypeStruct(tokens.shape[:1], jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), engine.prefill_width))
    prefill = params, tokens, lengths, keys, lengths
    prefix = jax.eval_shape(compiled.prefill, *prefill)
    places = jax.tree.map(lambda _: compiled.prefix_sharding, prefix.caches)
    prefix = prefix.replace(caches=_placed(prefix.caches, places))
    alive = alive | {"cache": state, "prompts": prefix}
    yield Program("prefill", lambda: compiled.prefill.lower(*prefill), alive)
    pages, width = engine.pages, engine.max_insert_width
    ints = jax.ShapeDtypeStruct((width,), jnp.int32)
    fills = pages.fills([], [], width=width, **prompts) if pages else None
    insert = prefix, state, Starts(ints, ints, ints, fills)
    yield Program("insert", lambda: compiled.insert.lower(*insert), alive)
    columns = engine.layout.columns(engine.cache_tokens)
    options = {"rule": SamplingRule(), "columns": columns}
    generate = functools.partial(compiled.generate.lower, **options)
    yield Program("decode", lambda: generate(params, state), alive)


def programs(layout: Layout, microbatches: int) -> Iterator[Program]:
    """Yield the programs of a run in the order of a step."""
    yield from sampling_programs(layout)
    yield from training_programs(layout, microbatches)
