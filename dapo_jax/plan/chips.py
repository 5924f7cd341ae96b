"""What a chip can do at best, as its maker publishes it, and the topologies it is sold in."""

import dataclasses
import math
import os
import re
from typing import Any

import jax

from dapo_jax.experiment.settings import ConfigError, require

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
        flops_per_second: matrix products in bfloat16.
        hbm_gib: what a program may use; of a TPU what its compiler holds it to.
        hbm_bytes_per_second: of its own memory.
        ici_bytes_per_second: that it sends to its neighbours, over all its links, one way.
        ring_multiple: of chips in a dimension that is a ring.
        dimensions: of its topologies.
        config_name: of the chip's mode, as its compiler calls it.
        platform: as jax calls it.
    """

    flops_per_second: float
    hbm_gib: float
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    ring_multiple: int
    dimensions: int
    config_name: str = "default"
    platform: str = "tpu"


# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}; resources.nvidia.com, data sheets of H100 SXM and
# H200 SXM (dense; NVLink one way).
CHIPS = {
    "v4": Chip(275e12, 31.25, 1228e9, 300e9, 4, 3, "megacore"),
    "v5e": Chip(197e12, 15.75, 819e9, 200e9, 16, 2),
    "v5p": Chip(459e12, 95.74, 2765e9, 600e9, 4, 3, "megacore"),
    "v6e": Chip(918e12, 31.25, 1640e9, 400e9, 16, 2),
    "h100": Chip(989e12, 79.1, 3350e9, 450e9, 0, 1, platform="cuda"),
    "h200": Chip(989e12, 139.8, 4800e9, 450e9, 0, 1, platform="cuda"),
}
_SHAPE = re.compile(r"\d+(x\d+)*")


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many chips of a kind, and how they are wired."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)


def parse(name: str) -> Topology:
    """`v5p:4x4x4`, `v6e:16x16`, `h100:8`. Raises `ConfigError`."""
    kind, _, text = name.partition(":")
    kinds = ", ".join(CHIPS)
    require(kind in CHIPS, "topology", name, f"KIND:SHAPE with a KIND of {kinds}")
    chip = CHIPS[kind]
    example = {1: "8", 2: "4x4", 3: "4x4x4"}[chip.dimensions]
    fits = bool(_SHAPE.fullmatch(text)) and text.count("x") == chip.dimensions - 1
    sizes = tuple(int(size) for size in text.split("x")) if fits else ()
    require(fits and all(size > 0 for size in sizes), "topology", name, f"as in {kind}:{example}")
    return Topology(name, chip, sizes)


def _wraps(topology: Topology) -> tuple[bool, ...]:
    """Which dimensions are rings: of v4 and v5p multiples of 4, of v5e and v6e 16 alone."""
    multiple, sizes = topology.chip.ring_multiple, topology.shape
    if topology.chip.dimensions == 3:
        return tuple(size % multiple == 0 for size in sizes)
    return (*(size == multiple for size in sizes), False)


def describe(topology: Topology) -> list[Any]:
    """The devices of a topology, which jax can compile for and nothing else.

    Raises `ConfigError` where the compiler is not installed or knows no such topology.
    """
    if topology.chip.platform == "cuda":
        from dapo_jax.plan import cuda

        return cuda.describe(topology)
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nobody answers where there is no TPU
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    from jax.experimental import topologies

    hosts = (*(min(2, size) for size in topology.shape[:2]), 1)
    try:
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=topology.name,
            chip_config_name=topology.chip.config_name,
            chips_per_host_bounds=hosts,
            wrap=_wraps(topology),  # without it there are no links back to the first chip
        ).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"topology = {topology.name!r}: the TPU's compiler does not describe it: "
            f"{str(error).splitlines()[0]}"
        ) from None
    except RuntimeError as error:  # jax finds no plugin for the platform
        raise ConfigError(
            f"topology = {topology.name!r}: needs the TPU's compiler: "
            f"pip install 'dapo_jax[tpu]' ({str(error).splitlines()[0]})"
        ) from None
