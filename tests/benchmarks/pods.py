"""Compiles the programs of a run ahead of time for TPU pods; needs libtpu, and no TPU.

    pip install 'dapo_jax[tpu]'
    python tests/benchmarks/pods.py                                   # the table of RUNS
    python tests/benchmarks/pods.py --model 7B --topology v5e:4x4 --mesh fsdp=8,tensor=2

The compiler holds every program to the memory of a chip, so what compiles fits. It says nothing of
speed. Prints a line per program: peak GiB per chip; that with what else is there meanwhile (the
trainer's state while responses are drawn); the limit; seconds to compile. Then what the compiled
text holds: the largest arrays, any that is T x T, V x T or a copy of a cache, and what devices
exchange. With --json every line is JSON.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a TPU that is here is left alone
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")


import jax
import jax.numpy as jnp
from jax.experimental import topologies

from dapo_jax import algorithms
from dapo_jax.assembly import check_divisible, numerics
from dapo_jax.experiment.config import Compute, OneMesh, Optimizer, Sampler
from dapo_jax.learner.policy import policy_learner
from dapo_jax.learner.update import Learner
from dapo_jax.model import decoder
from dapo_jax.plan import compiled
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
RESERVED_GIB = 0.26  # of them, kept by the compiler for itself
PROGRAMS = "update,score,load,prefill,insert,decode"


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
    pages: int = 0  # per replica; 0: of full slots
    prompt_tokens: int = 2_048
    load_layers: int = 0
    cache: str = "paged"
    chunk_tokens: int = 1_024
    attention: str = "auto"
    programs: str = PROGRAMS
    layers: int = 0  # only the first; 0: all
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
        if self.layers:
            shape["layers"] = self.layers
        config = decoder.DecoderConfig(**shape, **numbers)
        check_divisible(config, mesh)
        return config


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
    replicas = shards(mesh, "batch", DECODING)
    return PolicyEngine(
        config,
        mesh,
        slots=run.slots * replicas,
        burst_tokens=16,
        max_prompt_tokens=run.prompt_tokens,
        max_response_tokens=run.row_tokens - run.prompt_tokens,
        first_window_tokens=run.row_tokens,
        insert_width=min(16, run.slots),
        tokenizer=_Tokenizer(),
        settings=Sampler(
            cache=run.cache,
            pages=run.pages * replicas,
            load_layers=run.load_layers,
            weights_dtype=run.weights,
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


class Program(NamedTuple):
    """A program of the run.

    Attributes:
        alive: bytes per chip of what exists while it runs, its arguments and results among it.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    alive: dict[str, int]


def size(tree: Any) -> int:
    """Bytes per chip of arrays of these shapes, places and layouts, as the compiler pads them."""
    nothing = jax.jit(lambda tree: jnp.zeros(()), keep_unused=True)
    return nothing.lower(tree).compile().memory_analysis().argument_size_in_bytes


def training_programs(run: Run, learner: Learner, mesh: jax.sharding.Mesh) -> Iterator[Program]:
    """The update and the score pass."""
    batch, alive = batch_of(run, mesh), {"trainer": size(learner.abstract_state)}
    yield Program("update", lambda: learner.lower("update", batch), alive)
    yield Program("score", lambda: learner.lower("score", batch.scored.rollouts), alive)


def sampling_programs(run: Run, learner: Learner, engine: PolicyEngine) -> Iterator[Program]:
    """From the trainer's parameters to tokens; all while the trainer's state waits."""
    trained = learner.abstract_state
    params = decoder.for_decoding(engine._load.abstract(trained.params), engine.config)
    alive = {"trainer": size(trained), "weights": size(params)}
    yield Program("load", lambda: engine._load.lower(trained.params), alive)
    window = engine.store.window(engine.cache_tokens)
    empty = jax.eval_shape(functools.partial(engine._empty_fn, window=window))
    state = _placed(empty, engine._state_places)
    prompts = {"prompts": engine.prefill_width, "time": run.prompt_tokens}
    tokens = jax.ShapeDtypeStruct(tuple(prompts.values()), jnp.int32)
    lengths = jax.ShapeDtypeStruct(tokens.shape[:1], jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), engine.prefill_width))
    prefill = params, tokens, lengths, keys
    prefix = jax.eval_shape(engine._prefill, *prefill)
    prefix = prefix.replace(
        caches=_placed(prefix.caches, jax.tree.map(lambda _: engine.prefix_place, prefix.caches))
    )
    alive = alive | {"cache": size(state), "prompts": size(prefix)}
    yield Program("prefill", lambda: engine._prefill.lower(*prefill), alive)
    ints = jax.ShapeDtypeStruct((engine.most_inserted,), jnp.int32)
    fills = engine.store.fills([], [], width=engine.most_inserted, **prompts)
    insert = prefix, state, ints, ints, ints, fills
    yield Program("insert", lambda: engine._insert.lower(*insert), alive)
    rule, columns = engine.rule, engine.store.columns(engine.cache_tokens)
    generate = functools.partial(engine._generate.lower, rule=rule, columns=columns)
    yield Program("decode", lambda: generate(params, state), alive)


