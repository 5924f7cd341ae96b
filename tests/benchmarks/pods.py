"""Compile the programs of a run for TPU pods; needs libtpu, but no TPU.

    pip install '.[tpu]'
    python tests/benchmarks/pods.py                                   # the table of RUNS
    python tests/benchmarks/pods.py --model 7B --topology v5e:4x4 --mesh fsdp=8,tensor=2

Prints a JSON line per program: peak GiB per chip; the same with all other arrays on the chip (the
trainer's state during sampling); the limit; seconds to compile; and what the compiled text
contains: the largest arrays, any array of T x T or V x T, copies of a cache, and exchanges between
devices. `dapo-jax plan` measures a config's programs; this script takes shapes without a config.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leave a TPU of this machine alone
sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))

import jax
from hlo_arrays import contents

from dapo_jax.config import experiment as settings
from dapo_jax.extras.plan.chips import GIB, parse
from dapo_jax.extras.plan.programs import Compiler, Layout, lay_out, programs
from dapo_jax.extras.plan.published_shapes import config_values

TINY = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 128}
TINY |= {"num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 8192}
PROGRAMS = "update,score,load,prefill,insert,decode"


@dataclasses.dataclass
class Run:
    """A model on a pod. `mesh` has the settings of the mesh."""

    model: str
    topology: str
    mesh: str
    remat: str = "full"
    row_tokens: int = 22_528
    microbatches: int = 8
    slots: int = 4  # per replica
    pages: int = 0  # per replica; 0: enough for full slots
    prompt_tokens: int = 2_048
    load_layers: int = 0
    cache: str = "paged"
    programs: str = PROGRAMS

    def config(self, folder: str) -> settings.Config:
        axes = dict(part.split("=") for part in self.mesh.split(","))
        mesh = settings.Mesh(**{name: int(size) for name, size in axes.items()})
        replicas = mesh.data * mesh.fsdp
        return settings.Config(
            model=settings.Model(folder=folder),
            compute=settings.Compute("bfloat16", remat=self.remat, logprob_chunk_tokens=1_024),
            data=settings.Data(max_prompt_tokens=self.prompt_tokens),
            rollout=settings.Rollout(samples_per_prompt=min(16, self.slots)),
            evaluation=settings.Evaluation(samples_per_problem=1),
            sampler=settings.Sampler(
                slots=self.slots * replicas * mesh.context,
                pages=self.pages * replicas * mesh.context,
                burst_tokens=16,
                max_response_tokens=self.row_tokens - self.prompt_tokens,
                first_window_tokens=self.row_tokens,
                cache=self.cache,
                load_layers=self.load_layers,
            ),
            mesh=mesh,
            packing=settings.Packing(self.row_tokens, replicas * mesh.decode_tensor),
        )

    def lay_out(self) -> Layout:
        """Lay the run out from a folder that has only a config.json."""
        values = dict(config_values(f"Qwen2.5-{self.model}") or config_values("Qwen2.5-0.5B"))
        values |= TINY if self.model == "tiny" else {}
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(values))
            return lay_out(self.config(folder), parse(self.topology))


_V5P, _256 = "fsdp=16,decode_tensor=4", "fsdp=32,decode_tensor=2,tensor=4"
SAMPLING = "prefill,insert,decode"
RUNS = (
    Run("32B", "v5p:4x4x4", _V5P, "attention", slots=16, cache="slots"),
    Run("32B", "v5p:4x4x4", _V5P, "attention", slots=244, pages=9_160, programs=SAMPLING),
    Run("32B", "v6e:16x16", _256, "attention", slots=135, pages=5_000),
    Run("32B", "v5e:16x16", _256, slots=32, pages=1_200, load_layers=8),
    Run("7B", "v6e:2x4", "fsdp=2,tensor=4", slots=160, pages=8_000),
    Run("7B", "v5e:4x4", "fsdp=4,tensor=4", slots=56, pages=2_800, load_layers=7),
    Run("1.5B", "v5e:2x4", "fsdp=4,decode_tensor=2", slots=96, pages=5_600),
)


class Inspector(Compiler):
    """Compiler that keeps the texts of programs."""

    def __init__(self, layout: Layout):
        super().__init__(layout, None)
        self.texts: list[str] = []

    def compiled(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        done = super().compiled(lowered)
        self.texts.append(done.as_text() or "")
        return done


def measure(run: Run) -> None:
    """Print a JSON line per program, with what its text contains."""
    layout = run.lay_out()
    compiler, most = Inspector(layout), layout.topology.limit
    by_name = {program.name: program for program in programs(layout, run.microbatches)}
    for program in map(by_name.__getitem__, run.programs.split(",")):
        compiler.texts.clear()
        compiled = compiler.measure(program)
        parts = compiled.record(most)["parts"]
        line = {
            "program": compiled.name,
            "fits": compiled.fits(most),
            "peak_gib": round(compiled.needs / GIB, 2),
            "together_gib": round(compiled.together / GIB, 2),
            "host_gib": round(compiled.host / GIB, 2),
            "limit_gib": round(most / GIB, 2),
            "there_gib": {name: round(x / GIB, 2) for name, x in parts.items()},
            "compile_s": round(compiled.compile_seconds, 1),
        }
        if compiled.peak is not None:
            line |= contents(layout, program, compiler.texts[0])
        print(json.dumps(dataclasses.asdict(run) | line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Run):
        kind = type(field.default) if field.default is not dataclasses.MISSING else str
        parser.add_argument(f"--{field.name}", type=kind)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    asked = given.pop("programs", PROGRAMS).split(",")
    if unknown := set(asked) - set(PROGRAMS.split(",")):
        parser.error(f"--programs: {', '.join(sorted(unknown))}: must be of {PROGRAMS}")
    named = {name: given[name] for name in ("model", "topology") if name in given}
    runs = [r for r in RUNS if all(getattr(r, name) == value for name, value in named.items())]
    for run in runs or [Run(**given)]:
        kept = ",".join(name for name in run.programs.split(",") if name in asked)
        if kept:
            measure(dataclasses.replace(run, **given, programs=kept))


if __name__ == "__main__":
    main()
