"""Programs of a run to compile, as they are, with shapes in place of arrays."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from dapo_jax.algorithms import Algorithm
from dapo_jax.commands.plan.chips import Topology
from dapo_jax.commands.plan.published_shapes import read_shape
from dapo_jax.commands.plan.targets import target_devices
from dapo_jax.config.experiment import Config
from dapo_jax.learner.batches import PackedRows, ScoredBatch, TrainBatch
from dapo_jax.learner.update import Learner
from dapo_jax.model import decoder as decoders
from dapo_jax.model import param_paths
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.trainable import choose_trained, is_trained, join, without
from dapo_jax.rollout.decode_step import Starts
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.engine_programs import EnginePrograms
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

TRAINING = (
    "update",
    "score",
    "reference score",
    "teacher score",
    "critic score",
    "critic update",
)
SAMPLING = ("load", "prefill", "insert", "decode")


class Program(NamedTuple):
    """Program of the run.

    Attributes:
        alive: what exists in a chip's memory while it runs, its arguments and results among it.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    alive: dict[str, Any]  # trees of shapes


class _Ends:
    """Tokenizer of an engine that decodes nothing."""

    end_ids, pad_id = (0,), 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """LearnerPrograms and engine of a run, on devices that are not here.

    Attributes:
        mesh: that learns; `sampling_mesh`: that samples, which may be the same.
        frozen: shapes of parameters that are never trained.
        reference: of the reference policy's parameters; None where the algorithm has none.
        teacher: scores with `teacher_params`, shapes too; None where nothing is distilled so.
    """

    config: Config
    topology: Topology
    decoder: DecoderConfig
    mesh: jax.sharding.Mesh
    sampling_mesh: jax.sharding.Mesh
    learner: Learner
    critic: Learner | None
    engine: PolicyEngine
    frozen: Any
    reference: Any
    teacher: Learner | None
    teacher_params: Any


def _abstract(
    decoder: DecoderConfig, mesh: jax.sharding.Mesh, wanted: Callable[[str], bool]
) -> Any:
    """Shapes and places of parameters in their forward dtype."""
    boxed = decoders.abstract_params(decoder)
    places = sharding.flatten(sharding.tree_shardings(mesh, boxed))
    flat = sharding.flatten(sharding.unbox(boxed))
    return unflatten_dict(
        {
            path: jax.ShapeDtypeStruct(
                leaf.shape, param_paths.forward_dtype(path, decoder), sharding=places[path]
            )
            for path, leaf in flat.items()
            if wanted(path)
        },
        sep="/",
    )


def lay_out(config: Config, topology: Topology, devices: list | None = None) -> Layout:
    """Lays a config out for a topology. Raises `ConfigError`.

    Args:
        devices: of that topology; None: as its compiler describes them.
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
    learners = open_programs(config, decoder, mesh, frozen, teacher)
    reference = None
    if config.algorithm.reference:
        own = _abstract(decoder, mesh, lambda path: is_trained(path, decoder))
        reference = join(frozen, own)
    engine = open_engine(config, decoder, mesh, sampling_mesh, _Ends(), frozen)
    parts = mesh, sampling_mesh, learners.policy, learners.critic, engine
    of_teacher = learners.teacher, learners.teacher_params
    return Layout(config, topology, decoder, *parts, frozen, reference, *of_teacher)


def scores_first(config: Config) -> bool:
    """True where the policy is scored before it is updated."""
    algorithm = config.algorithm
    recomputed = config.rollout.updates_per_rollout > 1 or algorithm.kl == "reward"
    recomputed |= algorithm.trained_responses == "pairs" or algorithm.distillation == "reverse"
    return recomputed and algorithm.old_logprobs != "sampler"


def _batch(layout: Layout, microbatches: int) -> TrainBatch:
    """Shapes of one update's rows [M, R, T]."""
    algorithm: Algorithm = layout.config.algorithm
    packing = layout.config.rows()
    shape = (microbatches, packing.rows_per_microbatch, packing.row_tokens)
    # Shapes, where a run has arrays.
    whole: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
    real: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    rollouts = PackedRows(whole, whole, whole, whole, real)
    old = algorithm.old_logprobs == "sampler" or scores_first(layout.config)
    critic = real if algorithm.critic else None
    scored = ScoredBatch(
        rollouts,
        real if old else None,
        real if algorithm.reference else None,
        critic,
        real if layout.teacher else None,
    )
    right = real if algorithm.positive_nll_coefficient else None
    return TrainBatch(scored, real, real, right, critic, critic)


