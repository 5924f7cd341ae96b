"""Devices that this machine lacks, as their compilers describe them, and compiler options."""

import os
import pathlib
import subprocess
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax.commands.command_line import check_flag
from dapo_jax.commands.plan.chips import Topology
from dapo_jax.runtime.settings import ConfigError

# The environment variable that holds a compiler's flags. Only these variables are passed to
# `launch/env.sh`: the user's own XLA_FLAGS are for this machine's devices.
_FLAG_VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "cuda": "XLA_FLAGS"}
_PASSED_VARIABLES = ("PATH", "LIBTPU_INIT_ARGS")
_TPU_VARIABLES = {  # without a TPU nothing answers libtpu's queries
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
# H100 and H200 differ in memory only (NVIDIA's data sheets; CUDA programming guide, compute
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
    """Return the devices of a topology, to compile for; they cannot run programs.

    Raises `ConfigError` if the compiler is not installed or does not know the topology.
    """
    platform = topology.chip.platform
    if platform == "cpu":
        return _cpus(topology)
    describe = _tpus if platform == "tpu" else _gpus
    try:
        return describe(topology)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        reason = f"needs its compiler: pip install 'dapo_jax[{platform}]' ({first})"
        if isinstance(error, jax.errors.JaxRuntimeError):  # else JAX finds no plugin
            reason = f"the compiler does not describe it: {first}"
        raise ConfigError(f"--topology = {topology.name!r}: {reason}") from None


def _cpus(topology: Topology) -> list[Any]:
    devices = jax.devices("cpu")
    flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.chips}"
    allowed = f"at most cpu:{len(devices)} here; {flag} makes more"
    check_flag(topology.chips <= len(devices), "topology", topology.name, allowed)
    return devices[: topology.chips]


def _tpus(topology: Topology) -> list[Any]:
    multiple, sizes = topology.chip.ring_multiple, topology.shape
    # A dimension is a ring if its size is a multiple of 4 (v4, v5p), or 16 (v5e, v6e).
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


def _gpus(topology: Topology) -> list[Any]:
    """Return GPUs, 8 per host. Raises `ConfigError` if a host would have fewer."""
    kind, count = topology.kind, topology.chips
    whole = count <= _GPUS_PER_HOST or count % _GPUS_PER_HOST == 0
    allowed = f"at most {_GPUS_PER_HOST} GPUs or a multiple, as in {kind}:{_GPUS_PER_HOST}"
    check_flag(whole, "topology", topology.name, allowed)
    shape = f"1x{topology.hosts}x{count // topology.hosts}"
    bandwidth = int(topology.chip.hbm_bytes_per_second)
    target = _HOPPER.format(name=kind.upper(), memory=_MEMORY[kind], bandwidth=bandwidth)
    return topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=target
    ).devices


def _environment_script() -> pathlib.Path:
    """Return the path of `launch/env.sh` in the installed package or the checkout."""
    package = pathlib.Path(__file__).parents[2]
    installed = package / "launch" / "env.sh"
    return installed if installed.exists() else package.parent / "launch" / "env.sh"


def compiler_options(topology: Topology) -> dict[str, Any] | None:
    """Return the options of `lowered.compile` that equal a run's flags on that topology.

    A flag that the user has set in `LIBTPU_INIT_ARGS` keeps its value, as it does in a run.
    """
    variable = _FLAG_VARIABLES.get(topology.chip.platform)
    if variable is None:
        return None
    kind = f"tpu-{topology.kind}" if topology.chip.platform == "tpu" else "gpu"
    script = 'source "$0" "$1" && printf %s "${!2}"'
    printed = subprocess.run(
        ["bash", "-c", script, _environment_script(), kind, variable],
        env={name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pairs = (flag.removeprefix("--").partition("=") for flag in printed.split())
    # XLA:GPU accepts only Python's booleans, libtpu only the words.
    values: dict[str, Any] = {"true": True, "false": False} if kind == "gpu" else {}
    return {name: values.get(value, value) for name, _, value in pairs}
