"""Roofline estimates of compiled programs, and the costs of a simulated step."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dapo_jax.commands.plan import roofline
from dapo_jax.commands.plan.chips import Chip
from dapo_jax.commands.plan.compile_programs import CompiledProgram
from dapo_jax.commands.plan.cost_model import Costs, host_costs
from dapo_jax.commands.plan.hlo_text import BETWEEN_SLICES
from dapo_jax.commands.plan.programs import SAMPLING, Layout
from dapo_jax.commands.plan.roofline import Efficiency, Work
from dapo_jax.commands.plan.workload import Workload
from dapo_jax.config.experiment import Config
from dapo_jax.learner.packing import assign_rows
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.splash_attention import block_tokens
from dapo_jax.run import memory

READ_PER_WRITTEN = 1  # a program reads the bytes that it writes once
DECODE_OVERHEAD_SECONDS = 1.5e-3  # of a decode step: launches and small reductions (assumed)
# Passes of a draw over its float32 logits (assumed): write, read for maximum and sum, write
# log-probs, read for the sums of blocks and for the chosen block.
DRAW_PASSES = 6


class Lengths(NamedTuple):
    """Lengths of the responses of one update, with their prompts unless noted.

    Attributes:
        tokens: mean length.
        pairs: mean number of query-key pairs, over responses and layers.
        row_pairs: mean number of pairs that training attention computes in a packed row.
        response: mean length without the prompt.
        fill: fraction of the packed rows' positions that hold a token.
    """

    tokens: float
    pairs: float
    row_pairs: float
    response: float
    responses: int
    rows: int
    fill: float
    microbatches: int


def measure_lengths(config: Config, decoder: DecoderConfig, workload: Workload) -> Lengths:
    """Draw the groups of one update from the workload and pack them."""
    rollout, packing = config.rollout, config.rows()
    groups = range(rollout.prompts_per_step // rollout.updates_per_rollout)
    prompts = [workload.prompt_tokens(i) for i in groups]
    drawn = [workload.draw(0, i, rollout.samples_per_prompt).tokens for i in groups]
    lengths = np.concatenate([n + tokens for n, tokens in zip(prompts, drawn, strict=True)])
    packed = assign_rows(lengths.tolist(), packing.row_tokens)
    microbatches = -(-len(packed) // packing.rows_per_microbatch)
    rows = microbatches * packing.rows_per_microbatch
    block = 0
    if decoder.attention == "splash":
        cut = 2 * config.mesh.context if config.mesh.context > 1 else 1
        block = block_tokens(packing.row_tokens // cut)
    each = [lengths[row].tolist() for row in packed] + [[]] * (rows - len(packed))
    pairs = [roofline.row_pairs(decoder, row, packing.row_tokens, block) for row in each]
    return Lengths(
        tokens=float(lengths.mean()),
        pairs=float(roofline.seen_pairs(decoder, lengths.astype(float)).mean()),
        row_pairs=float(np.mean(pairs)),
        response=float(np.mean([tokens.mean() for tokens in drawn])),
        responses=len(lengths),
        rows=len(packed),
        fill=float(lengths.sum() / (rows * packing.row_tokens)),
        microbatches=microbatches,
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Work of a chip in one unit of a program, and once per call.

    Attributes:
        phases: parts of a unit that run one after another; empty if everything overlaps.
    """

    unit: str
    each: Work
    once: Work = Work()  # noqa: RUF009
    phases: dict[str, Work] = dataclasses.field(default_factory=dict)

    def seconds(self, chip: Chip, efficiency: Efficiency) -> dict[str, float]:
        """Return the seconds of a unit by phase, each the longest of its times."""
        phases = self.phases or {"": self.each}
        return {name: work.bound(chip, efficiency)[1] for name, work in phases.items()}


def _moved(measured: CompiledProgram, part: str) -> Work:
    """Return the bytes moved per call ("once") or per microbatch ("each")."""
    traffic = measured.traffic
    sent = {kind: getattr(times, part) for kind, times in traffic.sent.items()}
    crossed = sent.pop(BETWEEN_SLICES, 0.0)
    hbm = (1 + READ_PER_WRITTEN) * getattr(traffic.written, part)
    return Work(hbm_bytes=hbm, ici_bytes=sum(sent.values()), dcn_bytes=crossed)


def _training(layout: Layout, measured: CompiledProgram, lengths: Lengths) -> Estimate:
    packing = layout.config.rows()
    places = packing.rows_per_microbatch * packing.row_tokens
    pairs = packing.rows_per_microbatch * lengths.row_pairs
    is_update = measured.name.endswith("update")
    count = roofline.update_flops if is_update else roofline.forward_flops
    flops = count(layout.decoder, places, pairs) / layout.mesh.size
    each = dataclasses.replace(_moved(measured, "each"), flops=flops)
    return Estimate("microbatch", each, _moved(measured, "once"))


def token_bytes(layout: Layout) -> float:
    """Return the bytes of a token's keys and values on one chip, all layers."""
    pieces = layout.sampling_mesh.size // layout.engine.replicas
    return memory.token_bytes(layout.decoder, layout.config.sampler, pieces)


