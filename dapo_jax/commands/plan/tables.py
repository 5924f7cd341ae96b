"""Report of a plan: Markdown tables for people, one record for programs."""

from collections.abc import Iterator
from typing import Any

from dapo_jax.commands.plan.chips import GIB
from dapo_jax.commands.plan.compile_programs import CompiledProgram, versions
from dapo_jax.commands.plan.cost_model import HOSTS, WRITE_SECONDS
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.commands.plan.programs import SAMPLING
from dapo_jax.commands.plan.roofline import matrix_weights
from dapo_jax.commands.plan.simulate import Simulation, changed
from dapo_jax.commands.plan.step_estimate import DECODE_OVERHEAD_SECONDS, DRAW_PASSES, estimate
from dapo_jax.config.experiment import Config
from dapo_jax.reporting.notices import describe_saving
from dapo_jax.run.memory import checkpoint_bytes

PHASES = {  # the simulator's costs in each phase of a step
    "load the decoding weights": ("load",),
    "prefill": ("prefill_call", "prefill_token", "insert_call", "insert"),
    "decode: keys and values": ("read_token",),
    "decode: products": ("decode_products",),
    "decode: exchange": ("decode_exchange",),
    "decode: draw": ("decode_draw",),
    "decode: overhead": ("burst", "decode_step", "slot_step", "response"),
    "wait for verdicts": ("judge", "judged"),
    "score": ("score_pass", "score_token"),
    "update": ("update", "update_token"),
    "hosts": HOSTS,
}
CARRYING_STEPS = 6  # averaged: steps that begin with many carried groups sample little
WEAKER = (
    "A GPU's compiler enforces no memory limit and no kernel was timed: a weaker proof than for a "
    "TPU."
)
ONE_TURN = (
    "turns of the environment are not counted: a response is one turn, without observations, "
    "without repeated prefills and without waiting for the environment"
)


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [header, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, cells[1:])])


def _gib(size: float, zero: str = "") -> str:
    return f"{size / GIB:.2f}" if size else zero


def headline(plan: Any) -> str:
    """Return model, topology, sizes and compiler."""
    layout, topology = plan.layout, plan.layout.topology
    config, mesh = layout.config, layout.mesh
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    parts = [
        f"{config.model.folder} ({matrix_weights(layout.decoder) / 1e9:.2f} G weights that tokens "
        f"meet) on {topology}, {topology.chips} chips: {sizes or 'one device'}",
        f"rows of {config.rows().row_tokens:,} tokens, {config.packing.rows_per_microbatch} a "
        f"microbatch, remat {config.compute.remat!r}, {config.compute.dtype}; "
        f"{config.sampler.slots} slots",
        f"compiled by {versions()} in {plan.seconds:.0f} s with {plan.host_bytes / GIB:.1f} GiB of "
        "this machine's memory; nothing ran on a device",
    ]
    if layout.sampling_mesh is not layout.mesh:
        parts.insert(1, f"{layout.mesh.size} chips learn, {layout.sampling_mesh.size} sample")
    if topology.chip.platform != "tpu":
        parts.append(WEAKER)
    return "\n".join(parts)


def memory_table(figures: dict[str, Any]) -> str:
    """Return the table of GiB of a chip by program and part."""
    programs = figures["programs"]
    names = list(dict.fromkeys(name for program in programs.values() for name in program["parts"]))
    names.append(names.pop(names.index("temporary")))
    rows = [
        [name, *(_gib(program["parts"].get(part, 0)) for part in names)]
        + [_gib(program["together_bytes"]), "yes" if program["fits"] else "NO"]
        for name, program in programs.items()
    ]
    host = max(program["host_bytes"] for program in programs.values())
    host_line = f"\n{host / GIB:.2f} GiB of a host's memory for each chip." if host else ""
    limit = figures["limit_bytes"] / GIB
    title = f"HBM of a chip in GiB, of {limit:.2f} that programs may use:\n\n"
    return title + table(["program", *names, "together", "fits"], rows) + host_line


