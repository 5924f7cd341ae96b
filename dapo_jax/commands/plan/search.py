"""Search for meshes, rows and slots that fit a topology, the fastest and so the cheapest first."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from dapo_jax.commands.plan import plan
from dapo_jax.commands.plan.chips import GIB, Topology, parse
from dapo_jax.commands.plan.compile_programs import CompiledProgram, limit
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.commands.plan.programs import Layout, lay_out, sampling_programs, training_programs
from dapo_jax.commands.plan.published_shapes import read_shape
from dapo_jax.commands.plan.simulate import changed
from dapo_jax.commands.plan.step_estimate import measure_lengths, step_costs, token_bytes
from dapo_jax.commands.plan.tables import table
from dapo_jax.commands.plan.targets import target_devices
from dapo_jax.config.experiment import Config
from dapo_jax.runtime.settings import ConfigError

REMATS = ("none", "dots", "attention", "full", "offload")  # from the fastest to the smallest
MAX_ROWS = 4  # of a chip, in a microbatch
FEWEST_SLOTS = 1  # of a replica


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Config that fits, with the seconds of a step and the memory of its programs."""

    config: Config
    seconds: float
    update_gib: float
    decode_gib: float

    def row(self) -> list[Any]:
        mesh = self.config.mesh
        sizes = f"fsdp={mesh.fsdp},decode_tensor={mesh.decode_tensor},tensor={mesh.tensor}"
        rows, slots = self.config.packing.rows_per_microbatch, self.config.sampler.slots
        parts = [sizes, self.config.compute.remat, rows, slots]
        return [*parts, f"{self.update_gib:.1f}", f"{self.decode_gib:.1f}", f"{self.seconds:,.1f}"]


HEADER = ["mesh", "remat", "rows a microbatch", "slots", "update GiB", "decode GiB", "step s"]


def meshes(config: Config, topology: Topology, kv_heads: int) -> Iterator[Config]:
    """Configs of every mesh: shards while training, and as many or more while decoding."""
    chips = topology.chips // topology.slices
    for decoding in (1, 2, 4, 8, 16):
        for training in (1, 2, 4, 8, 16):
            fits = (
                decoding % training == 0
                and chips % (decoding * config.mesh.context) == 0
                and kv_heads % decoding == 0
            )
            if fits:
                sizes = {"tensor": training, "decode_tensor": decoding // training}
                rest = chips // decoding // config.mesh.context
                yield changed(config, "mesh", data=topology.slices, fsdp=rest, **sizes)


class Search:
    """Trial of configs on a topology; everything is compiled once."""

    def __init__(self, config: Config, settings: PlanSettings):
        self._config, self._settings = config, settings
        self._topology = parse(settings.topology, settings.slices)
        self._devices, self._workload = (
            target_devices(self._topology),
            settings.make_workload(config),
        )

    def _lay_out(self, config: Config) -> Layout:
        return lay_out(config, self._topology, self._devices)

    def _measure(self, layout: Layout, programs: Any, name: str) -> CompiledProgram:
        compiler = plan.compiler(layout, self._settings)
        (program,) = (program for program in programs if program.name == name)
        return compiler.measure(program)

    def _update(self, config: Config) -> CompiledProgram | None:
        """Compiled update of a config; None where it does not fit."""
        try:
            layout = self._lay_out(config)
        except ConfigError:
            return None
        lengths = measure_lengths(config, layout.decoder, self._workload)
        update = self._measure(layout, training_programs(layout, lengths.microbatches), "update")
        room = update.fits(limit(layout))
        memory = f"{update.together / GIB:.1f} GiB" + ("" if room else ": too much")
        plan.say(f"{Candidate(config, 0, 0, 0).row()[:3]} update {memory}")
        return update if room else None

    def train(self, config: Config) -> tuple[Config, CompiledProgram] | None:
        """Config with the least recomputed, and then the most rows of a chip, with its update."""
        shards_of_rows = config.mesh.fsdp * config.mesh.decode_tensor
        config = changed(config, "packing", rows_per_microbatch=shards_of_rows)
        for remat in REMATS:
            tried = changed(config, "compute", remat=remat)
            update = self._update(tried)
            if update:
                break
        else:
            return None
        for rows in (2, MAX_ROWS):
            more = changed(tried, "packing", rows_per_microbatch=rows * shards_of_rows)
            fitting = self._update(more)
            if not fitting:
                break
            tried, update = more, fitting
        return tried, update

    def sample(self, config: Config) -> tuple[Config, CompiledProgram] | None:
        """Config with the most slots of full length that fit, with its decoding."""
        replicas = config.mesh.fsdp * config.mesh.context
        fewest = changed(config, "sampler", slots=FEWEST_SLOTS * replicas, pages=0)
        layout = self._lay_out(fewest)
        decode = self._measure(layout, sampling_programs(layout), "decode")
        free = limit(layout) - decode.together
        more = int(free / (token_bytes(layout) * layout.engine.cache_tokens))
        rollout = config.rollout  # slots for more responses than a batch has would stand idle
        batch = rollout.prompts_per_step * rollout.samples_per_prompt
        more = min(more, -(-batch // replicas) - FEWEST_SLOTS)
        while decode.peak is not None and free > 0:
            slots = (FEWEST_SLOTS + more) * replicas
            tried = changed(config, "sampler", slots=slots, pages=0)
            layout = self._lay_out(tried)
            decode = self._measure(layout, sampling_programs(layout), "decode")
            plan.say(f"{slots} slots: {decode.together / GIB:.1f} GiB")
            if decode.fits(limit(layout)):
                return tried, decode
            if not more:
                break
            more = more * 9 // 10
        return None

    def try_mesh(self, config: Config) -> Candidate | None:
        """Best config of a mesh; None where nothing fits."""
        trained = self.train(config)
        sampled = self.sample(trained[0]) if trained else None
        if not trained or not sampled:
            return None
        config, decode = sampled
        layout = self._lay_out(config)
        measured = {"update": trained[1], "decode": decode}
        lengths = measure_lengths(config, layout.decoder, self._workload)
        costs = step_costs(layout, measured, self._settings.efficiency, lengths)
        step = plan.simulate_step(layout, self._workload, costs)
        seconds = step.rollout_seconds + step.update_seconds
        return Candidate(config, seconds, trained[1].together / GIB, decode.together / GIB)

    def __call__(self) -> list[Candidate]:
        """Candidates that fit, the fastest first."""
        kv_heads = read_shape(self._config.model.folder).kv_heads
        tried = map(self.try_mesh, meshes(self._config, self._topology, kv_heads))
        return sorted(filter(None, tried), key=lambda candidate: candidate.seconds)


def search(config: Config, settings: PlanSettings) -> int:
    """Prints the configs that fit; returns the exit code."""
    rows = [candidate.row() for candidate in Search(config, settings)()]
    if settings.json:
        records = [dict(zip(HEADER, row, strict=True)) for row in rows]
        print(json.dumps({"fits": bool(rows), "found": records}))
    elif rows:
        print(table(HEADER, rows))
    else:
        print(
            f"Nothing fits on {settings.topology}: more chips, a smaller model or config.lora.rank"
        )
    return 0 if rows else 1
