"""Estimated seconds of compiled programs at best, and so the costs of a step."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from dapo_jax.commands.plan import roofline
from dapo_jax.commands.plan.chips import Chip
from dapo_jax.commands.plan.compile_programs import CompiledProgram
from dapo_jax.commands.plan.cost_model import Costs
from dapo_jax.commands.plan.hlo_traffic import BETWEEN_SLICES
from dapo_jax.commands.plan.host_costs import host_costs
from dapo_jax.commands.plan.programs import SAMPLING, Layout
from dapo_jax.commands.plan.roofline import Efficiency, Work
from dapo_jax.commands.plan.workload import Workload
from dapo_jax.config.experiment import Config
from dapo_jax.learner.packing import assign_rows
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.model.splash_attention import block_tokens
from dapo_jax.run import memory

READ_PER_WRITTEN = 1  # what a program writes to memory it reads again, once
DECODE_OVERHEAD_SECONDS = 1.5e-3  # of a decode step: its launches and small reductions (assumed)
# Over float32 logits (assumed): written, read for maximum and sum, log-probs written, mass read
# for the sums of blocks and for the block that is drawn from.
DRAW_PASSES = 6


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of one update's responses with their prompts.

    Attributes:
        tokens: mean length.
        pairs: mean number of pairs of a token and one that it sees, over responses and layers.
        row_pairs: mean number of pairs that training attention computes in a row.
        response: mean without the prompt.
        rows, fill: of an update, packed; the share of their places that holds a token.
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
    """Draws one update's groups from the workload, and packs them."""
    rollout, packing = config.rollout, config.rows()
    groups = rollout.prompts_per_step // rollout.updates_per_rollout
    samples = rollout.samples_per_prompt
    drawn = [
        (workload.prompt_tokens(i), workload.draw(0, i, samples).tokens) for i in range(groups)
    ]
    lengths = np.concatenate([prompt + tokens for prompt, tokens in drawn])
    packed = assign_rows(lengths.tolist(), packing.row_tokens)
    rows = len(packed)
    microbatches = -(-rows // packing.rows_per_microbatch)
    with_empty = microbatches * packing.rows_per_microbatch
    places = with_empty * packing.row_tokens
    block = 0
    if decoder.attention == "splash":
        cut = 2 * config.mesh.context if config.mesh.context > 1 else 1
        block = block_tokens(packing.row_tokens // cut)
    each = [lengths[row].tolist() for row in packed] + [[]] * (with_empty - rows)
    pairs = [roofline.row_pairs(decoder, row, packing.row_tokens, block) for row in each]
    return Lengths(
        float(lengths.mean()),
        float(roofline.seen_pairs(decoder, lengths.astype(float)).mean()),
        float(np.mean(pairs)),
        float(np.mean([tokens.mean() for _, tokens in drawn])),
        len(lengths),
        rows,
        float(lengths.sum() / places),
        microbatches,
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Work of a chip in one unit of a program, and around all units of a call.

    Attributes:
        phases: of a unit, which wait for each other; empty: its work is one.
    """

    unit: str
    each: Work
    once: Work = Work()  # noqa: RUF009
    phases: dict[str, Work] = dataclasses.field(default_factory=dict)

    def seconds(self, chip: Chip, efficiency: Efficiency) -> dict[str, float]:
        """Seconds of a unit by phase, each as long as the longest of its three times."""
        phases = self.phases or {"": self.each}
        return {name: work.bound(chip, efficiency)[1] for name, work in phases.items()}


def _moved(measured: CompiledProgram, part: str) -> Work:
    traffic = measured.traffic
    sent = {kind: getattr(times, part) for kind, times in traffic.sent.items()}
    hbm = (1 + READ_PER_WRITTEN) * getattr(traffic.written, part)
    crossed = sent.pop(BETWEEN_SLICES, 0.0)
    return Work(hbm_bytes=hbm, ici_bytes=sum(sent.values()), dcn_bytes=crossed)


def _training(layout: Layout, measured: CompiledProgram, lengths: Lengths) -> Estimate:
    packing, decoder = layout.config.rows(), layout.decoder
    places = packing.rows_per_microbatch * packing.row_tokens
    pairs = packing.rows_per_microbatch * lengths.row_pairs
    is_update = measured.name.endswith("update")
    count = roofline.update_flops if is_update else roofline.forward_flops
    flops = count(decoder, places, pairs)
    each = dataclasses.replace(_moved(measured, "each"), flops=flops / layout.mesh.size)
    return Estimate("microbatch", each, _moved(measured, "once"))


def token_bytes(layout: Layout) -> float:
    """Bytes of keys and values of a token, all layers, on one chip."""
    pieces = layout.sampling_mesh.size // layout.engine.replicas
    return memory.token_bytes(layout.decoder, layout.config.sampler, pieces)


def _decode(layout: Layout, measured: CompiledProgram, context: float) -> Estimate:
    """Estimate of a decode step: of every slot, busy or not, phase after phase.

    `context` is the mean length of a running response, prompt included.
    A layer's products wait for its attention, and both for the sums over chips: nothing hides.
    Sliding layers read their rings, the others what is there.
    """
    engine, decoder, settings = layout.engine, layout.decoder, layout.config.sampler
    slots = engine.max_concurrent_decodes / engine.replicas
    pieces = layout.sampling_mesh.size / engine.replicas
    number = jnp.dtype(decoder.dtype).itemsize
    looked_up = 0 if decoder.tie_embeddings else number * decoder.vocab * decoder.embed / pieces
    read = measured.alive["decoding weights"] - looked_up
    flops = roofline.forward_flops(decoder, slots, 0)
    if engine.config.int8_products:  # twice as fast; experts and head stay as they are
        without_experts = dataclasses.replace(decoder, experts_per_token=0)
        flops -= slots * roofline.matrix_weights(without_experts, head=False)
    phases = {"products": Work(flops / pieces, read)}
    if decoder.experts:
        phases = _apart(layout, phases["products"], slots, pieces)
    reaches = (reach or engine.cache_tokens for reach in decoder.reaches)
    rings = [reach if reach < engine.cache_tokens else context for reach in reaches]
    phases["keys and values"] = _read(layout, slots * sum(rings) / len(rings))
    # The loop over a burst's steps is one that no constant ends, or one of `burst_tokens`.
    burst = settings.burst_tokens
    sent = sum(times.each + times.once / burst for times in measured.traffic.sent.values())
    phases["exchange"] = Work(ici_bytes=sent)
    passes, stages = DRAW_PASSES, math.ceil(math.log2(decoder.vocab))
    if settings.top_p < 1 or 0 < settings.top_k < decoder.vocab:
        passes += stages * (stages + 1)  # a sort by merging reads and writes all at each stage
    phases["draw"] = Work(hbm_bytes=passes * memory.FLOAT_BYTES * slots * decoder.vocab / pieces)
    parts = (dataclasses.astuple(work) for work in phases.values())
    return Estimate("decode step", Work(*map(sum, zip(*parts, strict=True))), phases=phases)


def _read(layout: Layout, tokens: float) -> Work:
    """Work of attention over so many cached tokens of a replica, in every layer."""
    pieces = layout.sampling_mesh.size / layout.engine.replicas
    flops = roofline.attention_flops(layout.decoder, tokens) / pieces
    return Work(flops, token_bytes(layout) * tokens)


def _apart(layout: Layout, products: Work, slots: float, pieces: float) -> dict[str, Work]:
    """Products of experts, and the others: those read more weights than their tokens use."""
    decoder, shards = layout.decoder, layout.sampling_mesh.shape["expert"]
    number = 2 if layout.config.sampler.weights_dtype == "auto" else 1
    weights = 3.0 * decoder.layers * decoder.embed * decoder.mlp * decoder.experts
    held = number * weights / (pieces * shards)
    missed = (1 - decoder.experts_per_token / decoder.experts) ** (slots * shards)
    flops = 2 * weights * decoder.experts_per_token / decoder.experts * slots / pieces
    others = Work(products.flops - flops, products.hbm_bytes - held)
    return {"products": others, "experts": Work(flops, held * (1 - missed))}


def _prefill(layout: Layout, measured: CompiledProgram) -> Estimate:
    """Estimate of a prefill call, its prompts as long as they may be."""
    limit = layout.config.data.max_prompt_tokens
    tokens = layout.engine.prefill_width * limit
    weights = 2.0 * roofline.matrix_weights(layout.decoder, head=False) * tokens
    pairs = layout.engine.prefill_width * roofline.seen_pairs(layout.decoder, limit)
    flops = weights + roofline.attention_flops(layout.decoder, pairs)
    each, once = _moved(measured, "each"), _moved(measured, "once")
    hbm, ici = each.hbm_bytes + once.hbm_bytes, each.ici_bytes + once.ici_bytes
    return Estimate("call", Work(flops / layout.sampling_mesh.size, hbm, ici))


def estimate(layout: Layout, measured: CompiledProgram, lengths: Lengths) -> Estimate:
    """Estimate of a program, from the compiled text and the shape of the policy."""
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
    """Costs of the simulator's calls, by the roofline."""
    chip, config = layout.topology.chip, layout.config

    def bound(name: str, part: str = "each") -> float:
        if name not in measured:
            return 0.0
        work: Any = getattr(estimate(layout, measured[name], lengths), part)
        return work.bound(chip, efficiency)[1]

    places = config.packing.rows_per_microbatch * config.rows().row_tokens
    engine, decode = layout.engine, estimate(layout, measured["decode"], lengths)
    phases = decode.seconds(chip, efficiency)
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


def training_mfu(layout: Layout, lengths: Lengths, update_seconds: float) -> float:
    """Useful operations of an update over what all chips could do meanwhile."""
    count = lengths.responses
    useful = roofline.useful_flops(layout.decoder, count * lengths.tokens, count * lengths.pairs)
    peak = layout.topology.chip.flops_per_second * layout.mesh.size
    return useful / (update_seconds * peak)
