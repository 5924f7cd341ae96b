"""Compiler flags of a run's launch, so that a plan compiles as the run would."""

import os
import pathlib
import subprocess
from typing import Any

from dapo_jax.commands.plan.chips import Topology

_KINDS = {"tpu": "LIBTPU_INIT_ARGS", "cuda": "XLA_FLAGS"}  # variable that the compiler reads
_KEPT = ("PATH", "LIBTPU_INIT_ARGS")  # other XLA_FLAGS are for this machine's own devices


def environment_script() -> pathlib.Path:
    """`launch/env.sh`, the one place for flags: of the installed package, or of a checkout."""
    package = pathlib.Path(__file__).parents[2]
    installed = package / "launch" / "env.sh"
    return installed if installed.exists() else package.parent / "launch" / "env.sh"


def compiler_options(topology: Topology) -> dict[str, Any] | None:
    """Options of `lowered.compile` that stand for the flags of a run on that topology.

    A flag that the user has set in `LIBTPU_INIT_ARGS` keeps its value, as for a run.
    """
    variable = _KINDS.get(topology.chip.platform)
    if variable is None:
        return None
    generation = topology.name.partition(":")[0]
    kind = f"tpu-{generation}" if topology.chip.platform == "tpu" else "gpu"
    command = 'source "$0" "$1" && printf %s "${!2}"'
    told = subprocess.run(
        ["bash", "-c", command, str(environment_script()), kind, variable],
        env={name: os.environ[name] for name in _KEPT if name in os.environ},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = (flag.removeprefix("--").partition("=") for flag in told.stdout.split())
    # XLA:GPU takes no words for truth, libtpu nothing else.
    words: dict[str, Any] = {"true": True, "false": False} if kind == "gpu" else {}
    return {name: words.get(value, value) for name, _, value in pairs}
