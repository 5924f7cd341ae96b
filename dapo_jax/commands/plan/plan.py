"""Plan of a run: compile its programs, simulate a step, print the result."""

import dataclasses
import json
import pathlib
import resource
import sys
import time

from dapo_jax.commands.plan import tables
from dapo_jax.commands.plan.chips import GIB, check_flag, parse
from dapo_jax.commands.plan.compile_programs import CompiledProgram, Compiler, cache_folder, limit
from dapo_jax.commands.plan.cost_model import Costs
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.commands.plan.programs import Layout, lay_out, programs
from dapo_jax.commands.plan.simulate import Simulation, Step
from dapo_jax.commands.plan.step_estimate import (
    Lengths,
    measure_lengths,
    step_costs,
    training_mfu,
)
from dapo_jax.commands.plan.workload import Workload
from dapo_jax.config.experiment import Config


@dataclasses.dataclass(frozen=True)
class Plan:
    """Programs, costs and a simulated step of a run on a topology.

    Attributes:
        limit: bytes of a chip that programs may use.
        costs, step, mfu: None and 0 if not everything fits; the step is the second of a run.
        seconds, host_bytes: time and peak memory that planning took on this machine.
    """

    layout: Layout
    lengths: Lengths
    measured: dict[str, CompiledProgram]
    limit: int
    costs: Costs | None = None
    step: Step | None = None
    mfu: float = 0.0
    seconds: float = 0.0
    host_bytes: int = 0

    @property
    def fits(self) -> bool:
        return all(program.fits(self.limit) for program in self.measured.values())


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compiler(layout: Layout, settings: PlanSettings) -> Compiler:
    """Return a compiler with the cache folder that the settings name."""
    folders = {"auto": cache_folder(), "none": None}
    folder = folders[settings.cache] if settings.cache in folders else pathlib.Path(settings.cache)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        check_flag(False, "cache", str(folder), f"a folder that can be written ({error.strerror})")
    return Compiler(layout, folder)


def measure_all(
    layout: Layout, settings: PlanSettings, microbatches: int
) -> dict[str, CompiledProgram]:
    """Compile every program of the run."""
    layout_compiler, measured = compiler(layout, settings), {}
    for program in programs(layout, microbatches):
        compiled = measured[program.name] = layout_compiler.measure(program)
        peak = f"{compiled.needs / GIB:.2f} GiB" if compiled.peak is not None else "does not fit"
        print_progress(f"compiled {program.name}: {peak}, {compiled.compile_seconds:.0f} s")
    return measured


def simulate_step(layout: Layout, workload: Workload, costs: Costs) -> Step:
    """Simulate the second step of a run; the first lacks an estimate of the kept groups."""
    print_progress("simulating a step")
    simulation = Simulation(layout.config, layout.decoder, layout.sampling_mesh, workload, costs)
    simulation.step()
    return simulation.step()


def make(config: Config, settings: PlanSettings) -> Plan:
    """Make the plan of a config."""
    started, topology = time.perf_counter(), parse(settings.topology, settings.slices)
    workload = settings.make_workload(config)
    print_progress(f"describing {topology}")
    layout = lay_out(config, topology)
    lengths = measure_lengths(config, layout.decoder, workload)
    measured = measure_all(layout, settings, lengths.microbatches)
    plan = Plan(layout, lengths, measured, limit(layout))
    if plan.fits:
        costs = step_costs(layout, measured, settings.efficiency, lengths)
        plan = dataclasses.replace(
            plan,
            costs=costs,
            step=simulate_step(layout, workload, costs),
            mfu=training_mfu(layout, lengths, costs),
        )
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return dataclasses.replace(plan, seconds=time.perf_counter() - started, host_bytes=host)


def plan(config: Config, settings: PlanSettings) -> int:
    """Print the plan; return the exit code."""
    made = make(config, settings)
    if settings.json:
        print(json.dumps(tables.record(made, settings)))
    else:
        print(tables.tables(made, settings))
        if settings.simulate and made.costs is not None:
            print(tables.simulations(made, settings))
    return 0 if made.fits else 1
