"""Devices that are not here, as their compilers describe them."""

import os
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax.commands.plan import gpu_targets
from dapo_jax.commands.plan.chips import Topology, check_flag
from dapo_jax.runtime.settings import ConfigError


def _wraps(topology: Topology) -> tuple[bool, ...]:
    """Which dimensions are rings: of v4 and v5p multiples of 4, of v5e and v6e 16 alone."""
    multiple, sizes = topology.chip.ring_multiple, topology.shape
    if topology.chip.dimensions == 3:
        return tuple(size % multiple == 0 for size in sizes)
    return (*(size == multiple for size in sizes), False)


def target_devices(topology: Topology) -> list[Any]:
    """The devices of a topology, which jax can compile for and nothing else.

    Raises `ConfigError` where the compiler is not installed or knows no such topology.
    """
    if topology.chip.platform == "cuda":
        return gpu_targets.gpu_devices(topology)
    if topology.chip.platform == "cpu":
        devices = jax.devices("cpu")
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.chips}"
        allowed = f"at most cpu:{len(devices)} here; {flag} makes more"
        check_flag(topology.chips <= len(devices), "topology", topology.name, allowed)
        return devices[: topology.chips]
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nobody answers where there is no TPU
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
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
            f"--topology = {topology.name!r}: the TPU's compiler does not describe it: "
            f"{str(error).splitlines()[0]}"
        ) from None
    except RuntimeError as error:  # jax finds no plugin for the platform
        raise ConfigError(
            f"--topology = {topology.name!r}: needs the TPU's compiler: "
            f"pip install 'dapo_jax[tpu]' ({str(error).splitlines()[0]})"
        ) from None
