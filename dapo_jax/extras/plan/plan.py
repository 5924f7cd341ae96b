"""Plan of a run: compile its programs, simulate a step, report as JSON or tables."""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

from dapo_jax.commands.command_line import check_flag
from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan.chips import GIB, parse
from dapo_jax.extras.plan.flags import PlanSettings
from dapo_jax.extras.plan.fleet import Fleet
from dapo_jax.extras.plan.programs import (
    SAMPLING,
    CompiledProgram,
    Compiler,
    Layout,
    Program,
    decoding_programs,
    lay_out,
    limit,
    programs,
    versions,
)
from dapo_jax.extras.plan.roofline import (
    Lengths,
    estimate,
    measure_lengths,
    step_costs,
    training_mfu,
)
from dapo_jax.extras.plan.samplers import lay_out_sampler, open_fleet
from dapo_jax.extras.plan.simulate import HOSTS, Costs, Simulation, Step
from dapo_jax.extras.plan.workload import Workload

PHASES = {  # the simulator's costs in each phase of a step
    "samplers": ("samplers",),
    "load the decoding weights": ("load",),
    "prefill": ("prefill_token",),
    "decode: keys and values": ("read_token",),
    "decode: products": ("decode_products",),
    "decode: exchange": ("decode_exchange",),
    "decode: draw": ("decode_draw",),
    "decode: overhead": ("burst", "decode_step", "slot_step", "response"),
    "score": ("score_token",),
    "update": ("update", "update_token"),
    "version of the policy": ("version",),
    "hosts": HOSTS,
}
SAMPLING_ADVICE = (
    "lower config.sampler.slots, set config.sampler.pages, or raise config.mesh.decode_tensor"
)
TRAINING_ADVICE = (
    "choose a stronger config.compute.remat, lower config.packing.rows_per_microbatch, or raise "
    "config.mesh.tensor"
)

PREEMPTED_STEPS = 5  # simulated if samplers are preempted


