"""Compiles the programs of a run ahead of time for TPU pods; needs libtpu, and no TPU.

    pip install 'dapo_jax[tpu]'
    python tests/benchmarks/pods.py                                   # the table of RUNS
    python tests/benchmarks/pods.py --model 7B --topology v5e:4x4 --mesh fsdp=8,tensor=2

The compiler holds every program to the memory of a chip, so what compiles fits. It says nothing of
speed. Prints a line per program (peak GiB per chip, the limit, seconds to compile) and what the
compiled text holds: the largest arrays, any that is T x T, V x T or a copy of a cache, and what
devices exchange. With --json every line is JSON.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a TPU that is here is left alone
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")

import compiled
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from dapo_jax import algorithms
from dapo_jax.experiment.config import Compute, OneMesh, Optimizer, Sampler
from dapo_jax.learner.policy import policy_learner
from dapo_jax.learner.update import Learner
from dapo_jax.model import decoder
from dapo_jax.parts import check_divisible, numerics
from dapo_jax.sampler.engine import PolicyEngine
from dapo_jax.sharding import DECODING, TRAINING, make_mesh, shards
from dapo_jax.structs import Rollouts, ScoredBatch, TrainBatch

GIB = 2**30
# As their config.json says (huggingface.co/Qwen); biases on query, key, value.
QWEN = {
    "32B": dict(layers=64, embed=5120, heads=40, kv_heads=8, mlp=27_648, vocab=152_064),
    "7B": dict(layers=28, embed=3584, heads=28, kv_heads=4, mlp=18_944, vocab=152_064),
    "1.5B": dict(layers=28, embed=1536, heads=12, kv_heads=2, mlp=8_960, vocab=151_936),
    "tiny": dict(layers=2, embed=512, heads=4, kv_heads=2, mlp=1024, vocab=8_192),
}
TIED = ("1.5B", "tiny")
HBM_GIB = {"v4": 31.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}  # the compiler's limits
PROGRAMS = ("update", "score", "load", "prefill", "insert", "decode")


@dataclasses.dataclass
class Run:
    """A model on a pod: what is compiled. Sizes of the mesh are those of the settings."""

    model: str
    topology: str
    mesh: str
    remat: str = "full"
    row_tokens: int = 22_528
    microbatches: int = 8
    rows: int = 1  # per microbatch and batch shard
    slots: int = 4  # per replica
    prompt_tokens: int = 2_048
    load_layers: int = 0
    cache: str = "paged"
    chunk_tokens: int = 1_024
    attention: str = "auto"
    weights: str = "auto"  # those that decode

    def open_mesh(self) -> jax.sharding.Mesh:
        sizes = {name: int(size) for name, size in (p.split("=") for p in self.mesh.split(","))}
        sizes = dataclasses.asdict(OneMesh(**sizes))
        return make_mesh(**sizes, devices=describe(self.topology).devices)

    def decoder(self, mesh: jax.sharding.Mesh) -> decoder.DecoderConfig:
        compute = Compute(dtype="bfloat16", remat=self.remat, attention=self.attention)
        numbers = numerics(compute, mesh, self.row_tokens)
        tied = self.model in TIED
        shape = QWEN[self.model] | {"head_dim": 128, "tie_embeddings": tied, "rope_theta": 1e6}
        config = decoder.DecoderConfig(**shape, **numbers)
        check_divisible(config, mesh)
        return config


RUNS = (
    Run("32B", "v5p:4x4x4", "fsdp=16,decode_tensor=4", "attention", slots=16),
    Run("32B", "v6e:16x16", "fsdp=32,decode_tensor=2,tensor=4", "attention", slots=14),
    Run("32B", "v5e:16x16", "fsdp=32,decode_tensor=2,tensor=4", slots=3, load_layers=8),
    Run("7B", "v6e:2x4", "fsdp=2,tensor=4", slots=8),
    Run("7B", "v5e:4x4", "fsdp=4,tensor=4", slots=4, load_layers=7),
    Run("1.5B", "v5e:2x4", "fsdp=4,decode_tensor=2", slots=4),
)


def describe(topology: str) -> Any:
    """The devices of a topology such as v5e:4x4, with its torus links."""
    kind, _, shape = topology.partition(":")
    sizes = [int(size) for size in shape.split("x")]
    if kind in ("v4", "v5p"):
        wrap, chip = tuple(size % 4 == 0 for size in sizes), "megacore"
    else:
        wrap, chip = (*(size == 16 for size in sizes), False), "default"
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=topology,
        chip_config_name=chip,
        chips_per_host_bounds=(2, 2, 1),
        wrap=wrap,
    )


def batch_of(run: Run, mesh: jax.sharding.Mesh) -> TrainBatch:
    """Shapes of one update's rows, with old log-probs."""
    shape = (run.microbatches, run.rows * shards(mesh, "batch"), run.row_tokens)
    whole, real = (jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.int32, jnp.float32))
    rollouts = Rollouts(whole, whole, whole, whole, real)
    return TrainBatch(ScoredBatch(rollouts, real), real, real)


