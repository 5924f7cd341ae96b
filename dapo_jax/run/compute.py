"""Meshes, learners and engine of a run, from its config and its policy's shape; no weights.

`run/components.py` adds weights and data; `plan` compiles the programs for other devices.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import Compute, Config, Mesh, OneMesh
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.learner.batches import CRITIC, REFERENCE, TEACHER
from dapo_jax.learner.critic import critic_learner, scalar_config
from dapo_jax.learner.learners import LearnerPrograms, Model, TokenScorer
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.model import cudnn_attention, training_attention
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.rollout.engine import PolicyEngine
from dapo_jax.rollout.scheduler import Scheduler
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.runtime.sampler_devices import open_sampling_mesh, split_devices
from dapo_jax.runtime.sharding import AXES, DECODING, TRAINING, make_mesh, shards
from dapo_jax.types.contracts import Sampler
from dapo_jax.types.errors import require

HOST = "pinned_host"  # the kind of memory that layer inputs can be offloaded to
# Fields of the decoder that are also names of logical axes.
SHARDED_SIZES = ("embed", "heads", "kv_heads", "mlp", "vocab", "experts")


def mesh_sizes(settings: OneMesh) -> dict[str, int]:
    """Return the axis sizes of a config's mesh, as keywords of `make_mesh` and `mesh_shape`."""
    return {axis: getattr(settings, axis) for axis in AXES}


def open_mesh(
    settings: OneMesh, rows_per_microbatch: int, devices: Sequence | None = None
) -> jax.sharding.Mesh:
    """Return the learning mesh of all or the given devices. Raises `ConfigError`."""
    mesh = make_mesh(**mesh_sizes(settings), devices=devices)
    pieces = shards(mesh, "batch")
    allowed = (
        f"a multiple of data x fsdp x expert x decode_tensor = {pieces}, or take the config's "
        f"variant for {mesh.size} devices if it has one"
    )
    fits = rows_per_microbatch % pieces == 0
    require(fits, "packing.rows_per_microbatch", rows_per_microbatch, allowed)
    return mesh