def _resident(layout: Layout) -> dict[str, Any]:
    """Shapes that a chip which learns always holds."""
    state = layout.learner.abstract_state
    held = {"parameters": state.params, "optimizer": state.opt_state, "frozen": layout.frozen}
    if layout.reference is not None:
        held["reference"] = without(layout.reference, layout.frozen)
    if layout.teacher_params is not None:
        held["teacher"] = layout.teacher_params
    if layout.critic:
        held["critic"] = layout.critic.abstract_state.params
        held["critic's optimizer"] = layout.critic.abstract_state.opt_state
    if layout.config.rollout.lag:
        held["policy before the update"] = jax.tree.map(copy.copy, state.params)
    return {name: tree for name, tree in held.items() if jax.tree.leaves(tree)}


def training_programs(layout: Layout, microbatches: int) -> Iterator[Program]:
    """Score passes and updates of policy, reference and critic."""
    learner, critic, alive = layout.learner, layout.critic, _resident(layout)
    batch = _batch(layout, microbatches)
    rollouts = batch.scored.rollouts
    yield Program("update", lambda: learner.lower("update", batch), alive)
    if scores_first(layout.config):
        yield Program("score", lambda: learner.lower("score", rollouts), alive)
    if layout.reference is not None:
        lower = functools.partial(learner.lower, "score", rollouts, layout.reference)
        yield Program("reference score", lower, alive)
    if layout.teacher:
        lower = functools.partial(layout.teacher.lower, "score", rollouts, layout.teacher_params)
        yield Program("teacher score", lower, alive)
    if critic:
        yield Program("critic score", lambda: critic.lower("score", rollouts), alive)
        yield Program("critic update", lambda: critic.lower("update", batch), alive)


def _placed(shapes: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        places,
    )


def _empty_state(layout: Layout) -> Any:
    """Shapes and places of a decode state, its caches as long as they get."""
    engine = layout.engine
    programs = cast(EnginePrograms, engine.programs)
    window = engine.layout.window(engine.cache_tokens)
    empty = jax.eval_shape(functools.partial(programs.empty, window=window))
    return _placed(empty, programs.state_shardings)


def cache_elements(layout: Layout) -> int:
    """Numbers in one array of a layer's cache, on one chip."""
    leaf = jax.tree.leaves(_empty_state(layout).caches)[0]
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def sampling_programs(layout: Layout) -> Iterator[Program]:
    """Programs of the engine, beside which the trainer's state waits."""
    engine, trained = layout.engine, layout.learner.abstract_state.params
    compiled = cast(EnginePrograms, engine.programs)
    held = compiled.weights.load_frozen.abstract(layout.frozen) if layout.frozen else {}
    weights = held | compiled.weights.load_trained.abstract(trained)
    params = decoders.for_decoding(weights, engine.config)
    together = layout.sampling_mesh is layout.mesh
    alive = _resident(layout) if together else {}
    yield Program(
        "load",
        lambda: compiled.weights.load_trained.lower(trained),
        _resident(layout) | ({"decoding weights": params} if together else {}),
    )
    alive = alive | {"decoding weights": params}
    state = _empty_state(layout)
    limit = layout.config.data.max_prompt_tokens
    prompts = {"prompts": engine.prefill_width, "time": limit}
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
    """Programs of a run in the order of a step."""
    yield from sampling_programs(layout)
    yield from training_programs(layout, microbatches)
