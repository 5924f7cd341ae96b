"""Roofline: the shortest time for what a program computes, moves through memory and sends.

Nothing is timed. A program takes the longest of its times, each at an assumed fraction of the
peak. If operations take longest, the MFU is that fraction times useful over executed operations.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dapo_jax.config.experiment import Config
from dapo_jax.extras.families.delta_net import CHUNK_TOKENS
from dapo_jax.extras.plan.chips import Chip
from dapo_jax.extras.plan.programs import SAMPLING, CompiledProgram, Layout
from dapo_jax.extras.plan.simulate import HOST_COSTS, Costs
from dapo_jax.extras.plan.workload import Workload
from dapo_jax.learner.packing import Member, PromptGroup, assign_rows
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.layers import ADAPTER_NAMES
from dapo_jax.model.splash_attention import block_tokens
from dapo_jax.run import memory
from dapo_jax.runtime import sharding

REMAT_ATTENTION = ("full", "offload")  # recompute attention in the backward pass
REMAT_MATRICES = (*REMAT_ATTENTION, "attention")  # recompute a layer's other products
DECODE_OVERHEAD_SECONDS = 1.5e-3  # of a decode step: launches and small reductions (assumed)
# Passes of a draw over its float32 logits (assumed): write, read for maximum and sum, write
# log-probs, read for the sums of blocks and for the chosen block.
DRAW_PASSES = 6


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one chip: operations, and bytes through memory, over links and to other slices."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    ici_bytes: float = 0.0
    dcn_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(vars(self).values(), vars(other).values(), strict=True)))

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Return the seconds of each part alone at the speed of `chip`."""
        return {
            "FLOP": self.flops / chip.flops_per_second,
            "HBM": self.hbm_bytes / chip.hbm_bytes_per_second,
            "ICI": self.ici_bytes / chip.ici_bytes_per_second,
            "DCN": self.dcn_bytes / chip.dcn_bytes_per_second,
        }

    def bound(self, chip: Chip) -> float:
        """Return the seconds of the part that takes longest."""
        return max(self.seconds(chip).values())


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


def attention_flops(config: DecoderConfig, pairs: float, tokens: float = 0.0) -> float:
    """Return the operations of attention in all layers, for a number of query-key pairs.

    Those of delta-net layers, which do not depend on pairs, are added for `tokens`: two products
    with the state and one into it, five in a chunk, and its inverse in ten steps.
    """
    chunk, key, value = CHUNK_TOKENS, config.delta_key_dim, config.delta_value_dim
    delta = config.delta_value_heads * (6.0 * key * value + 4 * chunk * value + 20 * chunk**2)
    delta += config.delta_key_heads * 4.0 * chunk * key
    width = sum(layer.head_dim for layer in config.each_layer if not layer.is_recurrent)
    return 4.0 * config.heads * width * pairs + sum(config.recurrent) * delta * tokens


def _sliding_fraction(config: DecoderConfig) -> float:
    """Return the fraction of attention that is in sliding layers, by the width of their heads."""
    widths = [(layer.head_dim, layer.window is not None) for layer in config.each_layer]
    return sum(width for width, slides in widths if slides) / sum(width for width, _ in widths)


def seen_pairs(config: DecoderConfig, length: Any) -> Any:
    """Return the query-key pairs of a sequence within the layers' windows, mean over layers."""
    sliding = _sliding_fraction(config)
    reach = np.minimum(length, length if config.window is None else config.window)
    return (1 - sliding) * length**2 / 2 + sliding * (length * reach - reach**2 / 2)