class _Tokenizer:
    end_ids, pad_id = (0,), 0


def open_engine(run: Run, config: decoder.DecoderConfig, mesh: jax.sharding.Mesh) -> PolicyEngine:
    """The sampler of the run, its window as long as it gets."""
    return PolicyEngine(
        config,
        mesh,
        slots=run.slots * shards(mesh, "batch", DECODING),
        burst_tokens=16,
        max_prompt_tokens=run.prompt_tokens,
        max_response_tokens=run.row_tokens - run.prompt_tokens,
        first_window_tokens=run.row_tokens,
        insert_width=min(16, run.slots),
        tokenizer=_Tokenizer(),
        settings=Sampler(
            cache=run.cache,
            load_layers=run.load_layers,
            weights_dtype=run.weights,
            prefill_prompts=1,
            prefill_chunk_tokens=0,
        ),
    )


def learner_of(run: Run, config: decoder.DecoderConfig, mesh: jax.sharding.Mesh) -> Learner:
    compute = Compute(logprob_chunk_tokens=run.chunk_tokens)
    return policy_learner(algorithms.dapo(), compute, Optimizer(), config, mesh)


def _placed(shapes: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        places,
    )


def lowered(run: Run, mesh: jax.sharding.Mesh, wanted: set[str]) -> Iterator[tuple[str, Callable]]:
    """Names of programs, each with what lowers it."""
    config = run.decoder(mesh)
    learner, batch = learner_of(run, config, mesh), batch_of(run, mesh)
    yield "update", lambda: learner.lower("update", batch)
    yield "score", lambda: learner.lower("score", batch.scored.rollouts)
    if not wanted - {"update", "score"}:
        return
    engine, trained = open_engine(run, config, mesh), learner.abstract_state.params
    yield "load", lambda: engine._load.lower(trained)
    params = decoder.for_decoding(engine._load.abstract(trained), config)
    window = engine.store.window(engine.cache_tokens)
    empty = jax.eval_shape(functools.partial(engine._empty_fn, window=window))
    state = _placed(empty, engine._state_places)
    tokens = jax.ShapeDtypeStruct((engine.replicas, run.prompt_tokens), jnp.int32)
    lengths = jax.ShapeDtypeStruct((engine.replicas,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), engine.replicas))
    prefill = functools.partial(engine._prefill.lower, params, tokens, lengths, keys)
    yield "prefill", prefill

    def insert():
        one = prefill()
        prefix = _placed(one.out_info, one.compile().output_shardings)
        width = engine._insert_widths[1]
        slots = np.arange(width)
        for slot in slots.tolist():
            engine.store.claim(slot, run.prompt_tokens, prompt=0)
        shape = {"prompts": engine.replicas, "time": run.prompt_tokens}
        fills = engine.store.fills(slots, np.zeros_like(slots), width=width, **shape)
        ints = jax.ShapeDtypeStruct((width,), jnp.int32)
        return engine._insert.lower(prefix, state, ints, ints, ints, fills)

    columns = engine.store.columns(engine.cache_tokens)
    yield "insert", insert
    yield (
        "decode",
        lambda: engine._generate.lower(params, state, rule=engine.rule, columns=columns),
    )


