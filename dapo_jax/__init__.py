"""DAPO and related algorithms in JAX: sample groups, keep those with signal, update the policy.

    import dapo_jax

    config = dapo_jax.Config(run_dir="runs/mine", model=dapo_jax.Model(folder="runs/base"))
    result = dapo_jax.train(config, on_step=lambda step, values: print(step, values["reward"]))
    result.metrics                           # a table, a row per step
    result.policy.sample(["1+5+1="])         # what the trained policy answers
    dapo_jax.evaluate(config)                # avg@k, pass@k, maj@k on held-out problems
    dapo_jax.export("runs/mine", "exported") # a folder that transformers and servers load

Names are imported at first use, so importing this package is cheap. `dapo-jax train --help-all`
explains the settings.
"""

# ruff: noqa: F401 (imports for editors and type checkers)

import importlib
import signal
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# `python -m dapo_jax` is being imported: until the command installs its signal handlers, Ctrl-C
# ends it without a traceback.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

_MODULES = {name: f"learner.{name}" for name in ("losses", "advantages")}
_MODULES["algorithms"] = "config.algorithms"
# Module of every other public name: module, or module:name if the name differs.
_DEFINED_IN = {
    "Algorithm": "config.algorithm",
    "preset": "config.algorithms",
    "presets": "config.algorithms:PRESETS",
    "JudgeUnavailable": "types.errors",
    "Observation": "types.structs",
    "is_equivalent": "extras.math.algebra_process",
    "overlong_punishment": "rewards.group_rewards",
    "ConfigError": "types.errors",
    "sample": "run.policy",
    "Policy": "run.policy",
    "ReportConfig": "extras.report.command",
}
_API = "train evaluate sft dpo export plan report ModelFolder Result".split()
_SECTIONS = (
    "Config Model Lora Compute Data Rollout Sampler Reward Optimizer Critic Packing Mesh "
    "Checkpoint Evaluation Log Watch ExportConfig OneMesh Examples Environment".split()
)
_DEFINED_IN |= dict.fromkeys(_API, "commands.api")
_DEFINED_IN |= dict.fromkeys(_SECTIONS, "config.experiment")
_SUPERVISED = "SftConfig DpoConfig Architecture OwnData".split()
_DEFINED_IN |= dict.fromkeys(_SUPERVISED, "extras.sft.settings")

__all__ = sorted([*_MODULES, *_DEFINED_IN])  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from dapo_jax.commands.api import (
        ModelFolder,
        Result,
        dpo,
        evaluate,
        export,
        plan,
        report,
        sft,
        train,
    )
    from dapo_jax.config import algorithms
    from dapo_jax.config.algorithm import Algorithm
    from dapo_jax.config.algorithms import PRESETS as presets
    from dapo_jax.config.algorithms import preset
    from dapo_jax.config.experiment import (
        Checkpoint,
        Compute,
        Config,
        Critic,
        Data,
        Environment,
        Evaluation,
        Examples,
        ExportConfig,
        Log,
        Lora,
        Mesh,
        Model,
        OneMesh,
        Optimizer,
        Packing,
        Reward,
        Rollout,
        Sampler,
        Watch,
    )
    from dapo_jax.extras.math.algebra_process import is_equivalent
    from dapo_jax.extras.report.command import ReportConfig
    from dapo_jax.extras.sft.settings import Architecture, DpoConfig, OwnData, SftConfig
    from dapo_jax.learner import advantages, losses
    from dapo_jax.rewards.group_rewards import overlong_punishment
    from dapo_jax.run.policy import Policy, sample
    from dapo_jax.types.errors import ConfigError, JudgeUnavailable
    from dapo_jax.types.structs import Observation


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dapo_jax.{_MODULES[name]}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, other_name = _DEFINED_IN[name].partition(":")
    return getattr(importlib.import_module(f"dapo_jax.{module}"), other_name or name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
