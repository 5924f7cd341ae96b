"""Plan of a run: compile its programs, estimate a step, report as JSON or tables."""

import json
import math
import os
import pathlib
import sys
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.extras.plan import programs
from dapo_jax.extras.plan.chips import GIB, parse
from dapo_jax.extras.plan.estimate import assumed_lengths, calibrated_step
from dapo_jax.extras.plan.main import PlanSettings
from dapo_jax.extras.plan.programs import SAMPLING, CompiledProgram, Compiler, Layout
from dapo_jax.run.command_line import check_flag

SOURCE = "- {phase}: {model} on {chip}, {efficiency:.0%} of the peak, {source}, {date}"
SAMPLING_ADVICE = (
    "lower config.sampler.slots, set config.sampler.pages, or raise config.mesh.decode_tensor"
)
TRAINING_ADVICE = (
    "choose a stronger config.compute.remat, lower config.packing.rows_per_microbatch, or raise "
    "config.mesh.tensor"
)


def make_compiler(layout: Layout, cache: str) -> Compiler:
    """Return a compiler with the cache folder of that flag."""
    if cache == "none":
        return Compiler(layout, None)
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = base / "dapo_jax" / "plan" if cache == "auto" else pathlib.Path(cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        check_flag(False, "cache", str(folder), f"a folder that can be written ({error.strerror})")
    return Compiler(layout, folder)


def compile_all(layout: Layout, settings: PlanSettings) -> dict[str, CompiledProgram]:
    """Compile the programs of a layout; return them by name."""
    config, compiler, measured = layout.config, make_compiler(layout, settings.cache), {}
    rows, tokens = config.rows(), assumed_lengths(config, settings).trained
    each = config.rollout.updates_per_rollout * rows.rows_per_microbatch * rows.row_tokens
    for program in programs.programs(layout, math.ceil(tokens / each)):
        compiled = measured[program.name] = compiler.measure(program)
        needs, spent = amount(compiled.needs / GIB), compiled.compile_seconds
        print(f"compiled {program.name}: {needs} GiB, {spent:.0f} s", file=sys.stderr, flush=True)
    return measured


def make(config: Config, settings: PlanSettings) -> dict[str, Any]:
    """Return the plan of a config, in bytes and seconds."""
    layout = programs.lay_out(config, parse(settings.topology, settings.slices))
    measured, most = compile_all(layout, settings), layout.topology.limit
    fits, step = all(program.fits(most) for program in measured.values()), None
    if fits:
        weights = measured["decode"].alive["decoding weights"]
        step = calibrated_step(layout, weights, settings)
    return {
        "fits": fits,
        "model": config.model.folder,
        "topology": layout.topology.name,
        "slices": layout.topology.slices,
        "chips": layout.topology.chips,
        "devices": layout.topology.chips * layout.topology.chip.devices,
        "sampling_devices": layout.sampling_mesh.size,
        "mesh": dict(layout.mesh.shape),
        "limit_bytes": most,
        "versions": programs.versions(),
        "seconds": sum(program.compile_seconds for program in measured.values()),
        "programs": {name: program.record(most) for name, program in measured.items()},
        "step": step,
        "changes": changes(measured, most),
        "settings": vars(settings),
    }


def changes(measured: dict[str, CompiledProgram], most: int) -> list[str]:
    """Return a line per program that does not fit: how much is missing, and what to change."""
    lines = []
    for name, program in measured.items():
        state = sum(v for k, v in program.alive.items() if k not in ("cache", "prompts"))
        advice = SAMPLING_ADVICE if name in SAMPLING else TRAINING_ADVICE
        if state > most:
            advice = f"the arrays that stay on a chip take {state / GIB:.1f} GiB alone: more chips"
            advice += ", a smaller model, or config.lora.rank"
        elif name == "load":
            advice = "set config.sampler.load_layers to load fewer layers at once"
        if not program.fits(most):
            missing = (program.together - most) / GIB
            lines.append(f"- {name}: {missing:.2f} GiB too much; {advice}")
    return lines


def _table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in [header, *rows])
    first, *rest = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([first, f"|{rule}|", *rest])


