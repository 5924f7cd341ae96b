"""DAPO and its family for JAX: sample groups, keep those that carry signal, update the policy.

    import dapo_jax

    config = dapo_jax.Config(run_dir="runs/mine", model=dapo_jax.Model(folder="runs/base"))
    result = dapo_jax.train(config, on_step=lambda step, values: print(step, values["reward"]))
    result.metrics                           # a table, a row per step
    result.policy.sample(["1+5+1="])         # what the trained policy answers
    dapo_jax.evaluate(config)                # avg@k, pass@k, maj@k on held-out problems
    dapo_jax.export("runs/mine", "exported") # a folder that transformers and servers load

Names are looked up when they are first used, so importing this package imports nothing heavy.
Settings are explained by `help(dapo_jax.Sampler)` and `dapo-jax train --help`.
"""

# ruff: noqa: F401 (imports for editors and type checkers)

import importlib
import signal
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Python is importing a command of this package. Until the command has handlers of its own, Ctrl-C
# ends it without the traceback of an import.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

_ROOMS = {name: f"dapo_jax.learner.{name}" for name in ("losses", "advantages")}
# Module of every other public name: module, or module:name where the name differs.
_HOMES = {
    "train": "commands.api",
    "evaluate": "commands.api",
    "sft": "commands.api_folders",
    "dpo": "commands.api_folders",
    "export": "commands.api_folders",
    "plan": "commands.api_folders",
    "report": "commands.api_folders",
    "ModelFolder": "commands.api_folders",
    "sample": "commands.api_policy",
    "Policy": "commands.api_policy",
    "Result": "commands.api",
    "Algorithm": "algorithms",
    "preset": "algorithms",
    "presets": "algorithms:PRESETS",
    "Observation": "structs",
    "is_equivalent": "verifier.algebra_process",
    "overlong_punishment": "rewards.group_rewards",
    "ConfigError": "runtime.settings",
}
_SECTIONS = (
    "Model Lora Compute Data Rollout Sampler Reward Optimizer Critic Packing Mesh Checkpoint "
    "Evaluation Log Watch SftConfig DpoConfig ExportConfig ReportConfig Architecture Examples "
    "OwnData OneMesh Teacher Environment".split()
)
_HOMES |= dict.fromkeys(("Config", *_SECTIONS), "config.experiment")

__all__ = sorted([*_ROOMS, *_HOMES])  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:  # the same, for editors and type checkers
    from dapo_jax.algorithms import PRESETS as presets
    from dapo_jax.algorithms import Algorithm, preset
    from dapo_jax.commands.api import Result, evaluate, train
    from dapo_jax.commands.api_folders import ModelFolder, dpo, export, plan, report, sft
    from dapo_jax.commands.api_policy import Policy, sample
    from dapo_jax.config.experiment import (
        Architecture,
        Checkpoint,
        Compute,
        Config,
        Critic,
        Data,
        DpoConfig,
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
        OwnData,
        Packing,
        ReportConfig,
        Reward,
        Rollout,
        Sampler,
        SftConfig,
        Teacher,
        Watch,
    )
    from dapo_jax.learner import advantages, losses
    from dapo_jax.rewards.group_rewards import overlong_punishment
    from dapo_jax.runtime.settings import ConfigError
    from dapo_jax.structs import Observation
    from dapo_jax.verifier.algebra_process import is_equivalent


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(_ROOMS[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, _, other = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f"dapo_jax.{room}"), other or name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(types.ModuleType):
    """Module type that keeps `dapo_jax.train` the function once train.py was imported.

    Importing a module makes it an attribute of its package; `from dapo_jax.train import ...` needs
    no such attribute.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
