"""Report of a plan: tables (Markdown) for people, one record for programs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dapo_jax.commands.plan import advice
from dapo_jax.commands.plan.chips import GIB
from dapo_jax.commands.plan.compile_programs import versions
from dapo_jax.commands.plan.cost_model import HOSTS
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.commands.plan.host_costs import WRITE_SECONDS
from dapo_jax.commands.plan.roofline import matrix_weights
from dapo_jax.commands.plan.simulate import Simulation, Step, changed
from dapo_jax.commands.plan.step_estimate import (
    DECODE_OVERHEAD_SECONDS,
    DRAW_PASSES,
    estimate,
)
from dapo_jax.reporting.notices import describe_saving
from dapo_jax.run.memory import checkpoint_bytes

PHASES = {  # of a step: the simulator's seconds in each
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
    "hosts": tuple(HOSTS),
}
CARRYING_STEPS = 6  # whose mean is shown: one that begins with much draws little
MAX_SHOWN = 6  # kinds of collectives of a program
WEAKER = (
    "A GPU's memory was not enforced by its compiler and no kernel was tried out: a weaker proof "
    "than for TPU."
)

ONE_TURN = (
    "of an environment nothing is counted: a response is one turn, without observations, without "
    "prefilling what the turns before it left, without a wait for steps"
)


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Markdown table, its columns aligned."""
    cells = [header, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, cells[1:])])


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else ""


def headline(plan: Any) -> str:
    """Headline of a plan: model, topology, sizes and compiler."""
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
    """Table of GiB of a chip by program and by part."""
    programs = figures["programs"]
    names = list(dict.fromkeys(name for program in programs.values() for name in program["parts"]))
    names.append(names.pop(names.index("temporary")))
    rows = [
        [name, *(_gib(program["parts"].get(part, 0)) for part in names)]
        + [_gib(program["together_bytes"]), "yes" if program["fits"] else "NO"]
        for name, program in programs.items()
    ]
    host = max(program["host_bytes"] for program in programs.values())
    beside = f"\n{host / GIB:.2f} GiB of a host's memory for each chip." if host else ""
    limit = figures["limit_bytes"] / GIB
    title = f"HBM of a chip in GiB, of {limit:.2f} that programs may use:\n\n"
    return title + table(["program", *names, "together", "fits"], rows) + beside


def roofline_table(figures: dict[str, Any]) -> str:
    """Table of seconds of each program's unit by what bounds it."""
    crossed = any(program["work"]["dcn_bytes"] for program in figures["programs"].values())
    parts = ("FLOP", "HBM", "ICI", *(("DCN",) if crossed else ()))
    rows = [
        [name, program["unit"], f"{program['work']['flops']:.3g}"]
        + [f"{program['seconds'][part]:.4f}" for part in parts]
        + [program["bound"], f"{program['unit_seconds']:.4f}"]
        for name, program in figures["programs"].items()
        if program["peak_bytes"] is not None  # else there is no text to count bytes in
    ]
    header = ["program", "of one", "FLOP of a chip", *(f"{part} s" for part in parts)]
    header += ["bound by", "s"]
    told = "Roofline, seconds at the assumed shares of peak:\n\n" + table(header, rows)
    phases = figures["programs"].get("decode", {}).get("phases")
    return told if not phases else f"{told}\n\ndecode, one after the other: {', '.join(phases)}"


def collectives(plan: Any) -> str:
    """Table of bytes that chips exchange, and the collectives themselves."""
    programs = plan.measured.values()
    rows = [
        [program.name, kind, _gib(times.once) or "0", _gib(times.each) or "0"]
        for program in programs
        for kind, times in sorted(program.traffic.sent.items())
    ]
    if not rows:
        return "Nothing is sent to other chips."
    lists = [
        f"{program.name}: {'; '.join(lines[:MAX_SHOWN])}"
        + (f"; {len(lines) - MAX_SHOWN} more kinds (--json)" if len(lines) > MAX_SHOWN else "")
        for program in programs
        for name, lines in program.contents.items()
        if name in ("head exchanges", "exchanges") and lines
    ]
    title = "Sent by a chip in GiB, in a call and in each turn of its loop:\n\n"
    header = ["program", "collective", "a call", "a turn"]
    return title + table(header, rows) + "\n\n" + "\n".join(lists)


