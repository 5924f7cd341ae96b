"""Estimated seconds of compiled programs at best, and so the costs of a step."""

import dataclasses
from typing import Any

import numpy as np

from dapo_jax.commands.plan import roofline
from dapo_jax.commands.plan.compile_programs import CompiledProgram
from dapo_jax.commands.plan.cost_model import Costs
from dapo_jax.commands.plan.programs import SAMPLING, Layout
from dapo_jax.commands.plan.roofline import Efficiency, Work
from dapo_jax.commands.plan.workload import Workload
from dapo_jax.config.experiment import Config
from dapo_jax.learner.packing import assign_rows
from dapo_jax.run import memory

READ_PER_WRITTEN = 1  # what a program writes to memory it reads again, once
DECODE_OVERHEAD_SECONDS = 1.5e-3  # of a decode step: its launches and small reductions


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of one update's responses with their prompts.

    Attributes:
        tokens, square: means of the length and of its square.
        response: mean without the prompt.
        rows, fill: of an update, packed; the share of their places that holds a token.
    """

    tokens: float
    square: float
    response: float
    responses: int
    rows: int
    fill: float
    microbatches: int


def measure_lengths(config: Config, workload: Workload) -> Lengths:
    """Draws one update's groups from the workload, and packs them."""
    rollout, packing = config.rollout, config.rows()
    groups = rollout.prompts_per_step // rollout.updates_per_rollout
    samples = rollout.samples_per_prompt
    drawn = [
        (workload.prompt_tokens(i), workload.draw(0, i, samples).tokens) for i in range(groups)
    ]
    lengths = np.concatenate([prompt + tokens for prompt, tokens in drawn])
    rows = len(assign_rows(lengths.tolist(), packing.row_tokens))
    microbatches = -(-rows // packing.rows_per_microbatch)
    places = microbatches * packing.rows_per_microbatch * packing.row_tokens
    return Lengths(
        float(lengths.mean()),
        float((lengths.astype(float) ** 2).mean()),
        float(np.mean([tokens.mean() for _, tokens in drawn])),
        len(lengths),
        rows,
        float(lengths.sum() / places),
        microbatches,
    )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Work of a chip in one unit of a program, and around all units of a call."""

    unit: str
    each: Work
    once: Work = Work()  # noqa: RUF009


def _moved(measured: CompiledProgram, part: str) -> Work:
    written, sent = measured.traffic.written, measured.traffic.sent.values()
    hbm = (1 + READ_PER_WRITTEN) * getattr(written, part)
    return Work(hbm_bytes=hbm, ici_bytes=sum(getattr(times, part) for times in sent))


def _training(layout: Layout, measured: CompiledProgram) -> Estimate:
    packing, decoder = layout.config.rows(), layout.decoder
    places = packing.rows_per_microbatch * packing.row_tokens
    if measured.name.endswith("update"):
        flops = roofline.update_flops(decoder, places, packing.row_tokens)
    else:
        flops = roofline.forward_flops(decoder, places, places * packing.row_tokens / 2)
    each = dataclasses.replace(_moved(measured, "each"), flops=flops / layout.mesh.size)
    return Estimate("microbatch", each, _moved(measured, "once"))


def token_bytes(layout: Layout) -> float:
    """Bytes of keys and values of a token, all layers, on one chip."""
    pieces = layout.sampling_mesh.size // layout.engine.replicas
    return memory.token_bytes(layout.decoder, layout.config.sampler, pieces)


def _decode(layout: Layout, measured: CompiledProgram, context: float) -> Estimate:
    """Estimate of a decode step: the weights once, and the keys and values that are there."""
    engine = layout.engine
    slots = engine.max_concurrent_decodes / engine.replicas
    pieces = layout.sampling_mesh.size / engine.replicas
    flops = roofline.forward_flops(layout.decoder, slots, slots * context) / pieces
    hbm = measured.alive["decoding weights"] + token_bytes(layout) * slots * context
    # The loop over a burst's steps is one that no constant ends, or one of `burst_tokens`.
    burst = layout.config.sampler.burst_tokens
    sent = sum(times.each + times.once / burst for times in measured.traffic.sent.values())
    return Estimate("decode step", Work(flops, hbm, sent))


def _prefill(layout: Layout, measured: CompiledProgram) -> Estimate:
    """Estimate of a prefill call, its prompts as long as they may be."""
    limit = layout.config.data.max_prompt_tokens
    tokens = layout.engine.prefill_width * limit
    weights = 2.0 * roofline.matrix_weights(layout.decoder, head=False) * tokens
    flops = weights + roofline.attention_flops(layout.decoder, tokens * limit / 2)
    each, once = _moved(measured, "each"), _moved(measured, "once")
    hbm, ici = each.hbm_bytes + once.hbm_bytes, each.ici_bytes + once.ici_bytes
    return Estimate("call", Work(flops / layout.sampling_mesh.size, hbm, ici))


def estimate(layout: Layout, measured: CompiledProgram, context: float) -> Estimate:
    """Estimate of a program, from the compiled text and the shape of the policy.

    Args:
        context: mean tokens of a running response, prompt included.
    """
    if measured.name not in SAMPLING:
        return _training(layout, measured)
    if measured.name == "decode":
        return _decode(layout, measured, context)
    if measured.name == "prefill":
        return _prefill(layout, measured)
    return Estimate("call", _moved(measured, "once"))


def step_costs(
    layout: Layout, measured: dict[str, CompiledProgram], efficiency: Efficiency, context: float
) -> Costs:
    """Costs of the simulator's calls, by the roofline."""
    chip, config = layout.topology.chip, layout.config

    def bound(name: str, part: str = "each") -> float:
        if name not in measured:
            return 0.0
        work: Any = getattr(estimate(layout, measured[name], context), part)
        return work.bound(chip, efficiency)[1]

    places = config.packing.rows_per_microbatch * config.rows().row_tokens
    engine, decode = layout.engine, estimate(layout, measured["decode"], context).each
    reads = token_bytes(layout) / (chip.hbm_bytes_per_second * efficiency.hbm)
    slots = engine.max_concurrent_decodes / engine.replicas
    whole = decode.bound(chip, efficiency)[1]
    prompts = engine.prefill_width * config.data.max_prompt_tokens / engine.replicas
    return Costs(
        load=bound("load"),
        prefill_token=bound("prefill") / prompts,
        decode_step=DECODE_OVERHEAD_SECONDS + max(0.0, whole - reads * slots * context),
        read_token=reads,
        score_token=bound("score") / places,
        update=bound("update", "once"),
        update_token=bound("update") / places,
    )


def training_mfu(layout: Layout, lengths: Lengths, update_seconds: float) -> float:
    """Useful operations of an update over what all chips could do meanwhile."""
    count = lengths.responses
    useful = roofline.useful_flops(
        layout.decoder, count * lengths.tokens, count * lengths.square / 2
    )
    peak = layout.topology.chip.flops_per_second * layout.mesh.size
    return useful / (update_seconds * peak)