@dataclasses.dataclass(frozen=True)
class Plan:
    """Programs of a run on a topology and a simulated step."""

    layout: Layout
    lengths: Lengths
    measured: dict[str, CompiledProgram]
    limit: int  # bytes of a chip that programs may use
    step: Step | None = None  # the second of a run; None if not everything fits
    mfu: float = 0.0
    seconds: float = 0.0  # that planning took on this machine
    sampler: "Plan | None" = None  # of one in another process

    @property
    def fits(self) -> bool:
        own = all(program.fits(self.limit) for program in self.measured.values())
        return own and (not self.sampler or self.sampler.fits)

    def costs(self, settings: PlanSettings) -> Costs:
        """Return the simulator's costs by the roofline."""
        chip = settings.reached(self.layout.topology.chip)
        return step_costs(self.layout, self.measured, chip, self.lengths)


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_compiler(layout: Layout, settings: PlanSettings) -> Compiler:
    """Return a compiler with the cache folder that the settings name."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    automatic = pathlib.Path(base) / "dapo_jax" / "plan"
    folder = automatic if settings.cache == "auto" else pathlib.Path(settings.cache)
    if settings.cache == "none":
        return Compiler(layout, None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        check_flag(False, "cache", str(folder), f"a folder that can be written ({error.strerror})")
    return Compiler(layout, folder)


def simulate_step(
    layout: Layout, workload: Workload, costs: Costs, fleet: Fleet | None, steps: int
) -> Step:
    """Return the simulated step of median sampling time, after a step without an estimate."""
    print_progress("simulating a step")
    model = layout.decoder, layout.sampling_mesh
    simulation = Simulation(layout.config, *model, workload, costs, fleet)
    simulation.step()
    made = [simulation.step() for _ in range(steps)]
    return sorted(made, key=lambda step: step.rollout_seconds)[steps // 2]


def compile_all(
    layout: Layout, wanted: Iterable[Program], settings: PlanSettings
) -> dict[str, CompiledProgram]:
    """Compile programs of a layout; return them by name."""
    compiler, measured = make_compiler(layout, settings), {}
    for program in wanted:
        compiled = measured[program.name] = compiler.measure(program)
        peak = f"{_gib(compiled.needs / GIB)} GiB" if compiled.peak is not None else "does not fit"
        print_progress(f"compiled {program.name}: {peak}, {compiled.compile_seconds:.0f} s")
    return measured


def make(config: Config, settings: PlanSettings) -> Plan:
    """Make the plan of a config."""
    started, topology = time.perf_counter(), parse(settings.topology, settings.slices)
    workload = settings.make_workload(config)
    layout, sampler = lay_out(config, topology), None
    other = lay_out_sampler(config, settings) if settings.samplers else None
    lengths = measure_lengths(config, layout.decoder, workload)
    measured = compile_all(layout, programs(layout, lengths.microbatches), settings)
    if other:
        theirs = compile_all(other, decoding_programs(other, {}), settings)
        sampler = Plan(other, lengths, theirs, limit(other))
    plan = Plan(layout, lengths, measured, limit(layout), sampler=sampler)
    if plan.fits:
        costs, fleet, steps = plan.costs(settings), None, 1
        if sampler:
            law = sampler.costs(settings), settings, topology.hosts, workload
            fleet = open_fleet(sampler.layout, *law)
            steps = PREEMPTED_STEPS if settings.preemptions else 1
        step = simulate_step(layout, workload, costs, fleet, steps)
        plan = dataclasses.replace(plan, step=step, mfu=training_mfu(layout, lengths, costs))
    return dataclasses.replace(plan, seconds=time.perf_counter() - started)


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [header, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in cells)
    first, *rest = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([first, f"|{rule}|", *rest])


def _program_record(plan: Plan, program: CompiledProgram, settings: PlanSettings) -> dict:
    chip = settings.reached(plan.layout.topology.chip)
    unit = estimate(plan.layout, program, plan.lengths)
    seconds, phases = unit.each.seconds(chip), unit.seconds(chip)
    return {
        "fits": program.fits(plan.limit),
        "peak_bytes": program.peak,
        "together_bytes": program.together,
        "parts": program.parts(),
        "host_bytes": program.host,
        "unit": unit.unit,
        "work": vars(unit.each),
        "seconds": seconds,
        "bound": max(seconds, key=seconds.__getitem__),
        "unit_seconds": sum(phases.values()),
        "phases": phases if unit.phases else {},
    }


def _step_record(plan: Plan, settings: PlanSettings) -> dict[str, Any] | None:
    """Return the figures of a step: seconds, rates, fractions and price."""
    step, config, chips = plan.step, plan.layout.config, plan.layout.topology.chips
    if step is None:
        return None
    rollout, update = step.rollout_seconds, step.update_seconds
    # `plan.mfu` is for the rows of one sampled update; the step's rows have another fill.
    mfu_of_full_rows = plan.mfu / plan.lengths.fill
    separate = plan.sampler or plan.layout.sampling_mesh is not plan.layout.mesh
    overlap = config.rollout.staleness and separate
    seconds = max(rollout, update) if overlap else rollout + update
    hours = chips * seconds / 3600
    theirs = 0.0
    if plan.sampler:
        theirs = settings.samplers * plan.sampler.layout.topology.chips * seconds / 3600
    dollars = settings.price * hours + settings.sampler_price * theirs
    return {
        "phases": {
            name: sum(step.seconds.get(part, 0.0) for part in parts)
            for name, parts in PHASES.items()
            if any(part in step.seconds for part in parts)
        },
        "seconds_step": seconds,
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
        "sampler_chip_hours_step": theirs,
        "dollars_step": dollars,
        "dollars": dollars * config.total_steps,
    }


def record(plan: Plan, settings: PlanSettings) -> dict[str, Any]:
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
        "lengths": plan.lengths._asdict(),
        "programs": {
            name: _program_record(plan, program, settings)
            for name, program in plan.measured.items()
        },
        "sampler": record(plan.sampler, settings) if plan.sampler else None,
        "step": _step_record(plan, settings),
        "changes": changes(plan),
        "settings": vars(settings),
    }


def changes(plan: Plan) -> list[str]:
    """Return a line per program that does not fit: how much is missing, and what to change."""
    lines = []
    for name, program in plan.measured.items():
        state = sum(v for k, v in program.alive.items() if k not in ("cache", "prompts"))
        advice = TRAINING_ADVICE
        if state > plan.limit:
            advice = f"the arrays that stay on a chip take {state / GIB:.1f} GiB alone: more chips"
            advice += ", a smaller model, or config.lora.rank"
        elif name == "load":
            advice = "set config.sampler.load_layers to load fewer layers at once"
        elif name in SAMPLING:
            advice = SAMPLING_ADVICE
        if not program.fits(plan.limit):
            missing = (program.together - plan.limit) / GIB
            lines.append(f"- {name}: {missing:.2f} GiB too much; {advice}")
    if plan.sampler:
        lines += [f"- a sampler's {line[2:]}" for line in changes(plan.sampler)]
    return lines


def _headline(plan: Plan) -> str:
    topology, mesh, sampling = plan.layout.topology, plan.layout.mesh, plan.layout.sampling_mesh
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    if sampling is not mesh:
        sizes += f" learn, {sampling.size} chips sample"
    model = plan.layout.config.model.folder
    line = f"{model} on {topology}, {topology.chips} chips: {sizes or 'one device'}"
    compiler = f"compiled by {versions()} in {plan.seconds:.0f} s; nothing ran on a device"
    return f"{line}\n{compiler}"


def _gib(size: float) -> str:
    return f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"


def _memory_table(figures: dict[str, Any]) -> str:
    programs = figures["programs"]
    names = dict.fromkeys(name for program in programs.values() for name in program["parts"])
    names = [*(name for name in names if name != "temporary"), "temporary"]
    rows = []
    for name, program in programs.items():
        sizes = [program["parts"].get(part, 0) / GIB for part in names]
        cells = [_gib(size) if size else "" for size in sizes]
        fits = "yes" if program["fits"] else "NO"
        rows.append([name, *cells, _gib(program["together_bytes"] / GIB), fits])
    title = f"HBM of a chip in GiB, of {figures['limit_bytes'] / GIB:.2f} that programs may use:"
    return f"{title}\n\n{table(['program', *names, 'together', 'fits'], rows)}"


def _roofline_table(figures: dict[str, Any]) -> str:
    programs = figures["programs"]
    crossed = any(program["work"]["dcn_bytes"] for program in programs.values())
    parts = ["FLOP", "HBM", "ICI", *["DCN"] * crossed]
    rows = [
        [name, program["unit"], f"{program['work']['flops']:.3g}"]
        + [f"{program['seconds'][part]:.3g}" for part in parts]
        + [program["bound"], f"{program['unit_seconds']:.3g}"]
        for name, program in programs.items()
        if program["peak_bytes"] is not None  # else there is no text to count bytes in
    ]
    header = ["program", "of one", "FLOP of a chip", *(f"{part} s" for part in parts)]
    text = table([*header, "bound by", "s"], rows)
    return f"Roofline, seconds at the assumed shares of peak:\n\n{text}"


def _step_table(plan: Plan, settings: PlanSettings, step: dict[str, Any]) -> str:
    phases = step["phases"] | {"a step": step["seconds_step"]}
    rows = [
        [name, f"{value:,.1f}" if value >= 1 else f"{value:.2g}"] for name, value in phases.items()
    ]
    config = plan.layout.config
    price, others = "", ""
    if plan.sampler:
        others = f" of the trainer and {step['sampler_chip_hours_step']:,.2f} of the samplers"
    if step["dollars_step"]:
        price = f"; at {settings.price:g}"
        price += f" and {settings.sampler_price:g}" if plan.sampler else ""
        price += f" dollars a chip-hour {step['dollars_step']:,.2f} a step "
        price += f"and {step['dollars']:,.0f} in all"
    lines = [
        f"MFU of the update {step['update_mfu']:.0%}, of full rows "
        f"{step['update_mfu_of_full_rows']:.0%} ({settings.flops:.0%} of the peak, assumed, x "
        f"useful / executed operations); rows {step['fill']:.0%} full",
        f"slots {step['slot_utilisation']:.0%} busy; {step['asked_groups']} groups asked for "
        f"{step['kept_groups']} kept; {step['sampled_to_kept_tokens']:.2f} tokens drawn for "
        f"each that is trained on",
        f"{step['chip_hours_step']:,.2f} chip-hours{others} a step, {step['chip_hours']:,.0f} for "
        f"{config.total_steps:,} steps ({step['hours']:,.1f} hours){price}",
        f"assumed: {settings.flops:.0%} of a chip's peak FLOP/s, {settings.hbm:.0%} of its memory's"
        f" and {settings.ici:.0%} of its links' rate; responses of {plan.lengths.response:,.0f} "
        f"tokens on average; measured seconds of hosts; verdicts and checkpoints cost nothing",
    ]
    return "A step:\n\n" + table(["phase", "seconds"], rows) + "\n\n" + "\n".join(lines)


def plan(config: Config, settings: PlanSettings) -> int:
    """Print the plan; return the exit code."""
    made = make(config, settings)
    figures = record(made, settings)
    if settings.json:
        print(json.dumps(figures))
    else:
        print("\n\n".join(tables(made, settings, figures)))
    return 0 if made.fits else 1


def tables(plan: Plan, settings: PlanSettings, figures: dict[str, Any]) -> list[str]:
    """Return the parts of the report for people."""
    last = "It does not fit:\n\n" + "\n".join(figures["changes"])
    if figures["step"]:
        last = _step_table(plan, settings, figures["step"])
    parts = [_headline(plan), _memory_table(figures), _roofline_table(figures)]
    if plan.sampler:
        title = f"{settings.samplers} samplers, each: {_headline(plan.sampler)}"
        theirs = figures["sampler"]
        parts += [title, _memory_table(theirs), _roofline_table(theirs)]
    return [*parts, last]