def programs(run: Run, mesh: jax.sharding.Mesh) -> Iterator[Program]:
    """Those that the run names, in their order."""
    config, wanted = run.decoder(mesh), set(run.programs.split(","))
    learner = learner_of(run, config, mesh)
    several = [training_programs(run, learner, mesh)]
    if wanted - {"update", "score"}:
        several.append(sampling_programs(run, learner, open_engine(run, config, mesh)))
    for program in itertools.chain(*several):
        if program.name in wanted:
            yield program


def fit(program: Program, limit_gib: float) -> tuple[dict[str, Any], str]:
    """Memory of a program and its compiled text, or why it does not fit."""
    low, started = program.lower(), time.perf_counter()
    found = {"alive_gib": {name: round(b / GIB, 2) for name, b in program.alive.items()}}
    try:
        done = low.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = re.search(r"Used ([\d.]+[GMT]) of ([\d.]+[GMT])", str(error))
        return found | {"fits": False, "needs": used[1] if used else str(error)[:300]}, ""
    memory = done.memory_analysis()
    peak, arguments = memory.peak_memory_in_bytes, memory.argument_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    beside = max(0, sum(program.alive.values()) - arguments - results)
    sizes = {
        "peak": peak,
        "arguments": arguments,
        "temporary": peak - arguments - results,
        "host": memory.host_temp_size_in_bytes,
        "together": peak + beside,
    }
    found |= {f"{name}_gib": round(value / GIB, 2) for name, value in sizes.items()}
    found["fits"] = found["together_gib"] <= limit_gib - RESERVED_GIB
    return found | {"compile_s": round(time.perf_counter() - started, 1)}, done.as_text()


def read(run: Run, mesh: jax.sharding.Mesh, program: str, text: str, count: int) -> dict[str, Any]:
    """What stands in a compiled text, as lists of short lines."""
    made, shape = compiled.instructions(text), QWEN[run.model]
    column = TRAINING if program in ("update", "score") else DECODING
    vocab = {shape["vocab"], shape["vocab"] // shards(mesh, "vocab", column)}
    tokens = {run.row_tokens, run.rows * run.row_tokens}
    found = {
        "largest": compiled.largest(made, count),
        "T x T": compiled.square(made, run.row_tokens),
        "P x P": compiled.square(made, run.prompt_tokens),
        "V x T": compiled.over(made, vocab, tokens),
        "kernels": compiled.kernels(text),
    }
    if program in ("update", "score"):
        return found | {
            "head exchanges": compiled.collectives(made, "head"),
            "vocabulary exchanges": compiled.collectives(made, sizes=vocab),
        }
    heads = shape["kv_heads"] // shards(mesh, "kv_heads", column)
    tokens_of_replica = 128 * run.pages or run.row_tokens * run.slots
    cache = heads * 128 * tokens_of_replica
    if program in ("insert", "decode"):
        found |= {"copies of a cache": compiled.copies(made, cache)}
    if program in ("load", "decode"):
        found |= {"exchanges": compiled.collectives(made, looped=program == "decode")}
    return found


def measure(run: Run, as_json: bool, count: int) -> None:
    """A line per program, and what its text holds."""
    mesh, limit = run.open_mesh(), HBM_GIB[run.topology.partition(":")[0]]
    for program in programs(run, mesh):
        found, text = fit(program, limit)
        contents = read(run, mesh, program.name, text, count) if text else {}
        line = dataclasses.asdict(run) | {"program": program.name, "limit_gib": limit} | found
        if as_json:
            print(json.dumps(line | contents), flush=True)
            continue
        memory = f"{found['peak_gib']:6.2f}" if text else found["needs"]
        memory += f" ({found['together_gib']} with all that is there)" if text else ""
        memory += f" + {found['host_gib']} on the host" if found.get("host_gib") else ""
        verdict = f"fits, {found['compile_s']:.0f} s" if found["fits"] else "DOES NOT FIT"
        place = f"{run.model:>5} {run.topology:<10} {run.mesh:<34} {run.remat:<10}"
        print(f"{place} {program.name:<8} {memory} of {limit} GiB  {verdict}", flush=True)
        there = [f"{name} {gib} GiB" for name, gib in found["alive_gib"].items()]
        for name, lines in ({"there": there} | contents).items():
            print(f"        {name}: {'; '.join(lines) or 'none'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Run):
        kind = type(field.default) if field.default is not dataclasses.MISSING else str
        parser.add_argument(f"--{field.name}", type=kind)
    parser.add_argument("--largest", type=int, default=5, help="how many arrays are shown")
    parser.add_argument("--json", action="store_true")
    args = vars(parser.parse_args())
    largest, as_json = args.pop("largest"), args.pop("json")
    given = {name: value for name, value in args.items() if value is not None}
    asked = given.pop("programs", PROGRAMS).split(",")
    if unknown := set(asked) - set(PROGRAMS.split(",")):
        parser.error(f"--programs: {', '.join(sorted(unknown))}: must be of {PROGRAMS}")
    named = {name: given[name] for name in ("model", "topology") if name in given}
    runs = [r for r in RUNS if all(getattr(r, name) == value for name, value in named.items())]
    for run in runs or [Run(**given)]:
        kept = ",".join(name for name in run.programs.split(",") if name in asked)
        if kept:
            measure(dataclasses.replace(run, **given, programs=kept), as_json, largest)


if __name__ == "__main__":
    main()
