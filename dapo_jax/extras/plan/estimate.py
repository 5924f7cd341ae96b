"""Operations of a policy, and the seconds of a step by the formula of docs/pods.md."""

import dataclasses
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax

from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan.main import PlanSettings
from dapo_jax.extras.plan.programs import Layout
from dapo_jax.learner.batches import TEACHER
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.run import memory
from dapo_jax.runtime import sharding

_PATH = pathlib.Path(__file__).with_name("measured.json")
MEASURED: list[dict[str, Any]] = json.loads(_PATH.read_text(encoding="utf-8"))
REMAT_ATTENTION = ("full", "offload")  # recompute attention in the backward pass
REMAT_MATRICES = (*REMAT_ATTENTION, "attention")  # recompute a layer's other products


def matrix_weights(config: DecoderConfig, *, head: bool = True) -> int:
    """Return the number of weights that multiply every token; the embedding is a lookup."""

    def of_layer(c: DecoderConfig) -> int:
        mlp = 3 * c.active_mlp + c.experts + 3 * c.layer_inputs
        if c.is_recurrent:
            mixer = 2 * c.delta_key_heads * c.delta_key_dim
            mixer += c.delta_value_heads * (3 * c.delta_value_dim + 2)
        else:
            of_keys = 0 if c.shares_keys else c.kv_heads * (2 - c.keys_as_values)
            mixer = c.head_dim * (c.heads * (2 + c.output_gate) + of_keys)
        return c.embed * (mixer + mlp)

    return sum(map(of_layer, config.each_layer)) + (config.embed * config.vocab if head else 0)


def adapter_weights(config: DecoderConfig) -> int:
    """Return the number of weights of all low-rank adapters."""
    shapes = sharding.flatten(sharding.unbox(abstract_params(config)))
    return sum(math.prod(shapes[path].shape) for path in shapes if path.endswith(ADAPTER_NAMES))


def attention_flops(config: DecoderConfig, tokens: float, context: float) -> float:
    """Return the operations of attention in all layers, for tokens that see `context` tokens."""

    def of_layer(c: DecoderConfig) -> float:
        if c.is_recurrent:  # decays its state, reads it and writes into it
            return 6.0 * c.delta_value_heads * c.delta_key_dim * c.delta_value_dim
        return 4.0 * c.heads * c.head_dim * min(context, c.window or context)

    return tokens * sum(map(of_layer, config.each_layer))


def forward_flops(config: DecoderConfig, tokens: float, context: float) -> float:
    """Return the operations of a forward pass: two per weight and token, plus attention."""
    weights = matrix_weights(config) + adapter_weights(config)
    return 2.0 * weights * tokens + attention_flops(config, tokens, context)


def update_flops(config: DecoderConfig, tokens: float, context: float) -> tuple[float, float]:
    """Return the operations of an update: the useful ones, and all with recomputation."""
    forward = forward_flops(config, tokens, context)
    head = 2.0 * config.embed * config.vocab * tokens
    trained = 1 - config.frozen_layers / config.layers
    attention = trained * attention_flops(config, tokens, context)
    useful = forward + 2 * (trained * (forward - head) + head)
    if config.adapters:
        useful = 3 * forward - 2.0 * matrix_weights(config) * tokens
    repeated = head  # the head's logits are always recomputed
    if config.remat in REMAT_MATRICES:
        repeated += trained * (forward - head) - attention
    if config.remat in REMAT_ATTENTION:
        repeated += attention
    return useful, useful + repeated


class Lengths(NamedTuple):
    """Assumed lengths in tokens, means over prompts and responses."""

    prompt: float
    response: float
    trained: float  # of all sequences that a step trains on
    trained_context: float  # that a trained token sees
    decoded_context: float  # that a decoded token sees


def assumed_lengths(config: Config, settings: PlanSettings) -> Lengths:
    """Return the lengths that the settings describe."""
    limit, rollout = config.sampler.max_response_tokens, config.rollout
    prompt = min(150.0, config.data.max_prompt_tokens / 2)
    response = min(settings.tokens or 0.2 * limit, limit)
    square = min(2 * response, limit) * response
    trained = (prompt**2 + 2 * prompt * response + square) / (2 * (prompt + response))
    tokens = rollout.prompts_per_step * rollout.samples_per_prompt * (prompt + response)
    return Lengths(prompt, response, tokens, trained, prompt + square / (2 * response))


def slot_bytes(layout: Layout, context: float) -> float:
    """Return the bytes of keys, values and states that a decode step reads on a device a slot."""
    decoder, pieces = layout.decoder, layout.sampling_mesh.size / layout.engine.replicas
    sizes = memory.token_bytes(decoder, layout.config.sampler, pieces)
    held = 2 * memory.state_bytes(decoder, pieces)  # read and written
    for number, layer in enumerate(decoder.each_layer):
        held += sizes[decoder.cache_of(number)] * min(context, layer.window or context)
    return held


