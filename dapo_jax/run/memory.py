"""Memory that the weights and caches of a sampler take, for the server and the plan."""

import math
import operator
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dapo_jax.config.experiment import Sampler
from dapo_jax.learner.update import device_memory
from dapo_jax.model.decoder import DecoderConfig, abstract_params
from dapo_jax.model.param_paths import forward_dtype
from dapo_jax.runtime import sharding
from dapo_jax.runtime.registry import feature
from dapo_jax.types.errors import ConfigError

FLOAT_BYTES = TEXT_TOKEN_BYTES = 4
SAMPLED_TOKEN_BYTES = 8  # a token and its log-prob, or the two numbers of its support
MEMINFO = pathlib.Path("/proc/meminfo")
# Memory limit of a container, in versions 2 and 1 of control groups.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def token_bytes(decoder: DecoderConfig, sampler: Sampler, pieces: float) -> list[float]:
    """Return the bytes of a token's keys and values by layer, on one of `pieces` devices."""
    kinds = {"auto": jnp.dtype(decoder.dtype).itemsize, "int8_per_head": 1}

    def layer_bytes(layer: DecoderConfig) -> float:
        itemsize = kinds.get(sampler.cache_dtype, 1 + FLOAT_BYTES / layer.head_dim)
        width = 0 if layer.is_recurrent else layer.kv_heads * layer.head_dim
        return 2 * width * itemsize / pieces

    return [layer_bytes(layer) for layer in decoder.each_layer[: decoder.cached_layers]]


def state_bytes(decoder: DecoderConfig, pieces: float) -> float:
    """Return the bytes of a slot's states in all delta-net layers, on one of `pieces` devices."""
    if not decoder.recurrent:
        return 0.0
    leaves = jax.tree.leaves(jax.eval_shape(lambda: feature("delta_net").empty_state(decoder, 1)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return sum(decoder.recurrent) * size / pieces


def cache_bytes(
    decoder: DecoderConfig,
    sampler: Sampler,
    mesh: jax.sharding.Mesh,
    slots: int,
    prompt_tokens: int,
    response_tokens: int,
) -> float:
    """Return the bytes of keys, values and tokens of all slots at full length, on one device."""
    replicas = sharding.shards(mesh, "batch", sharding.DECODING)
    pieces = mesh.size // replicas
    longest = prompt_tokens + response_tokens + sampler.speculate  # proposals are cached too
    held = slots * longest
    if sampler.pages and sampler.cache != "slots":
        held = min(held, sampler.pages * sampler.page_tokens)
    tokens = (
        slots * min(reach + sampler.speculate, longest) if reach else held
        for reach in decoder.reaches
    )
    cached = sum(map(operator.mul, token_bytes(decoder, sampler, pieces), tokens))
    cached += slots * state_bytes(decoder, pieces)
    cached += slots * response_tokens * SAMPLED_TOKEN_BYTES * (1 + sampler.truncates)
    if sampler.speculate:  # from the texts of all slots
        cached += slots * longest * TEXT_TOKEN_BYTES
    return cached / replicas


def params_bytes(
    decoder: DecoderConfig,
    mesh: jax.sharding.Mesh,
    itemsize: Callable[[str], float] = lambda path: FLOAT_BYTES,
    column: int = sharding.TRAINING,
) -> float:
    """Return the bytes of parameters on one device."""
    boxed = abstract_params(decoder)
    places = sharding.flatten(sharding.tree_shardings(mesh, boxed, column))
    shapes = sharding.flatten(sharding.unbox(boxed))
    return sum(
        math.prod(places[path].shard_shape(leaf.shape)) * itemsize(path)
        for path, leaf in shapes.items()
    )


def decoding_bytes(decoder: DecoderConfig, sampler: Sampler, mesh: jax.sharding.Mesh) -> float:
    """Return the bytes of the decoding weights on one device."""

    def itemsize(path: str) -> float:
        int8 = sampler.weights_dtype != "auto" and path.endswith("kernel")
        return 1 if int8 else jnp.dtype(forward_dtype(path, decoder)).itemsize

    return params_bytes(decoder, mesh, itemsize, sharding.DECODING)


def host_bytes() -> float:
    """Return the bytes of this machine's memory that are available to a process."""
    if not MEMINFO.exists():
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    sizes = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    free = 1024.0 * sum(int(sizes[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
    for path in map(pathlib.Path, LIMITS):
        if path.exists() and (limit := path.read_text().strip()).isdecimal():
            free = min(free, float(limit))
    return free


def available_bytes(mesh: jax.sharding.Mesh) -> float:
    """Return the bytes available on one device of the mesh; infinite if unknown."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        return host_bytes() / len(devices)
    return device_memory(mesh)


def describe(size: float) -> str:
    """Return a size in bytes as text, such as `2.5 GB`."""
    for unit, scale in ("TB", 1e12), ("GB", 1e9):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e6:,.1f} MB"


def check_fits(
    what: str, needs: dict[str, float], mesh: jax.sharding.Mesh, settings: dict[str, str]
) -> None:
    """Raise `ConfigError` with the estimate if a device has less memory."""
    total = sum(needs.values())
    available = available_bytes(mesh)
    if total <= available:
        return
    largest = sorted(needs, key=lambda name: -needs[name])
    blamed = next(settings[name] for name in largest if name in settings)
    parts = ", ".join(f"{name} {describe(needs[name])}" for name in largest if needs[name])
    raise ConfigError(
        f"config.{blamed}: must be smaller, since {what} takes at least {describe(total)} on each "
        f"of {mesh.size} device{'s' * (mesh.size > 1)} and {describe(available)} are there: "
        f"{parts}",
        blamed.partition(" ")[0],
    )
