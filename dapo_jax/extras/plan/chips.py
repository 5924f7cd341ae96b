"""Published peak figures of chips, topologies, and their devices as compilers describe them."""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax.run.command_line import check_flag
from dapo_jax.types.errors import ConfigError

GIB = 2**30
_TPU_VARIABLES = {  # without a TPU nothing answers libtpu's queries
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of a device, which is a chip unless a chip has several `devices`."""

    flops_per_second: float  # matrix products in bfloat16
    hbm_gib: float  # that programs may use: a TPU's compiler reserves 0.26 GiB
    hbm_bytes_per_second: float
    ring_multiple: int  # a dimension whose size is a multiple of this is a ring
    dimensions: int
    config_name: str = "default"  # the compiler's name for the chip's mode
    platform: str = "tpu"
    devices: int = 1


# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; a tpu7x chip is two devices of JAX.
# cpu is this machine, to try a plan out; its figures are made up.
CHIPS = {
    "v4": Chip(275e12, 30.99, 1228e9, 4, 3, "megacore"),
    "v5e": Chip(197e12, 15.49, 819e9, 16, 2),
    "v5p": Chip(459e12, 95.48, 2765e9, 4, 3, "megacore"),
    "v6e": Chip(918e12, 30.99, 1640e9, 16, 2),
    "tpu7x": Chip(2307e12 / 2, 94.48, 7380e9 / 2, 4, 3, devices=2),
    "cpu": Chip(5e11, 4.0, 2e10, 0, 1, platform="cpu"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of equal slices of chips; `shape` is the shape of one slice."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.shape)

    @property
    def limit(self) -> int:
        """Bytes of a device that programs may use."""
        return int(self.chip.hbm_gib * GIB)


def parse(name: str, slices: int = 1) -> Topology:
    """Parse a topology such as `v5p:4x4x4`, `v6e:16x16`, `cpu:8`. Raises `ConfigError`."""
    kind, _, text = name.partition(":")
    allowed = f"KIND:SHAPE with a KIND of {', '.join(CHIPS)}, as in v5p:4x4x4"
    check_flag(kind in CHIPS, "topology", name, allowed)
    chip = CHIPS[kind]
    example = {1: "8", 2: "4x4", 3: "4x4x4"}[chip.dimensions]
    numbers = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text)
    valid = bool(numbers) and text.count("x") == chip.dimensions - 1
    check_flag(valid, "topology", name, f"as in {kind}:{example}")
    allowed = "at least 1" if chip.platform == "tpu" else f"1: {kind} has no slices"
    check_flag(slices == 1 or (slices > 1 and chip.platform == "tpu"), "slices", slices, allowed)
    return Topology(name, chip, tuple(map(int, text.split("x"))), slices)


def target_devices(topology: Topology) -> list[Any]:
    """Return the devices of a topology, to compile for; they cannot run programs.

    Raises `ConfigError` if the compiler is not installed or does not know the topology.
    """
    if topology.chip.platform == "cpu":
        devices = jax.devices("cpu")
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.chips}"
        allowed = f"at most cpu:{len(devices)} here; {flag} makes more"
        check_flag(topology.chips <= len(devices), "topology", topology.name, allowed)
        return devices[: topology.chips]
    try:
        return _tpus(topology)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        reason = f"needs its compiler: pip install '.[tpu]' in a checkout ({first})"
        if isinstance(error, jax.errors.JaxRuntimeError):  # else JAX finds no plugin
            reason = f"the compiler does not describe it: {first}"
        raise ConfigError(f"--topology = {topology.name!r}: {reason}") from None


def _tpus(topology: Topology) -> list[Any]:
    multiple, sizes = topology.chip.ring_multiple, topology.shape
    # A dimension is a ring if its size is a multiple of 4 (v4, v5p, tpu7x), or 16 (v5e, v6e).
    rings = tuple(size % multiple == 0 for size in sizes)
    if topology.chip.dimensions == 2:
        rings = (*(size == multiple for size in sizes), False)
    for name, value in _TPU_VARIABLES.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(
        platform="tpu",
        topology_name=topology.name,
        num_slices=topology.slices,
        chip_config_name=topology.chip.config_name,
        chips_per_host_bounds=(*(min(2, size) for size in sizes[:2]), 1),
        wrap=rings,  # else the last chip has no link to the first
    ).devices


def compiler_options(topology: Topology) -> dict[str, Any] | None:
    """Return the options of `lowered.compile` that equal a run's flags on that topology.

    A flag that the user has set in `LIBTPU_INIT_ARGS` keeps its value, as it does in a run.
    """
    if topology.chip.platform != "tpu":
        return None
    package = pathlib.Path(__file__).parents[2]
    installed = package / "launch" / "env.sh"
    flags = installed if installed.exists() else package.parent / "launch" / "env.sh"
    script = 'source "$0" "$1" && printf %s "$LIBTPU_INIT_ARGS"'
    printed = subprocess.run(
        ["bash", "-c", script, flags, f"tpu-{topology.name.partition(':')[0]}"],
        env={k: v for k, v in os.environ.items() if k in ("PATH", "LIBTPU_INIT_ARGS")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pairs = (flag.removeprefix("--").partition("=") for flag in printed.split())
    return {name: value for name, _, value in pairs}