def step_table(plan: Any, settings: PlanSettings, record: dict[str, Any]) -> str:
    """Table of a step's seconds, with tokens and price."""
    rows = [[name, f"{value:,.1f}"] for name, value in record["phases"].items()]
    rows.append(["a step", f"{record['seconds_step']:,.1f}"])
    lines = [
        f"{record['tokens_per_second']:,.0f} response tokens/s while sampling, "
        f"{record['trained_tokens_per_second']:,.0f} tokens/s while learning; "
        f"MFU of the update {record['update_mfu']:.0%}, of full rows "
        f"{record['update_mfu_of_full_rows']:.0%} ({settings.flops:.0%} of the peak, assumed, x "
        "useful / executed operations)",
        f"slots {record['slot_utilisation']:.0%} busy; {record['asked_groups']} groups asked for "
        f"{record['kept_groups']} kept; {record['sampled_to_kept_tokens']:.2f} tokens drawn for "
        f"each that is trained on; rows {record['fill']:.0%} full",
        f"{record['chip_hours_step']:,.2f} chip-hours a step, {record['chip_hours']:,.0f} for "
        f"{plan.layout.config.total_steps:,} steps ({record['hours']:,.1f} hours)",
    ]
    config, topology = plan.layout.config, plan.layout.topology
    size = checkpoint_bytes(config, plan.layout.decoder)
    every = config.checkpoint.every_steps
    lines.append(describe_saving(size, topology.hosts, every, record["seconds_step"]))
    if settings.price:
        lines.append(
            f"{record['dollars_step']:,.2f} dollars a step, {record['dollars']:,.0f} in all, at "
            f"{settings.price:g} a chip-hour"
        )
    return "A step:\n\n" + table(["phase", "seconds"], rows) + "\n\n" + "\n".join(lines)


def step_record(plan: Any, settings: PlanSettings) -> dict[str, Any]:
    """Figures of a step: seconds, rates, shares and price."""
    step, config, chips = plan.step, plan.layout.config, plan.layout.topology.chips
    phases = {
        name: sum(step.seconds.get(part, 0.0) for part in parts) for name, parts in PHASES.items()
    }
    rollout, update = step.rollout_seconds, step.update_seconds
    # `plan` has those of one drawn update; the step has a fill of its own.
    mfu_of_full_rows = plan.mfu / plan.lengths.fill
    apart = config.rollout.lag and plan.layout.sampling_mesh is not plan.layout.mesh
    together = max(rollout, update) if apart else rollout + update
    hours = chips * together / 3600
    return {
        "phases": phases,
        "seconds_step": together,
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
        "hours": together * config.total_steps / 3600,
        "dollars_step": settings.price * hours,
        "dollars": settings.price * hours * config.total_steps,
    }


def assumptions(plan: Any, settings: PlanSettings) -> str:
    """Assumptions of a plan: everything that was not compiled or counted."""
    topology, lengths = plan.layout.topology, plan.lengths
    chip = topology.chip
    workload = f"as recorded in {settings.law}"
    if not settings.law:
        workload = f"log-normal with spread {settings.spread:g}, {settings.accuracy:.0%} right, "
        workload += f"{settings.kept:.0%} of groups kept"
    return "\n".join(
        [
            "Assumed:",
            f"- a chip: {chip.flops_per_second / 1e12:g} TFLOP/s in bfloat16, "
            f"{chip.hbm_bytes_per_second / 1e9:g} GB/s of memory, "
            f"{chip.ici_bytes_per_second / 1e9:g} GB/s over links, one way"
            + f", {chip.dcn_bytes_per_second / 1e9:g} GB/s to other slices"
            * (topology.slices > 1)
            + " (published), of which "
            f"{settings.flops:.0%}, {settings.hbm:.0%} and {settings.ici:.0%} are reached, each "
            "hiding behind the longest; phases of decoding hide nothing",
            f"- responses of {lengths.response:,.0f} tokens on average ({workload})",
            "- what a program writes to memory is read once more; a decode step has "
            f"{DECODE_OVERHEAD_SECONDS * 1e3:g} ms of overhead; a draw passes {DRAW_PASSES} times "
            "over its logits; in the roofline's table every slot is at half of a mean response",
            "- hosts: seconds of one processor core that were measured, and "
            f"{WRITE_SECONDS:g} s for each file of finished groups in a bucket; verdicts and "
            "checkpoints cost nothing",
            *([f"- {ONE_TURN}"] if plan.layout.config.environment.used else []),
        ]
    )