def open_meshes(
    settings: Mesh,
    rows_per_microbatch: int,
    training: bool = True,
    devices: Sequence | None = None,
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
    """Return the learning mesh and the sampling mesh.

    They are the same mesh without `sampler_share`, and if nothing is trained.
    """
    share = settings.sampler_share if training else 0
    block = settings.expert * settings.decode_tensor * settings.tensor
    learning, sampling = split_devices(devices or jax.devices(), share, block)
    mesh = open_mesh(settings, rows_per_microbatch, learning)
    if sampling is learning:
        return mesh, mesh
    return mesh, open_sampling_mesh(mesh, learning, sampling, share)


def numerics(
    compute: Compute, mesh: jax.sharding.Mesh, row_tokens: int | None = None
) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that the run chooses, not the model folder."""
    device = mesh.devices.flat[0]
    name, context = compute.attention, shards(mesh, "sequence")
    platform = device.platform
    shape = row_tokens or 1, compute.dtype, context
    chosen = training_attention.choose(name, device, *shape)
    fits = chosen != "splash" or platform == "tpu"
    require(fits, "compute.attention", name, f"'auto', 'plain' or 'blocked' on {platform}")
    if chosen == "cudnn":
        missing = cudnn_attention.missing(device, *shape)
        require(not missing, "compute.attention", name, f"'auto' or 'blocked' without {missing}")
    reasons, unit = [], 1
    if chosen == "splash":
        reasons.append(f"compute.attention = {name!r} on TPU")
        unit = training_attention.LANES
    if context > 1:
        reasons.append(f"mesh.context = {context}, each with two pieces of a row")
        unit *= training_attention.PIECES * context
    fits = row_tokens is None or row_tokens % unit == 0
    allowed = f"a multiple of {unit} with {' and '.join(reasons)}"
    require(fits, "packing.row_tokens", row_tokens, allowed)
    fits = compute.remat != "offload" or any(m.kind == HOST for m in device.addressable_memories())
    allowed = f"another one on {platform}, which has no {HOST} memory"
    require(fits, "compute.remat", compute.remat, allowed)
    return {
        "dtype": jnp.dtype(compute.dtype),
        "remat": compute.remat,
        "scan_unroll": compute.scan_unroll,
        "attention": chosen,
    }


def attention_notice(
    compute: Compute, row_tokens: int, decoder: DecoderConfig, mesh: jax.sharding.Mesh
) -> str:
    """Return the attention of training on a GPU, and why it is not cuDNN's; else empty."""
    device, context = mesh.devices.flat[0], shards(mesh, "sequence")
    if device.platform != "gpu":
        return ""
    notice = f"attention: {decoder.attention}"
    missing = cudnn_attention.missing(device, row_tokens, decoder.dtype, context)
    if missing and compute.attention == "auto":
        return f"{notice}, since cudnn needs {missing}"
    layers = [layer for layer in decoder.each_layer if not layer.is_recurrent]
    fits = [cudnn_attention.supports(c.head_dim, c.dtype, c.sinks) for c in layers]
    if decoder.attention != "cudnn" or all(fits):
        return notice
    return f"{notice}, but blocked in {fits.count(False)} of {len(fits)} layers: sinks or width"


def check_divisible(decoder: Any, mesh: jax.sharding.Mesh) -> None:
    """Raise `ConfigError` if the mesh can't shard the model evenly for training or decoding."""
    fits = not decoder.recurrent or shards(mesh, "sequence") == 1
    require(fits, "mesh.context", mesh.shape["context"], "1 with delta-net layers")
    axes = dict(zip(SHARDED_SIZES, SHARDED_SIZES, strict=True)) | {"delta_key_heads": "heads"}
    for (name, axis), column in itertools.product(axes.items(), (TRAINING, DECODING)):
        pieces, sizes = shards(mesh, axis, column), {getattr(c, name) for c in decoder.each_layer}
        if name == "embed":  # the second embedding is sharded by this name too
            sizes.add(decoder.layers * decoder.layer_inputs)
        for size in sorted(sizes):
            allowed = f"one whose {pieces} shards divide the model's {name} = {size}"
            require(size % pieces == 0, "mesh", dict(mesh.shape), allowed)


def choose_recording(algorithm: Algorithm, decoder: DecoderConfig, training: bool) -> DecoderConfig:
    """Return the decoder; it records routes in the sampler if training replays them.

    Raises `ConfigError` if the algorithm has router settings and the policy has no routers.
    """
    for name, off in ("router_replay", "none"), ("router_balance_coefficient", 0):
        value = getattr(algorithm, name)
        fits = value == off or decoder.experts > 0
        require(fits, f"algorithm.{name}", value, f"{off!r}: the policy has no experts")
    records = training and algorithm.router_replay == "sampler"
    return dataclasses.replace(decoder, records_routes=records)


def open_engine(
    config: Config,
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    sampling_mesh: jax.sharding.Mesh,
    end_ids: tuple[int, ...],
    frozen: Any = None,
) -> PolicyEngine:
    """Return the sampling engine of training and evaluation.

    If scored groups are saved, or sampled by other processes, each program is compiled for one
    shape only, so that a group rounds in the same way whatever is sampled beside it.
    """
    settings = config.sampler
    if config.checkpoint.keep_groups or config.sampler.engine != "own":
        longest = config.longest_tokens()
        settings = dataclasses.replace(settings, first_window_tokens=longest, prefill_prompts=1)
    return PolicyEngine(
        decoder,
        sampling_mesh,
        settings,
        max_prompt_tokens=config.data.max_prompt_tokens,
        insert_width=max(config.rollout.samples_per_prompt, config.evaluation.samples_per_problem),
        end_ids=end_ids,
        frozen=frozen,
        trained_on=mesh,
    )


def open_sampler(
    engine: PolicyEngine, tokenizer: Tokenizer, seed: int, environments: Any = None
) -> Sampler:
    """Return the sampler of a run; a run with another back end returns that here."""
    return Scheduler(engine, tokenizer, seed, environments)


def open_learners(
    config: Config,
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    frozen: Any,
    others: Mapping[str, Model] = MappingProxyType({}),
) -> LearnerPrograms:
    """Return the programs of the policy, and of the models that the algorithm has beside it.

    Args:
        others: frozen models by name: the reference, the teacher. For 'jsd', the policy's update
            reads the teacher itself.
    """
    algorithm, compute, optimizer = config.algorithm, config.compute, config.optimizer
    plain = PolicySettings(algorithm, compute, config.sampler.temperature)
    read = others.get(TEACHER) if algorithm.distillation == "jsd" else None
    settings = dataclasses.replace(plain, keep_logprobs=config.log.token_ratios)
    if read:
        settings = dataclasses.replace(settings, teacher=read.decoder)
        frozen = {**(frozen or {}), TEACHER: read.params}
    policy = keep(policy_learner, settings, optimizer, decoder, mesh, frozen=frozen)
    scorers = {}
    if REFERENCE in others:
        scorers[REFERENCE] = TokenScorer(policy, others[REFERENCE].params)
    if algorithm.critic:
        rates, shape = config.critic.optimizer, scalar_config(decoder)
        scorers[CRITIC] = TokenScorer(keep(critic_learner, algorithm, rates, shape, mesh))
    if teacher := others.get(TEACHER):
        learner = None if read else keep(policy_learner, plain, optimizer, teacher.decoder, mesh)
        scorers[TEACHER] = TokenScorer(learner, teacher.params)
    return LearnerPrograms(policy, scorers)