def roofline_table(figures: dict[str, Any]) -> str:
    """Return the table of seconds of each program's unit by what bounds it."""
    programs = figures["programs"]
    crossed = any(program["work"]["dcn_bytes"] for program in programs.values())
    parts = ("FLOP", "HBM", "ICI", *(("DCN",) if crossed else ()))
    rows = [
        [name, program["unit"], f"{program['work']['flops']:.3g}"]
        + [f"{program['seconds'][part]:.4f}" for part in parts]
        + [program["bound"], f"{program['unit_seconds']:.4f}"]
        for name, program in programs.items()
        if program["peak_bytes"] is not None  # else there is no text to count bytes in
    ]
    header = ["program", "of one", "FLOP of a chip", *(f"{part} s" for part in parts)]
    text = table([*header, "bound by", "s"], rows)
    if phases := programs["decode"]["phases"]:
        text += f"\n\ndecode, one after the other: {', '.join(phases)}"
    return f"Roofline, seconds at the assumed shares of peak:\n\n{text}"


def traffic_table(programs: dict[str, CompiledProgram]) -> str:
    """Return the table of bytes that a chip sends."""
    rows = [
        [program.name, kind, _gib(times.once, "0"), _gib(times.each, "0")]
        for program in programs.values()
        for kind, times in sorted(program.traffic.sent.items())
    ]
    if not rows:
        return "Chips exchange nothing."
    title = "Sent by a chip in GiB, in a call and in each turn of its loop:\n\n"
    return title + table(["program", "collective", "a call", "a turn"], rows)


def step_table(plan: Any, settings: PlanSettings, step: dict[str, Any]) -> str:
    """Return the table of a step's seconds, with tokens and price."""
    rows = [[name, f"{value:,.1f}"] for name, value in step["phases"].items()]
    rows.append(["a step", f"{step['seconds_step']:,.1f}"])
    config = plan.layout.config
    lines = [
        f"{step['tokens_per_second']:,.0f} response tokens/s while sampling, "
        f"{step['trained_tokens_per_second']:,.0f} tokens/s while learning; "
        f"MFU of the update {step['update_mfu']:.0%}, of full rows "
        f"{step['update_mfu_of_full_rows']:.0%} ({settings.flops:.0%} of the peak, assumed, x "
        "useful / executed operations)",
        f"slots {step['slot_utilisation']:.0%} busy; {step['asked_groups']} groups asked for "
        f"{step['kept_groups']} kept; {step['sampled_to_kept_tokens']:.2f} tokens drawn for "
        f"each that is trained on; rows {step['fill']:.0%} full",
        f"{step['chip_hours_step']:,.2f} chip-hours a step, {step['chip_hours']:,.0f} for "
        f"{config.total_steps:,} steps ({step['hours']:,.1f} hours)",
        describe_saving(
            checkpoint_bytes(config, plan.layout.decoder),
            plan.layout.topology.hosts,
            config.checkpoint.every_steps,
            step["seconds_step"],
        ),
    ]
    if settings.price:
        lines.append(
            f"{step['dollars_step']:,.2f} dollars a step, {step['dollars']:,.0f} in all, at "
            f"{settings.price:g} a chip-hour"
        )
    return "A step:\n\n" + table(["phase", "seconds"], rows) + "\n\n" + "\n".join(lines)


