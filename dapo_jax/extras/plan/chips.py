"""Published peak figures of chips, and the topologies that they are sold in."""

import dataclasses
import math
import re

from dapo_jax.commands.command_line import check_flag

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of an accelerator."""

    flops_per_second: float  # matrix products in bfloat16
    hbm_gib: float  # for a TPU the limit that its compiler enforces
    hbm_bytes_per_second: float
    ici_bytes_per_second: float  # to the neighbours, over all links, one way
    ring_multiple: int  # a dimension whose size is a multiple of this is a ring
    dimensions: int
    config_name: str = "default"  # the compiler's name for the chip's mode
    platform: str = "tpu"
    dcn_bytes_per_second: float = math.inf  # to other slices: its part of the host's network


# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}; resources.nvidia.com, data sheets of H100 SXM and
# H200 SXM (dense; NVLink one way); dcn: jax-ml.github.io/scaling-book, its table of TPUs.
# cpu stands for the devices of this machine, to try a plan out; its figures are made up. A plan
# compiles for these and TPUs; the doctor compares GPUs with their peak.
CHIPS = {
    "v4": Chip(275e12, 31.25, 1228e9, 300e9, 4, 3, "megacore", dcn_bytes_per_second=3.125e9),
    "v5e": Chip(197e12, 15.75, 819e9, 200e9, 16, 2, dcn_bytes_per_second=3.125e9),
    "v5p": Chip(459e12, 95.74, 2765e9, 600e9, 4, 3, "megacore", dcn_bytes_per_second=6.25e9),
    "v6e": Chip(918e12, 31.25, 1640e9, 400e9, 16, 2, dcn_bytes_per_second=12.5e9),
    "cpu": Chip(5e11, 4.0, 2e10, 1e10, 0, 1, platform="cpu"),
    "h100": Chip(989e12, 79.1, 3350e9, 450e9, 0, 1, platform="cuda"),
    "h200": Chip(989e12, 139.8, 4800e9, 450e9, 0, 1, platform="cuda"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of equal slices of chips; `shape` is the shape of one slice."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def chips(self) -> int:
        return self.slices * math.prod(self.shape)

    @property
    def hosts(self) -> int:
        """Number of hosts: 8 chips for a single host of v5e or v6e and other devices, else 4."""
        each = math.prod(self.shape)
        eight = self.chip.platform != "tpu" or (each == 8 and self.chip.dimensions == 2)
        return self.slices * math.ceil(each / (8 if eight else 4))


def parse(name: str, slices: int = 1) -> Topology:
    """Parse a topology such as `v5p:4x4x4`, `v6e:16x16`, `cpu:8`. Raises `ConfigError`."""
    kind, _, text = name.partition(":")
    kinds = [kind for kind, chip in CHIPS.items() if chip.platform != "cuda"]
    allowed = f"KIND:SHAPE with a KIND of {', '.join(kinds)}, as in v5p:4x4x4"
    check_flag(kind in kinds, "topology", name, allowed)
    chip = CHIPS[kind]
    example = {1: "8", 2: "4x4", 3: "4x4x4"}[chip.dimensions]
    numbers = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text)
    valid = bool(numbers) and text.count("x") == chip.dimensions - 1
    check_flag(valid, "topology", name, f"as in {kind}:{example}")
    allowed = "at least 1" if chip.platform == "tpu" else f"1: {kind} has no slices"
    check_flag(slices == 1 or (slices > 1 and chip.platform == "tpu"), "slices", slices, allowed)
    return Topology(name, chip, tuple(map(int, text.split("x"))), slices)