def estimate_step(layout: Layout, weight_bytes: int, settings: PlanSettings) -> dict[str, Any]:
    """Return the figures of a step by the formula, with `weight_bytes` to decode on a chip."""
    config, decoder, chip = layout.config, layout.decoder, layout.topology.chip
    algorithm, rollout, sampler = config.algorithm, config.rollout, config.sampler
    lengths = assumed_lengths(config, settings)
    groups = rollout.prompts_per_step / (settings.kept if algorithm.dynamic_sampling else 1)
    sampled = groups * rollout.samples_per_prompt * lengths.response
    steps = max(sampled / (sampler.slots * settings.busy), sampler.max_response_tokens)
    live = sampled / steps
    read = live / layout.engine.replicas * slot_bytes(layout, lengths.decoded_context)
    seen = decoder, lengths.trained, lengths.trained_context
    scored = algorithm.scored_minibatches(rollout.updates_per_rollout)
    passes = len(scored) / rollout.updates_per_rollout + algorithm.reference + algorithm.critic
    teacher = layout.learners.scorers.get(TEACHER)
    of_teacher = sum(leaf.size for leaf in jax.tree.leaves(teacher and teacher.params))
    models, (useful, executed) = 1 + algorithm.critic, update_flops(*seen)
    flops = {
        "prefill": forward_flops(decoder, groups * lengths.prompt, lengths.prompt / 2),
        "decode": forward_flops(decoder, sampled, lengths.decoded_context),
        "score": passes * forward_flops(*seen) + 2.0 * of_teacher * lengths.trained,
        "update": models * executed,
    }
    learning = layout.mesh.size * chip.flops_per_second
    sampling = layout.sampling_mesh.size * chip.flops_per_second
    seconds = {
        "prefill": flops["prefill"] / (sampling * settings.flops),
        "decode": steps * (weight_bytes + read) / (chip.hbm_bytes_per_second * settings.hbm),
        "score": flops["score"] / (learning * settings.flops),
        "update": flops["update"] / (learning * settings.flops),
    }
    parts = seconds["prefill"] + seconds["decode"], seconds["score"] + seconds["update"]
    overlap = rollout.staleness and layout.sampling_mesh is not layout.mesh
    both = max(parts) if overlap else sum(parts)
    hours = layout.topology.chips * both / 3600
    return {
        "response_tokens": lengths.response,
        "decode_steps": steps,
        "live_slots": live,
        "decode_step_bytes": weight_bytes + read,
        "flops": flops,
        "seconds": seconds,
        "seconds_step": both,
        "update_mfu": models * useful / (seconds["update"] * learning),
        "hours": both * config.total_steps / 3600,
        "chip_hours_step": hours,
        "chip_hours": hours * config.total_steps,
        "dollars_step": settings.price * hours,
        "dollars": settings.price * hours * config.total_steps,
    }


def published(phase: str, chip: str, kind: str, size: float) -> list[dict[str, Any]]:
    """Return the three nearest measurements: another chip counts as a fourfold size, kind 16."""

    def distance(row: dict[str, Any]) -> float:
        other = 2 * (row["chip"] != chip) + 4 * (row["kind"] != kind)
        return abs(math.log2(row["size"] / size)) + other

    return sorted((row for row in MEASURED if row["phase"] == phase), key=distance)[:3]


def calibrated_step(layout: Layout, weight_bytes: int, settings: PlanSettings) -> dict[str, Any]:
    """Return `estimate_step` by the nearest measurements, and the range of seconds by three."""
    like = layout.topology.name.partition(":")[0], "experts" if layout.decoder.experts else "dense"
    bound = dataclasses.replace(settings, flops=1.0, hbm=1.0)
    read = estimate_step(layout, weight_bytes, bound)["decode_step_bytes"]
    sizes = {"training": matrix_weights(layout.decoder), "decoding": read}
    rows = [published(phase, *like, size / 1e9) for phase, size in sizes.items()]
    given, steps = (settings.flops, settings.hbm), []
    for choose in (lambda values: values[0], max, min):
        published_rates = [choose([row["efficiency"] for row in near]) for near in rows]
        flops, hbm = (rate or near for rate, near in zip(given, published_rates, strict=True))
        peaks = dataclasses.replace(settings, flops=flops, hbm=hbm)
        steps.append(estimate_step(layout, weight_bytes, peaks) | {"flops_peak": flops, "hbm": hbm})
    both = {"seconds_range": [step["seconds_step"] for step in steps[1:]]}
    return steps[0] | both | {"sources": [near[0] for near in rows]}