def step_record(plan: Any, settings: PlanSettings) -> dict[str, Any]:
    """Return the figures of a step: seconds, rates, fractions and price."""
    step, config, chips = plan.step, plan.layout.config, plan.layout.topology.chips
    rollout, update = step.rollout_seconds, step.update_seconds
    # `plan.mfu` is for the rows of one sampled update; the step's rows have another fill.
    mfu_of_full_rows = plan.mfu / plan.lengths.fill
    overlap = config.rollout.lag and plan.layout.sampling_mesh is not plan.layout.mesh
    seconds = max(rollout, update) if overlap else rollout + update
    hours = chips * seconds / 3600
    return {
        "phases": {
            name: sum(step.seconds.get(part, 0.0) for part in parts)
            for name, parts in PHASES.items()
        },
        "seconds_step": seconds,
        "tokens_per_second": step.sampled.tokens / rollout,
        "trained_tokens_per_second": step.kept_tokens / update if update else 0.0,
        "update_mfu": mfu_of_full_rows * step.fill,
        "update_mfu_of_full_rows": mfu_of_full_rows,
        "slot_utilisation": step.utilisation,
        "asked_groups": step.asked,
        "kept_groups": step.kept,
        "sampled_to_kept_tokens": step.drawn_tokens / max(1, step.kept_tokens),
        "fill": step.fill,
        "chip_hours_step": hours,
        "chip_hours": hours * config.total_steps,
        "hours": seconds * config.total_steps / 3600,
        "dollars_step": settings.price * hours,
        "dollars": settings.price * hours * config.total_steps,
    }


def assumptions(plan: Any, settings: PlanSettings) -> str:
    """Return the list of everything that was neither compiled nor counted."""
    topology, chip = plan.layout.topology, plan.layout.topology.chip
    dcn = f", {chip.dcn_bytes_per_second / 1e9:g} GB/s to other slices"
    workload = f"as recorded in {settings.law}"
    if not settings.law:
        workload = f"log-normal with spread {settings.spread:g}, {settings.accuracy:.0%} right, "
        workload += f"{settings.kept:.0%} of groups kept"
    lines = [
        f"a chip: {chip.flops_per_second / 1e12:g} TFLOP/s in bfloat16, "
        f"{chip.hbm_bytes_per_second / 1e9:g} GB/s of memory, "
        f"{chip.ici_bytes_per_second / 1e9:g} GB/s over links, one way"
        + (dcn if topology.slices > 1 else "")
        + f" (published), of which {settings.flops:.0%}, {settings.hbm:.0%} and {settings.ici:.0%} "
        "are reached; the three overlap, except for the phases of decoding",
        f"responses of {plan.lengths.response:,.0f} tokens on average ({workload})",
        "a program reads the bytes that it writes once; a decode step has "
        f"{DECODE_OVERHEAD_SECONDS * 1e3:g} ms of overhead; a draw passes {DRAW_PASSES} times "
        "over its logits; in the roofline's table every slot is at half of a mean response",
        "hosts: measured seconds of one processor core, and "
        f"{WRITE_SECONDS:g} s per file of finished groups in a bucket; verdicts and "
        "checkpoints cost nothing",
    ]
    if plan.layout.config.environment.used:
        lines.append(ONE_TURN)
    return "Assumed:\n" + "\n".join(f"- {line}" for line in lines)


def changes(plan: Any) -> list[str]:
    """Return a line per program that does not fit: how much is missing, and what to change."""
    lines = []
    for program in plan.measured.values():
        if program.fits(plan.limit):
            continue
        missing = program.together - plan.limit
        state = sum(v for k, v in program.alive.items() if k not in ("cache", "prompts"))
        if state > plan.limit:
            advice = f"the arrays that stay on a chip take {state / GIB:.1f} GiB alone: more chips"
            advice += ", a smaller model, or config.lora.rank"
        elif program.name == "load":
            advice = "set config.sampler.load_layers to load fewer layers at once"
        elif program.name in SAMPLING:
            advice = "lower config.sampler.slots, set config.sampler.pages, or raise "
            advice += "config.mesh.decode_tensor"
        else:
            advice = "choose a stronger config.compute.remat, lower "
            advice += "config.packing.rows_per_microbatch, or raise config.mesh.tensor"
        lines.append(f"- {program.name}: {missing / GIB:.2f} GiB too much; {advice}")
    return lines


def tables(plan: Any, settings: PlanSettings) -> str:
    """Return the report of a plan for people."""
    figures = record(plan, settings)
    parts = [headline(plan), memory_table(figures), roofline_table(figures)]
    parts.append(traffic_table(plan.measured))
    if plan.step is not None:
        parts.append(step_table(plan, settings, figures["step"]))
    else:
        parts.append("It does not fit:\n\n" + "\n".join(changes(plan)))
    parts.append(assumptions(plan, settings))
    return "\n\n".join(parts)


