"""Devices that are not here, as their compilers describe them."""

import os
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax.commands.plan.chips import Topology, check_flag
from dapo_jax.runtime.settings import ConfigError

# H100 and H200, which differ in memory alone (NVIDIA's data sheets; CUDA programming guide, compute
# capability 9.0).
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_address_bits: 64
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  device_vendor: "NVIDIA Corporation"
  name: "{name}"
  runtime_version: "12.8.0"
  driver_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
_GPUS_PER_HOST = 8
_MEMORY = {"h100": 84_942_979_072, "h200": 151_397_597_184}  # bytes of a device


def target_devices(topology: Topology) -> list[Any]:
    """Devices of a topology, which jax can compile for and nothing else.

    Raises `ConfigError` where the compiler is not installed or knows no such topology.
    """
    return {"tpu": _tpus, "cuda": _gpus, "cpu": _cpus}[topology.chip.platform](topology)


def _cpus(topology: Topology) -> list[Any]:
    """Devices of this machine's processor."""
    devices = jax.devices("cpu")
    flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.chips}"
    allowed = f"at most cpu:{len(devices)} here; {flag} makes more"
    check_flag(topology.chips <= len(devices), "topology", topology.name, allowed)
    return devices[: topology.chips]


def _tpus(topology: Topology) -> list[Any]:
    multiple, sizes = topology.chip.ring_multiple, topology.shape
    # Dimensions that are rings: of v4 and v5p multiples of 4, of v5e and v6e 16 alone.
    rings = tuple(size % multiple == 0 for size in sizes)
    if topology.chip.dimensions == 2:
        rings = (*(size == multiple for size in sizes), False)
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nobody answers where there is no TPU
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    try:
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=topology.name,
            num_slices=topology.slices,
            chip_config_name=topology.chip.config_name,
            chips_per_host_bounds=(*(min(2, size) for size in sizes[:2]), 1),
            wrap=rings,  # without it there are no links back to the first chip
        ).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"--topology = {topology.name!r}: the TPU's compiler does not describe it: "
            f"{str(error).splitlines()[0]}"
        ) from None
    except RuntimeError as error:  # jax finds no plugin for the platform
        raise _no_compiler(topology, "TPU", "tpu", error) from None


def _gpus(topology: Topology) -> list[Any]:
    """GPUs, 8 to a host. Raises `ConfigError` also for hosts that are not whole."""
    kind, count = topology.name.partition(":")[0], topology.chips
    whole = count <= _GPUS_PER_HOST or count % _GPUS_PER_HOST == 0
    allowed = f"at most {_GPUS_PER_HOST} GPUs or a multiple, as in {kind}:{_GPUS_PER_HOST}"
    check_flag(whole, "topology", topology.name, allowed)
    hosts = -(-count // _GPUS_PER_HOST)
    shape = f"1x{hosts}x{count // hosts}"
    target = _HOPPER.format(
        name=kind.upper(),
        memory=_MEMORY[kind],
        bandwidth=int(topology.chip.hbm_bytes_per_second),
    )
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name=shape, topology=shape, target_config=target
        ).devices
    except RuntimeError as error:  # jax's own, and NotImplementedError without the plugin, are such
        raise _no_compiler(topology, "GPU", "cuda", error) from None


def _no_compiler(topology: Topology, device: str, extra: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"--topology = {topology.name!r}: needs the {device}'s compiler: "
        f"pip install 'dapo_jax[{extra}]' ({str(error).splitlines()[0]})"
    )
