"""GPUs that are not here, as XLA's GPU compiler wants them described.

What NVIDIA publishes of Hopper (H100 and H200 tensor core GPU data sheets; CUDA programming guide,
compute capability 9.0). Only their memory differs.
"""

from typing import Any

from dapo_jax.commands.plan.chips import Topology, check_flag
from dapo_jax.runtime.settings import ConfigError

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


def gpu_devices(topology: Topology) -> list[Any]:
    """The devices of so many GPUs, 8 to a host.

    Raises `ConfigError` for hosts that are not whole, and without the compiler.
    """
    from jax.experimental import topologies

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
        raise ConfigError(
            f"--topology = {topology.name!r}: needs the GPU's compiler: "
            f"pip install 'dapo_jax[cuda]' ({str(error).splitlines()[0]})"
        ) from None