def row_pairs(
    config: DecoderConfig, lengths: Sequence[int], row_tokens: int, block: int = 0
) -> float:
    """Return the query-key pairs that training computes in a packed row, mean over layers.

    `lengths` are those of the row's responses with their prompts. The kernel skips blocks that lie
    in other responses only; with `block` = 0 all pairs within the windows are computed.
    """
    if not block:
        return float(seen_pairs(config, row_tokens))
    ends = np.cumsum([0, *lengths])
    starts = np.arange(0, row_tokens, block)
    # The first token of the response to which the block's first token belongs; padding: itself.
    first = ends[np.searchsorted(ends, starts, side="right") - 1]
    first = np.where(starts >= ends[-1], starts, first)

    def computed(first: np.ndarray) -> float:
        return float(block**2 * (starts // block - first // block + 1).sum())

    sliding = _sliding_fraction(config)
    near = computed(np.maximum(first, starts + 1 - (config.window or row_tokens)))
    return sliding * near + (1 - sliding) * computed(first)


def forward_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Return the operations of a forward pass: two per weight and token, plus attention."""
    weights = matrix_weights(config) + adapter_weights(config)
    return 2.0 * weights * tokens + attention_flops(config, pairs, tokens)


def useful_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Return the operations of a forward and backward pass without recomputation.

    The backward pass takes twice the forward pass: gradients of each layer's inputs and of its
    weights. Frozen weights have no gradients, and layers below all trained ones have neither.
    """
    forward = forward_flops(config, tokens, pairs)
    if config.adapters:
        return 3 * forward - 2.0 * matrix_weights(config) * tokens
    layers = 2.0 * matrix_weights(config, head=False) * tokens
    layers += attention_flops(config, pairs, tokens)
    below = config.frozen_layers / config.layers * layers
    return 3 * forward - 2 * below


def update_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Return the operations of an update, including padding and recomputation."""
    trained = 1 - config.frozen_layers / config.layers
    again = 2.0 * config.embed * config.vocab * tokens  # the head's logits are always recomputed
    if config.remat in REMAT_MATRICES:
        weights = matrix_weights(config, head=False) + adapter_weights(config)
        again += trained * 2.0 * weights * tokens
    if config.remat in REMAT_ATTENTION:
        again += trained * attention_flops(config, pairs, tokens)
    return useful_flops(config, tokens, pairs) + again


class Lengths(NamedTuple):
    """Lengths of the responses of one update."""

    tokens: float  # mean, with the prompt
    pairs: float  # of query and key: mean over responses and layers
    row_pairs: float  # that training attention computes in a packed row: mean
    response: float  # mean, without the prompt
    responses: int
    rows: int
    fill: float  # fraction of the packed rows' positions that hold a token
    microbatches: int


def measure_lengths(config: Config, decoder: DecoderConfig, workload: Workload) -> Lengths:
    """Draw the groups of one update from the workload and pack them."""
    rollout, packing = config.rollout, config.rows()
    groups = range(rollout.prompts_per_step // rollout.updates_per_rollout)
    drawn = [workload.draw(0, i, rollout.samples_per_prompt).tokens for i in groups]
    lengths = np.concatenate([workload.prompt_tokens(i) + drawn[i] for i in groups])
    alone = [PromptGroup(0, (Member(tokens, i),)) for i, tokens in enumerate(lengths.tolist())]
    packed = assign_rows(alone, packing.row_tokens)
    microbatches = -(-len(packed) // packing.rows_per_microbatch)
    rows = microbatches * packing.rows_per_microbatch
    block = 0
    if decoder.attention == "splash":
        cut = 2 * config.mesh.context if config.mesh.context > 1 else 1
        block = block_tokens(packing.row_tokens // cut)
    each = [[group.tokens for group in row] for row in packed] + [[]] * (rows - len(packed))
    pairs = [row_pairs(decoder, row, packing.row_tokens, block) for row in each]
    return Lengths(
        tokens=float(lengths.mean()),
        pairs=float(seen_pairs(decoder, lengths.astype(float)).mean()),
        row_pairs=float(np.mean(pairs)),
        response=float(np.mean([tokens.mean() for tokens in drawn])),
        responses=len(lengths),
        rows=len(packed),
        fill=float(lengths.sum() / (rows * packing.row_tokens)),
        microbatches=microbatches,
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Work of a chip in one unit of a program, and once per call."""

    unit: str
    each: Work
    once: Work = Work()  # noqa: RUF009
    phases: dict[str, Work] = dataclasses.field(default_factory=dict)  # that do not overlap

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Return the seconds of a unit by phase, each the longest of its times."""
        return {name: work.bound(chip) for name, work in (self.phases or {"": self.each}).items()}


def _moved(measured: CompiledProgram, part: str) -> Work:
    """Return the bytes moved per call ("once") or per microbatch ("each")."""
    traffic = measured.traffic
    sent, crossed = getattr(traffic.sent, part), getattr(traffic.crossed, part)
    return Work(0.0, 2 * getattr(traffic.written, part), sent, crossed)  # each byte is read once


def _decode(layout: Layout, measured: CompiledProgram, context: float) -> Estimate:
    """Estimate a decode step of all slots, busy or not, with all phases in sequence.

    A layer's products wait for its attention, and both for the sums over chips. Sliding layers read
    their whole rings, other layers `context` tokens (prompt included).
    """
    engine, decoder, settings = layout.engine, layout.decoder, layout.config.sampler
    slots = engine.max_concurrent_decodes / engine.replicas
    pieces = layout.sampling_mesh.size / engine.replicas
    itemsize = jnp.dtype(decoder.dtype).itemsize
    looked_up = 0 if decoder.tie_embeddings else itemsize * decoder.vocab * decoder.embed / pieces
    read = measured.alive["decoding weights"] - looked_up
    flops = forward_flops(decoder, slots, 0)
    if engine.config.int8_products:  # twice as fast, except for experts and head
        without_experts = dataclasses.replace(decoder, experts_per_token=0)
        flops -= slots * matrix_weights(without_experts, head=False)
    phases = {"products": Work(flops / pieces, read)}
    if decoder.experts:
        phases = _split_experts(layout, phases["products"], slots, pieces)
    reaches = (layer.window or engine.cache_tokens for layer in decoder.each_layer)
    rings = [reach if reach < engine.cache_tokens else context for reach in reaches]
    sizes = _read_bytes(layout)
    phases["keys and values"] = _read(layout, slots * float(np.average(rings, weights=sizes)))
    if decoder.recurrent:  # states are read and written
        phases["states"] = Work(hbm_bytes=2 * slots * memory.state_bytes(decoder, pieces))
    # The loop over a burst's steps either has no constant end, or runs `burst_tokens` times.
    burst = settings.burst_tokens
    sent = measured.traffic.sent + measured.traffic.crossed
    phases["exchange"] = Work(ici_bytes=sent.each + sent.once / burst)
    passes, stages = DRAW_PASSES, math.ceil(math.log2(decoder.vocab))
    if settings.top_p < 1 or 0 < settings.top_k < decoder.vocab:
        passes += stages * (stages + 1)  # each stage of a merge sort reads and writes everything
    phases["draw"] = Work(hbm_bytes=passes * memory.FLOAT_BYTES * slots * decoder.vocab / pieces)
    return Estimate("decode step", sum(phases.values(), Work()), phases=phases)


def _read(layout: Layout, tokens: float) -> Work:
    """Return the work of attention over a number of cached tokens of a replica, all layers."""
    pieces = layout.sampling_mesh.size / layout.engine.replicas
    flops = attention_flops(layout.decoder, tokens) / pieces
    return Work(flops, sum(_read_bytes(layout)) * tokens)


def _read_bytes(layout: Layout) -> list[float]:
    """Return the bytes of a cached token that each layer reads, on one device."""
    pieces, decoder = layout.sampling_mesh.size / layout.engine.replicas, layout.decoder
    sizes = memory.token_bytes(decoder, layout.config.sampler, pieces)
    return [sizes[decoder.cache_of(number)] for number in range(decoder.layers)]


def _split_experts(layout: Layout, products: Work, slots: float, pieces: float) -> dict[str, Work]:
    """Split the products of experts from the others: they read more weights than a token uses."""
    decoder, shards = layout.decoder, layout.sampling_mesh.shape["expert"]
    itemsize = 2 if layout.config.sampler.weights_dtype == "auto" else 1
    weights = 3.0 * decoder.layers * decoder.embed * decoder.mlp * decoder.experts
    held = itemsize * weights / (pieces * shards)
    used = decoder.experts_per_token / decoder.experts
    missed = (1 - used) ** (slots * shards)
    flops = 2 * weights * decoder.experts_per_token / decoder.experts * slots / pieces
    others = Work(products.flops - flops, products.hbm_bytes - held)
    return {"products": others, "experts": Work(flops, held * (1 - missed))}


def estimate(layout: Layout, measured: CompiledProgram, lengths: Lengths) -> Estimate:
    """Estimate a program from its compiled text and the shape of the policy."""
    if measured.name not in SAMPLING:
        packing = layout.config.rows()
        places = packing.rows_per_microbatch * packing.row_tokens
        pairs = packing.rows_per_microbatch * lengths.row_pairs
        count = update_flops if measured.name.endswith("update") else forward_flops
        each = _moved(measured, "each") + Work(
            count(layout.decoder, places, pairs) / layout.mesh.size
        )
        return Estimate("microbatch", each, _moved(measured, "once"))
    if measured.name == "decode":
        return _decode(layout, measured, lengths.tokens / 2)
    if measured.name == "prefill":  # of prompts of the maximum length
        tokens, width = layout.config.data.max_prompt_tokens, layout.engine.prefill_width
        flops = 2.0 * matrix_weights(layout.decoder, head=False) * width * tokens
        pairs = width * seen_pairs(layout.decoder, tokens)
        flops += attention_flops(layout.decoder, pairs, width * tokens)
        moved = _moved(measured, "each") + _moved(measured, "once")
        return Estimate("call", moved + Work(flops / layout.sampling_mesh.size))
    return Estimate("call", _moved(measured, "once"))


def step_costs(
    layout: Layout, measured: dict[str, CompiledProgram], chip: Chip, lengths: Lengths
) -> Costs:
    """Return the costs of the simulator's calls by the roofline, at the speed of `chip`."""
    config, engine = layout.config, layout.engine

    def bound(name: str, part: str = "each") -> float:
        if name not in measured:
            return 0.0
        work: Work = getattr(estimate(layout, measured[name], lengths), part)
        return work.bound(chip)

    places = config.packing.rows_per_microbatch * config.rows().row_tokens
    phases = estimate(layout, measured["decode"], lengths).seconds(chip)
    prompts = engine.prefill_width * config.data.max_prompt_tokens / engine.replicas
    return Costs(
        load=bound("load"),
        prefill_token=bound("prefill") / prompts,
        decode_step=DECODE_OVERHEAD_SECONDS,
        decode_products=sum(phases.get(name, 0.0) for name in ("products", "experts", "states")),
        decode_exchange=phases["exchange"],
        decode_draw=phases["draw"],
        read_token=_read(layout, 1.0).bound(chip),
        score_token=bound("score") / places,
        update=bound("update", "once"),
        update_token=bound("update") / places,
        **HOST_COSTS,
    )


def training_mfu(layout: Layout, lengths: Lengths, costs: Costs) -> float:
    """Return the useful operations of an update over what all chips could do in that time."""
    packing, count = layout.config.packing, lengths.responses
    places = packing.rows_per_microbatch * layout.config.rows().row_tokens
    seconds = lengths.microbatches * places * costs.update_token + costs.update
    useful = useful_flops(layout.decoder, count * lengths.tokens, count * lengths.pairs)
    return useful / (seconds * layout.topology.chip.flops_per_second * layout.mesh.size)
