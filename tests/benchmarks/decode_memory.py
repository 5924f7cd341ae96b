"""Memory of sampling on a TPU pod, from its compiler: no TPU and no weights are needed (libtpu is).

    python tests/benchmarks/decode_memory.py --model=32b --topology=v5p:4x4x4 --tensor=4 \
        --cache=paged --slots=244 --pages=9160
    python tests/benchmarks/decode_memory.py --program=prefill --topology=v6e:16x16 --tensor=8

Prints a JSON line: GiB per device of the arguments, of what the program needs beside them and at
its peak, the collectives inside its loop, and whether its compiler made it fit.
"""

import argparse
import collections
import functools
import json
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils, topologies

from dapo_jax import sharding
from dapo_jax.experiment.config import Sampler
from dapo_jax.model import decoder
from dapo_jax.model.decoder import DecoderConfig
from dapo_jax.prompts.tokenizer import arithmetic_tokenizer
from dapo_jax.sampler.engine import PolicyEngine
from dapo_jax.sampler.sampling import SamplingRule
from dapo_jax.sharding import make_mesh
from dapo_jax.structs import DecodeState, Prefix

GIB = 2**30
PROMPT, RESPONSE = 2048, 20_480
_QWEN = {"vocab": 152_064, "head_dim": 128, "tie_embeddings": False, "dtype": jnp.bfloat16}
MODELS = {
    "32b": {"layers": 64, "embed": 5120, "heads": 40, "kv_heads": 8, "mlp": 27_648},
    "7b": {"layers": 28, "embed": 3584, "heads": 28, "kv_heads": 4, "mlp": 18_944},
}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all)(-start)?\(")


def model(name: str, layers: int = 0) -> DecoderConfig:
    """Qwen2.5 of that size, or only its first layers."""
    shape = MODELS[name]
    return DecoderConfig(**_QWEN, **shape | ({"layers": layers} if layers else {}))


def open_mesh(topology: str, data: int, tensor: int) -> jax.sharding.Mesh:
    """A mesh of chips that are not there."""
    kind, sides = topology.split(":")
    sides = sides.split("x")
    options = {"chip_config_name": "default", "wrap": (*(side == "16" for side in sides), False)}
    if kind == "v5p":
        options = {"chip_config_name": "megacore", "wrap": tuple(int(s) >= 4 for s in sides)}
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=(2, 2, 1), **options
    )
    count = len(described.devices)
    shape = (data, count // (data * tensor), tensor)
    grid = mesh_utils.create_device_mesh(shape, described.devices, allow_split_physical_axes=True)
    return make_mesh(*shape, devices=grid.flatten())


def open_engine(
    config: DecoderConfig, mesh: jax.sharding.Mesh, *, slots: int, burst: int = 16, **settings
) -> PolicyEngine:
    """An engine for the paper's lengths; `slots` are those of one replica, as is `pages`."""
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    settings["pages"] = settings.get("pages", 0) * replicas
    return PolicyEngine(
        config,
        mesh,
        slots=slots * replicas,
        burst_tokens=burst,
        max_prompt_tokens=PROMPT,
        max_response_tokens=RESPONSE,
        first_window_tokens=PROMPT + RESPONSE,
        insert_width=16,
        tokenizer=arithmetic_tokenizer(),
        settings=Sampler(prefill_prompts=replicas, **settings),
    )


def _abstract(shape: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def abstract_params(engine: PolicyEngine) -> Any:
    """The decoding weights, without their numbers."""
    trained = sharding.unbox(decoder.abstract_params(engine.config))
    return decoder.for_decoding(engine._load.abstract(trained), engine.config)


def abstract_state(engine: PolicyEngine) -> DecodeState:
    """Full caches, without their numbers."""
    window = engine.store.window(engine.cache_tokens)
    shapes = jax.eval_shape(lambda: engine._empty_fn(window=window))
    return jax.tree.map(_abstract, shapes, engine._state_places)


def _insertion(engine: PolicyEngine, params, state, tokens, lengths, keys) -> tuple:
    """What the widest `insert` is called with."""
    shapes = jax.eval_shape(engine._prefill_fn, params, tokens, lengths, keys)
    place = functools.partial(sharding.sharding, engine.mesh, column=sharding.DECODING)
    prompts, whole = place("batch", None, "kv_heads"), place()
    places = Prefix(jax.tree.map(lambda _: prompts, shapes.caches), whole, whole, whole)
    prefix = jax.tree.map(_abstract, shapes, places)
    width = engine.most_inserted
    numbers = (jax.ShapeDtypeStruct((width,), jnp.int32),) * 3
    fills = engine.store.fills([], [], width=width, prompts=engine.replicas, time=PROMPT)
    return prefix, state, *numbers, fills


def compile_program(engine: PolicyEngine, program: str) -> Any:
    """'generate' (a burst), 'prefill' (a prompt a replica) or 'insert' (a group), compiled."""
    with jax.set_mesh(engine.mesh):
        params, state = abstract_params(engine), abstract_state(engine)
        prompts = (engine.replicas, PROMPT)
        tokens, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in (prompts, prompts[:1]))
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), engine.replicas))
        if program == "generate":
            columns = engine.store.columns(engine.cache_tokens)
            rule = SamplingRule()
            lowered = engine._generate.lower(params, state, rule=rule, columns=columns)
        elif program == "prefill":
            lowered = engine._prefill.lower(params, tokens, lengths, keys)
        else:
            lowered = engine._insert.lower(
                *_insertion(engine, params, state, tokens, lengths, keys)
            )
        return lowered.compile()


def group_size(line: str) -> int:
    """How many devices take part in a collective, in each of the forms that XLA writes; 0: all."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    return 0


def in_loop(text: str) -> dict[str, int]:
    """Collectives of a compiled program's loop bodies, by kind and number of devices."""
    found: collections.Counter = collections.Counter()
    for body in set(re.findall(r"body=%?([\w.-]+)", text)):
        start = text.find(f"%{body} ")
        for line in text[start : text.find("\n}", start)].splitlines():
            if match := COLLECTIVE.search(line):
                found[f"{match[1]} of {group_size(line)}"] += 1
    return dict(found)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the compiler says; `fits` is False where it refused for want of memory."""
    mesh = open_mesh(arguments.topology, arguments.data, arguments.tensor)
    settings = {"cache": arguments.cache, "pages": arguments.pages}
    config, started = model(arguments.model, arguments.layers), time.perf_counter()
    engine = open_engine(config, mesh, slots=arguments.slots, **settings)
    line = vars(arguments) | {"fits": True}
    try:
        compiled = compile_program(engine, arguments.program)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return line | {"fits": False, "said": str(error)[:300]}
    memory = compiled.memory_analysis()
    return line | {
        "arguments_gib": round(memory.argument_size_in_bytes / GIB, 3),
        "temporary_gib": round(memory.temp_size_in_bytes / GIB, 3),
        "peak_gib": round(memory.peak_memory_in_bytes / GIB, 3),
        "collectives_of_the_loop": in_loop(compiled.as_text()),
        "seconds": round(time.perf_counter() - started),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="generate", choices=("generate", "prefill", "insert"))
    parser.add_argument("--model", default="32b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, default=0, help="only the first; 0: all")
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--cache", default="slots", choices=("slots", "paged"))
    parser.add_argument("--slots", type=int, default=16, help="of one replica")
    parser.add_argument("--pages", type=int, default=0, help="of one replica; 0: of full slots")
    print(json.dumps(measure(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
