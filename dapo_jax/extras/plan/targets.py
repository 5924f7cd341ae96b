"""Devices that this machine lacks, as their compilers describe them, and compiler options."""

import os
import pathlib
import subprocess
from typing import Any

import jax
from jax.experimental import topologies

from dapo_jax.commands.command_line import check_flag
from dapo_jax.extras.plan.chips import Topology
from dapo_jax.runtime.settings import ConfigError

_TPU_VARIABLES = {  # without a TPU nothing answers libtpu's queries
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


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
        ["bash", "-c", script, flags, f"tpu-{topology.kind}"],
        env={k: v for k, v in os.environ.items() if k in ("PATH", "LIBTPU_INIT_ARGS")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pairs = (flag.removeprefix("--").partition("=") for flag in printed.split())
    return {name: value for name, _, value in pairs}