def tables(plan: Any, settings: PlanSettings) -> str:
    """Whole report of a plan for people."""
    figures = record(plan, settings)
    parts = [headline(plan), memory_table(figures), roofline_table(figures), collectives(plan)]
    if plan.step is not None:
        parts.append(step_table(plan, settings, figures["step"]))
    else:
        parts.append("It does not fit:\n\n" + "\n".join(advice.changes(plan)))
    parts.append(assumptions(plan, settings))
    return "\n\n".join(parts)


def record(plan: Any, settings: PlanSettings) -> dict[str, Any]:
    """Whole report of a plan for programs; bytes and seconds."""
    layout = plan.layout
    chip = layout.topology.chip
    programs = {}
    for name, program in plan.measured.items():
        unit = estimate(layout, program, plan.lengths)
        programs[name] = {
            "fits": program.fits(plan.limit),
            "peak_bytes": program.peak,
            "together_bytes": program.together,
            "parts": program.parts(),
            "host_bytes": program.host,
            "unit": unit.unit,
            "work": dataclasses.asdict(unit.each),
            "seconds": unit.each.seconds(chip, settings.efficiency),
            "bound": unit.each.bound(chip, settings.efficiency)[0],
            "unit_seconds": sum(unit.seconds(chip, settings.efficiency).values()),
            "phases": [
                f"{name} {work.bound(chip, settings.efficiency)[1] * 1e3:.2f} ms "
                f"({work.bound(chip, settings.efficiency)[0]})"
                for name, work in unit.phases.items()
            ],
            "contents": program.contents,
        }
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
        "lengths": dataclasses.asdict(plan.lengths),
        "programs": programs,
        "step": step_record(plan, settings) if plan.step is not None else None,
        "changes": [] if plan.fits else advice.changes(plan),
        "settings": dataclasses.asdict(settings),
    }


def simulations(plan: Any, settings: PlanSettings) -> str:
    """Table of steps with other slots, without the filter, with carry-over or a lag."""
    config, layout = plan.layout.config, plan.layout
    workload, rows = settings.make_workload(config), []

    def add(name: str, config: Any = config, count: int = 1) -> None:
        simulation = Simulation(config, layout.decoder, layout.sampling_mesh, workload, plan.costs)
        simulation.step()
        steps = [simulation.step() for _ in range(count)]

        def mean(value: Callable[[Step], float]) -> float:
            return sum(map(value, steps)) / count

        rollout, update = mean(lambda s: s.rollout_seconds), mean(lambda s: s.update_seconds)
        rows.append(
            [name, f"{rollout + update:,.1f}", f"{rollout:,.1f}", f"{update:,.1f}"]
            + [f"{mean(lambda s: s.utilisation):.0%}", f"{mean(lambda s: s.tail_seconds):,.1f}"]
            + [round(mean(lambda s: s.asked)), round(mean(lambda s: s.surplus))]
            + [f"{mean(lambda s: s.drawn_tokens) / max(1, mean(lambda s: s.kept_tokens)):.2f}"]
        )

    add("as planned")
    add("without dynamic sampling", changed(config, "algorithm", dynamic_sampling=False))
    slots, replicas = config.sampler.slots, layout.engine.replicas
    for factor in (0.5, 0.25):
        fewer = max(replicas, int(slots * factor) // replicas * replicas)
        add(f"{fewer} slots", changed(config, "sampler", slots=fewer))
    for kept in ("unfinished", "all"):
        add(
            f"rollout.carry_over={kept}",
            changed(config, "rollout", carry_over=kept),
            CARRYING_STEPS,
        )
    header = ["simulated", "step s", "rollout s", "learn s", "busy", "tail s", "asked", "surplus"]
    rollout, update = plan.step.rollout_seconds, plan.step.update_seconds
    lag = (
        f"With rollout.lag=1 and devices of their own (this many for each): "
        f"{max(rollout, update):,.1f} s a step."
    )
    return f"\n{table([*header, 'drawn per trained'], rows)}\n\n{lag}"