def _decode(layout: Layout, measured: CompiledProgram, context: float) -> Estimate:
    """Estimate a decode step of all slots, busy or not, with all phases in sequence.

    A layer's products wait for its attention, and both wait for the sums over chips. Sliding layers
    read their whole rings, other layers `context` tokens (prompt included).
    """
    engine, decoder, settings = layout.engine, layout.decoder, layout.config.sampler
    slots = engine.max_concurrent_decodes / engine.replicas
    pieces = layout.sampling_mesh.size / engine.replicas
    itemsize = jnp.dtype(decoder.dtype).itemsize
    looked_up = 0 if decoder.tie_embeddings else itemsize * decoder.vocab * decoder.embed / pieces
    read = measured.alive["decoding weights"] - looked_up
    flops = roofline.forward_flops(decoder, slots, 0)
    if engine.config.int8_products:  # twice as fast, except for experts and head
        without_experts = dataclasses.replace(decoder, experts_per_token=0)
        flops -= slots * roofline.matrix_weights(without_experts, head=False)
    phases = {"products": Work(flops / pieces, read)}
    if decoder.experts:
        phases = _split_experts(layout, phases["products"], slots, pieces)
    reaches = (reach or engine.cache_tokens for reach in decoder.reaches)
    rings = [reach if reach < engine.cache_tokens else context for reach in reaches]
    phases["keys and values"] = _read(layout, slots * sum(rings) / len(rings))
    # The loop over a burst's steps either has no constant end, or runs `burst_tokens` times.
    burst = settings.burst_tokens
    sent = sum(times.each + times.once / burst for times in measured.traffic.sent.values())
    phases["exchange"] = Work(ici_bytes=sent)
    passes, stages = DRAW_PASSES, math.ceil(math.log2(decoder.vocab))
    if settings.top_p < 1 or 0 < settings.top_k < decoder.vocab:
        passes += stages * (stages + 1)  # each stage of a merge sort reads and writes everything
    phases["draw"] = Work(hbm_bytes=passes * memory.FLOAT_BYTES * slots * decoder.vocab / pieces)
    parts = (dataclasses.astuple(work) for work in phases.values())
    return Estimate("decode step", Work(*map(sum, zip(*parts, strict=True))), phases=phases)


def _read(layout: Layout, tokens: float) -> Work:
    """Return the work of attention over a number of cached tokens of a replica, all layers."""
    pieces = layout.sampling_mesh.size / layout.engine.replicas
    flops = roofline.attention_flops(layout.decoder, tokens) / pieces
    return Work(flops, token_bytes(layout) * tokens)


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


def _prefill(layout: Layout, measured: CompiledProgram) -> Estimate:
    """Estimate a prefill call of prompts of the maximum length."""
    limit, width = layout.config.data.max_prompt_tokens, layout.engine.prefill_width
    flops = 2.0 * roofline.matrix_weights(layout.decoder, head=False) * width * limit
    pairs = width * roofline.seen_pairs(layout.decoder, limit)
    flops += roofline.attention_flops(layout.decoder, pairs)
    each, once = _moved(measured, "each"), _moved(measured, "once")
    hbm, ici = each.hbm_bytes + once.hbm_bytes, each.ici_bytes + once.ici_bytes
    return Estimate("call", Work(flops / layout.sampling_mesh.size, hbm, ici))


def estimate(layout: Layout, measured: CompiledProgram, lengths: Lengths) -> Estimate:
    """Estimate a program from its compiled text and the shape of the policy."""
    if measured.name not in SAMPLING:
        return _training(layout, measured, lengths)
    if measured.name == "decode":
        return _decode(layout, measured, lengths.tokens / 2)
    if measured.name == "prefill":
        return _prefill(layout, measured)
    return Estimate("call", _moved(measured, "once"))


def step_costs(
    layout: Layout, measured: dict[str, CompiledProgram], efficiency: Efficiency, lengths: Lengths
) -> Costs:
    """Return the costs of the simulator's calls by the roofline."""
    chip, config = layout.topology.chip, layout.config

    def bound(name: str, part: str = "each") -> float:
        if name not in measured:
            return 0.0
        work: Any = getattr(estimate(layout, measured[name], lengths), part)
        return work.bound(chip, efficiency)[1]

    places = config.packing.rows_per_microbatch * config.rows().row_tokens
    engine = layout.engine
    phases = estimate(layout, measured["decode"], lengths).seconds(chip, efficiency)
    prompts = engine.prefill_width * config.data.max_prompt_tokens / engine.replicas
    return Costs(
        load=bound("load"),
        prefill_token=bound("prefill") / prompts,
        decode_step=DECODE_OVERHEAD_SECONDS,
        decode_products=phases["products"] + phases.get("experts", 0.0),
        decode_exchange=phases["exchange"],
        decode_draw=phases["draw"],
        read_token=_read(layout, 1.0).bound(chip, efficiency)[1],
        score_token=bound("score") / places,
        update=bound("update", "once"),
        update_token=bound("update") / places,
        **host_costs(config, layout.topology.hosts),
    )


def training_mfu(layout: Layout, lengths: Lengths, costs: Costs) -> float:
    """Return the useful operations of an update over what all chips could do in that time."""
    packing, count = layout.config.packing, lengths.responses
    places = packing.rows_per_microbatch * layout.config.rows().row_tokens
    seconds = lengths.microbatches * places * costs.update_token + costs.update
    useful = roofline.useful_flops(layout.decoder, count * lengths.tokens, count * lengths.pairs)
    return useful / (seconds * layout.topology.chip.flops_per_second * layout.mesh.size)