def amount(value: float) -> str:
    """Return a number for people; a small one is not 0.00."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def _headline(made: dict[str, Any]) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in made["mesh"].items() if size > 1)
    learning, sampling = math.prod(made["mesh"].values()), made["sampling_devices"]
    if learning + sampling == made["devices"]:
        sizes += f" learn, {sampling} devices sample"
    slices = f"{made['slices']} x " if made["slices"] > 1 else ""
    on = f"{slices}{made['topology']}, {made['chips']} chips: {sizes or 'one device'}"
    compiler = f"compiled by {made['versions']} in {made['seconds']:.0f} s; nothing ran on a device"
    return f"{made['model']} on {on}\n{compiler}"


def _memory_table(made: dict[str, Any]) -> str:
    compiled = made["programs"]
    names = dict.fromkeys(name for program in compiled.values() for name in program["parts"])
    names = [*(name for name in names if name != "temporary"), "temporary"]
    rows = []
    for name, program in compiled.items():
        sizes = [program["parts"].get(part, 0) / GIB for part in names]
        cells = [amount(size) if size else "" for size in sizes]
        together = amount(program["together_bytes"] / GIB)
        rows.append([name, *cells, together, "yes" if program["fits"] else "NO"])
    title = f"HBM of a device in GiB, of {made['limit_bytes'] / GIB:.2f} that programs may use:"
    return f"{title}\n\n{_table(['program', *names, 'together', 'fits'], rows)}"


def _step_table(settings: PlanSettings, step: dict[str, Any]) -> str:
    flops, seconds, price = step["flops"], step["seconds"], ""
    rows = [[name, f"{flops[name]:.3g}", amount(spent)] for name, spent in seconds.items()]
    rows.append(["a step", f"{sum(flops.values()):.3g}", amount(step["seconds_step"])])
    fast, slow = map(amount, step["seconds_range"])
    if settings.price:
        price = f"; at {settings.price:g} dollars a chip-hour {amount(step['dollars_step'])} a "
        price += f"step and {amount(step['dollars'])} in all"
    lines = [
        f"a step takes {fast} to {slow} s by the three nearest published runs; the nearest are",
        *map(SOURCE.format_map, step["sources"]),
        f"MFU of the update {step['update_mfu']:.0%}",
        f"{step['decode_steps']:,.0f} decode steps of {step['live_slots']:,.0f} live slots, each "
        f"reads {amount(step['decode_step_bytes'] / GIB)} GiB of a chip",
        f"{amount(step['chip_hours_step'])} chip-hours a step, {amount(step['chip_hours'])} for "
        f"all steps ({amount(step['hours'])} hours){price}",
        f"assumed: {step['flops_peak']:.0%} of peak FLOP/s, {step['hbm']:.0%} of the memory's"
        f" rate, {settings.busy:.0%} of slots busy, {settings.kept:.0%} of groups kept, responses "
        f"of {step['response_tokens']:,.0f} tokens; rewards and hosts cost nothing",
    ]
    table = _table(["phase", "FLOP", "seconds"], rows)
    return f"A step:\n\n{table}\n\n" + "\n".join(lines)


def tables(made: dict[str, Any], settings: PlanSettings) -> str:
    """Return the plan as tables of text."""
    last = "It does not fit:\n\n" + "\n".join(made["changes"])
    if made["step"]:
        last = _step_table(settings, made["step"])
    return "\n\n".join([_headline(made), _memory_table(made), last])


def plan(config: Config, settings: PlanSettings) -> int:
    """Print the plan; return the exit code."""
    made = make(config, settings)
    print(json.dumps(made) if settings.json else tables(made, settings))
    return 0 if made["fits"] else 1