def fit(lower: Callable) -> tuple[dict[str, Any], str]:
    """Peak memory of a program and its compiled text, or why it does not fit."""
    low, started = lower(), time.perf_counter()
    try:
        program = low.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+[GMT]) of ([\d.]+[GMT])", str(error))
        return {"fits": False, "needs": used[1] if used else str(error)[:300]}, ""
    memory = program.memory_analysis()
    found = {
        "peak_gib": round(memory.peak_memory_in_bytes / GIB, 2),
        "arguments_gib": round(memory.argument_size_in_bytes / GIB, 2),
        "host_gib": round(memory.host_temp_size_in_bytes / GIB, 2),
        "fits": True,
        "compile_s": round(time.perf_counter() - started, 1),
    }
    return found, program.as_text()


def read(run: Run, mesh: jax.sharding.Mesh, program: str, text: str, count: int) -> dict[str, Any]:
    """What stands in a compiled text, as lists of short lines."""
    made, shape = compiled.instructions(text), QWEN[run.model]
    column = TRAINING if program in ("update", "score") else DECODING
    vocab = {shape["vocab"], shape["vocab"] // shards(mesh, "vocab", column)}
    tokens = {run.row_tokens, run.rows * run.row_tokens}
    found = {
        "largest": compiled.largest(made, count),
        "T x T": compiled.square(made, run.row_tokens),
        "V x T": compiled.over(made, vocab, tokens),
        "kernels": compiled.kernels(text),
    }
    if program in ("update", "score"):
        return found | {"head exchanges": compiled.collectives(made, "head")}
    heads = shape["kv_heads"] // shards(mesh, "kv_heads", column)
    cache = heads * 128 * run.row_tokens * run.slots
    if program in ("insert", "decode"):
        found |= {"copies of a cache": compiled.copies(made, cache)}
    if program in ("load", "decode"):
        found |= {"exchanges": compiled.collectives(made)}
    return found


def measure(run: Run, programs: list[str], as_json: bool, count: int) -> None:
    """A line per program, and what its text holds."""
    mesh, limit = run.open_mesh(), HBM_GIB[run.topology.partition(":")[0]]
    for program, lower in lowered(run, mesh, set(programs)):
        if program not in programs:
            continue
        found, text = fit(lower)
        contents = read(run, mesh, program, text, count) if text else {}
        line = dataclasses.asdict(run) | {"program": program, "limit_gib": limit} | found
        if as_json:
            print(json.dumps(line | contents), flush=True)
            continue
        peak = f"{found['peak_gib']:6.2f}" if found["fits"] else found["needs"]
        host = f" + {found['host_gib']} on the host" if found.get("host_gib") else ""
        verdict = f"fits, {found['compile_s']:.0f} s" if found["fits"] else "DOES NOT FIT"
        place = f"{run.model:>5} {run.topology:<10} {run.mesh:<34} {run.remat:<10}"
        print(f"{place} {program:<8} {peak}{host} of {limit} GiB  {verdict}", flush=True)
        for name, lines in contents.items():
            print(f"        {name}: {'; '.join(lines) or 'none'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Run):
        kind = type(field.default) if field.default is not dataclasses.MISSING else str
        parser.add_argument(f"--{field.name}", type=kind)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--largest", type=int, default=5, help="how many arrays are shown")
    parser.add_argument("--json", action="store_true")
    args = vars(parser.parse_args())
    rest = {name: args.pop(name) for name in ("programs", "largest", "json")}
    given = {name: value for name, value in args.items() if value is not None}
    named = {name: given[name] for name in ("model", "topology") if name in given}
    runs = [r for r in RUNS if all(getattr(r, name) == value for name, value in named.items())]
    runs = [dataclasses.replace(run, **given) for run in runs] or [Run(**given)]
    for run in runs:
        measure(run, rest["programs"].split(","), rest["json"], rest["largest"])


if __name__ == "__main__":
    main()