def program_record(plan: Any, program: CompiledProgram, settings: PlanSettings) -> dict[str, Any]:
    """Return bytes and seconds of a program."""
    peaks = plan.layout.topology.chip, settings.efficiency
    unit = estimate(plan.layout, program, plan.lengths)
    bounds = {name: work.bound(*peaks) for name, work in unit.phases.items()}
    return {
        "fits": program.fits(plan.limit),
        "peak_bytes": program.peak,
        "together_bytes": program.together,
        "parts": program.parts(),
        "host_bytes": program.host,
        "unit": unit.unit,
        "work": vars(unit.each),
        "seconds": unit.each.seconds(*peaks),
        "bound": unit.each.bound(*peaks)[0],
        "unit_seconds": sum(unit.seconds(*peaks).values()),
        "phases": [f"{name} {s * 1e3:.2f} ms ({part})" for name, (part, s) in bounds.items()],
    }


def record(plan: Any, settings: PlanSettings) -> dict[str, Any]:
    """Return the report of a plan for programs, in bytes and seconds."""
    layout = plan.layout
    return {
        "fits": plan.fits,
        "topology": layout.topology.name,
        "slices": layout.topology.slices,
        "chips": layout.topology.chips,
        "mesh": dict(layout.mesh.shape),
        "limit_bytes": plan.limit,
        "versions": versions(),
        "seconds": plan.seconds,
        "host_bytes": plan.host_bytes,
        "lengths": plan.lengths._asdict(),
        "programs": {
            name: program_record(plan, program, settings) for name, program in plan.measured.items()
        },
        "step": step_record(plan, settings) if plan.step is not None else None,
        "changes": changes(plan),
        "settings": vars(settings),
    }


def variations(plan: Any) -> Iterator[tuple[str, Config, int]]:
    """Yield name, config and number of averaged steps of each simulation of `--simulate`."""
    config, replicas = plan.layout.config, plan.layout.engine.replicas
    yield "as planned", config, 1
    yield "without dynamic sampling", changed(config, "algorithm", dynamic_sampling=False), 1
    for factor in (0.5, 0.25):
        slots = max(replicas, int(config.sampler.slots * factor) // replicas * replicas)
        yield f"{slots} slots", changed(config, "sampler", slots=slots), 1
    for kept in ("unfinished", "all"):
        carrying = changed(config, "rollout", carry_over=kept)
        yield f"rollout.carry_over={kept}", carrying, CARRYING_STEPS


def simulations(plan: Any, settings: PlanSettings) -> str:
    """Return the table of `--simulate`."""
    layout, workload = plan.layout, settings.make_workload(plan.layout.config)
    rows = []
    for name, config, count in variations(plan):
        simulation = Simulation(config, layout.decoder, layout.sampling_mesh, workload, plan.costs)
        simulation.step()
        steps = [simulation.step() for _ in range(count)]

        def mean(field: str, steps: list = steps) -> float:
            return sum(getattr(step, field) for step in steps) / len(steps)

        rollout, update = mean("rollout_seconds"), mean("update_seconds")
        rows.append(
            [name, f"{rollout + update:,.1f}", f"{rollout:,.1f}", f"{update:,.1f}"]
            + [f"{mean('utilisation'):.0%}", f"{mean('tail_seconds'):,.1f}"]
            + [round(mean("asked")), round(mean("surplus"))]
            + [f"{mean('drawn_tokens') / max(1, mean('kept_tokens')):.2f}"]
        )
    header = ["simulated", "step s", "rollout s", "learn s", "busy", "tail s", "asked", "surplus"]
    longer = max(plan.step.rollout_seconds, plan.step.update_seconds)
    lag = f"With rollout.lag=1 and separate devices (this many for each): {longer:,.1f} s a step."
    return f"\n{table([*header, 'drawn per trained'], rows)}\n\n{lag}"
