"""Search for the meshes, rows and slots that fit a topology, the cheapest first."""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from dapo_jax.commands.plan import plan
from dapo_jax.commands.plan.chips import GIB, Topology, parse
from dapo_jax.commands.plan.flags import PlanSettings
from dapo_jax.commands.plan.programs import (
    CompiledProgram,
    Layout,
    lay_out,
    limit,
    sampling_programs,
    training_programs,
)
from dapo_jax.commands.plan.published_shapes import read_shape
from dapo_jax.commands.plan.roofline import measure_lengths, step_costs
from dapo_jax.commands.plan.targets import target_devices
from dapo_jax.config.experiment import Config
from dapo_jax.run import memory
from dapo_jax.runtime.settings import ConfigError, with_values

REMATS = ("none", "dots", "attention", "full", "offload")  # from the fastest to the smallest
MORE_ROWS = (2, 4)  # per shard in a microbatch
SIZES = (1, 2, 4, 8, 16)
HEADER = ["mesh", "remat", "rows a microbatch", "slots", "update GiB", "decode GiB", "step s"]


class Candidate(NamedTuple):
    """A config that fits, with the seconds of a step and the memory of its programs."""

    config: Config
    seconds: float
    update_gib: float
    decode_gib: float

    def row(self) -> list[Any]:
        config = self.config
        sizes = [f"{self.update_gib:.1f}", f"{self.decode_gib:.1f}", f"{self.seconds:,.1f}"]
        return [*describe(config), config.sampler.slots, *sizes]


def describe(config: Config) -> list[Any]:
    """Return mesh, recomputation and rows of a config."""
    mesh = config.mesh
    sizes = f"fsdp={mesh.fsdp},decode_tensor={mesh.decode_tensor},tensor={mesh.tensor}"
    return [sizes, config.compute.remat, config.packing.rows_per_microbatch]


def meshes(config: Config, topology: Topology, kv_heads: int) -> Iterator[Config]:
    """Yield configs of every mesh; decoding has as many tensor shards as training, or more."""
    chips = topology.chips // topology.slices // config.mesh.context
    for decoding in SIZES:
        for training in SIZES:
            if not (decoding % training or chips % decoding or kv_heads % decoding):
                sizes = {"tensor": training, "decode_tensor": decoding // training}
                fsdp = chips // decoding
                yield with_values(config, "mesh", data=topology.slices, fsdp=fsdp, **sizes)


class Search:
    """Trial of configs on a topology."""

    def __init__(self, config: Config, settings: PlanSettings):
        self._config, self._settings = config, settings
        self._topology = parse(settings.topology, settings.slices)
        self._devices = target_devices(self._topology)
        self._workload = settings.make_workload(config)

    def _measure(self, layout: Layout, programs: Any, name: str) -> CompiledProgram:
        (program,) = (program for program in programs if program.name == name)
        return plan.make_compiler(layout, self._settings).measure(program)

    def _update(self, config: Config) -> CompiledProgram | None:
        """Compile the update of a config; None if it does not fit."""
        try:
            layout = lay_out(config, self._topology, self._devices)
        except ConfigError:
            return None
        lengths = measure_lengths(config, layout.decoder, self._workload)
        update = self._measure(layout, training_programs(layout, lengths.microbatches), "update")
        plan.print_progress(f"{describe(config)}: update {update.together / GIB:.1f} GiB")
        return update if update.fits(limit(layout)) else None

    def train(self, config: Config) -> tuple[Config, CompiledProgram] | None:
        """Find the least recomputation, and then the most rows, that fit; None if nothing does."""
        shards = config.mesh.fsdp * config.mesh.decode_tensor
        config = with_values(config, "packing", rows_per_microbatch=shards)
        tried = (with_values(config, "compute", remat=remat) for remat in REMATS)
        best = next(((c, update) for c in tried if (update := self._update(c))), None)
        for rows in MORE_ROWS:
            if best is None:
                return None
            config = with_values(best[0], "packing", rows_per_microbatch=rows * shards)
            if not (update := self._update(config)):
                break
            best = config, update
        return best

    def sample(self, config: Config) -> tuple[Config, CompiledProgram] | None:
        """Find the most slots of full length that fit; None if not even one per replica does."""
        replicas = config.mesh.fsdp * config.mesh.context

        def measured(slots: int) -> tuple[Config, Layout, CompiledProgram]:
            tried = with_values(config, "sampler", slots=slots * replicas, pages=0)
            layout = lay_out(tried, self._topology, self._devices)
            decode = self._measure(layout, sampling_programs(layout), "decode")
            plan.print_progress(f"{slots * replicas} slots: {decode.together / GIB:.1f} GiB")
            return tried, layout, decode

        _, layout, decode = measured(1)
        free = limit(layout) - decode.together
        if decode.peak is None or free <= 0:
            return None
        rollout = config.rollout  # slots beyond the responses of a batch would be idle
        batch = rollout.prompts_per_step * rollout.samples_per_prompt
        pieces = layout.sampling_mesh.size // layout.engine.replicas
        token_bytes = sum(memory.token_bytes(layout.decoder, layout.config.sampler, pieces))
        more = int(free / (token_bytes * layout.engine.cache_tokens))
        more = min(more, -(-batch // replicas) - 1)
        while True:
            tried, layout, decode = measured(1 + more)
            if decode.fits(limit(layout)):
                return tried, decode
            if decode.peak is None or not more:
                return None
            more = more * 9 // 10

    def try_mesh(self, config: Config) -> Candidate | None:
        """Find the best config of a mesh; None if nothing fits."""
        trained = self.train(config)
        sampled = self.sample(trained[0]) if trained else None
        if not trained or not sampled:
            return None
        update, (config, decode) = trained[1], sampled
        layout = lay_out(config, self._topology, self._devices)
        lengths = measure_lengths(config, layout.decoder, self._workload)
        chip = self._settings.reached(self._topology.chip)
        costs = step_costs(layout, {"update": update, "decode": decode}, chip, lengths)
        step = plan.simulate_step(layout, self._workload, costs)
        seconds = step.rollout_seconds + step.update_seconds
        return Candidate(config, seconds, update.together / GIB, decode.together / GIB)

    def __call__(self) -> list[Candidate]:
        """Return the candidates that fit, the fastest first."""
        shape = read_shape(self._config.model.folder)
        kv_heads = math.gcd(*(layer.kv_heads for layer in shape.each_layer))
        tried = map(self.try_mesh, meshes(self._config, self._topology, kv_heads))
        return sorted(filter(None, tried), key=lambda candidate: candidate.seconds)


def search(config: Config, settings: PlanSettings) -> int:
    """Print the configs that fit; return the exit code."""
    rows = [candidate.row() for candidate in Search(config, settings)()]
    if settings.json:
        records = [dict(zip(HEADER, row, strict=True)) for row in rows]
        print(json.dumps({"fits": bool(rows), "found": records}))
    elif rows:
        print(plan.table(HEADER, rows))
    else:
        print(
            f"Nothing fits on {settings.topology}: more chips, a smaller model or config.lora.rank"
        )
    return 0 if rows else 1
