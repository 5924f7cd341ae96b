"""Plug-ins by kind and name: the one way in which the core reaches an extra.

A name is looked up in `OURS`, then among the entry points of the group `dapo_jax.KIND`, which
installed packages declare. This module imports nothing of the package.

    verifiers      decide whether a response is correct
    parts          rewards besides a verifier's
    sources        problems: `data.source=NAME:...`
    environments   partners of a dialogue: `environment.name=NAME:...`
    samplers       sample responses in place of this process: `sampler.engine=NAME`
    families       model families by `model_type` of config.json
    settings       sections of a config: `config.extras.NAME`
    sinks          receive what a run reports
    commands       `dapo-jax NAME`
    features       modules that a setting asks for
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

# An object, or a module if there is no colon.
OURS: dict[str, dict[str, str]] = {
    "verifiers": {
        **dict.fromkeys(
            ("final_number", "math", "math_box", "math_label", "dapo"),
            "dapo_jax.extras.math.plugin:MathVerifying",
        ),
        "code": "dapo_jax.extras.code.verifier:CodeVerifying",
    },
    "parts": {"judge": "dapo_jax.extras.judge:ModelJudge"},
    "sources": {
        **dict.fromkeys(("arithmetic", "multi_digit_sums"), "dapo_jax.extras.arithmetic"),
        "gym": "dapo_jax.extras.gym",
        "verifiers": "dapo_jax.extras.environments.verifiers_tasks",
        "word_problems": "dapo_jax.extras.words",
        "calculator_problems": "dapo_jax.extras.words",
    },
    "environments": {
        "second_try": "dapo_jax.rewards.second_try:SecondTry",
        "openenv": "dapo_jax.extras.environments.openenv:open_openenv",
        "gymnasium": "dapo_jax.extras.environments:refuse_gymnasium",
        "verifiers": "dapo_jax.extras.environments.verifiers:open_verifiers",
    },
    "samplers": {
        "exact": "dapo_jax.extras.exact:open_exact",
        "samplers": "dapo_jax.extras.samplers.remote_sampler:open_remote",
        "vllm": "dapo_jax.extras.vllm.vllm_sampler:open_vllm",
    },
    "families": {
        "gemma4_text": "dapo_jax.extras.families.gemma4:GEMMA4",
        "gemma4_unified_text": "dapo_jax.extras.families.gemma4:GEMMA4_UNIFIED",
        "qwen3_5_text": "dapo_jax.extras.families.qwen3_5:QWEN3_5",
        "qwen3_5_moe_text": "dapo_jax.extras.families.qwen3_5:QWEN3_5_MOE",
        "qwen3_next": "dapo_jax.extras.families.qwen3_5:QWEN3_NEXT",
    },
    "settings": {
        "judge": "dapo_jax.extras.judge:JudgeSettings",
        "math": "dapo_jax.extras.math.settings:MathSettings",
        "samplers": "dapo_jax.extras.samplers.settings:SamplersSettings",
        "teacher": "dapo_jax.extras.distillation.settings:TeacherSettings",
        "vllm": "dapo_jax.extras.vllm:VllmSettings",
    },
    "sinks": {},
    "commands": {
        "doctor": "dapo_jax.extras.doctor:main",
        "dpo": "dapo_jax.extras.sft.commands:dpo",
        "evaluate": "dapo_jax.commands.evaluate:main",
        "export": "dapo_jax.commands.export:main",
        "configs": "dapo_jax.commands.configs:main",
        "init": "dapo_jax.extras.init:main",
        "plan": "dapo_jax.extras.plan.main:main",
        "report": "dapo_jax.extras.report.command:main",
        "sampler": "dapo_jax.extras.samplers.command:main",
        "serve": "dapo_jax.extras.serve.server:main",
        "sft": "dapo_jax.extras.sft.commands:sft",
        "train": "dapo_jax.commands.train:main",
    },
    "features": {
        "alerts": "dapo_jax.extras.alerts",
        "delta_net": "dapo_jax.extras.families.delta_net",
        "divergence": "dapo_jax.extras.distillation.divergence",
        "extraction": "dapo_jax.data.extraction",
        "gguf": "dapo_jax.extras.gguf",
        "mixed_layers": "dapo_jax.extras.families.mixed_layers",
        "plan": "dapo_jax.extras.plan.plan",
        "presets": "dapo_jax.config.algorithms",
        "report": "dapo_jax.extras.report.page",
        "report_command": "dapo_jax.extras.report.command",
        "supervised": "dapo_jax.extras.sft.commands",
        "teacher": "dapo_jax.extras.distillation.teacher",
        "trackers": "dapo_jax.extras.trackers",
    },
}


@functools.cache
def _installed(kind: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    return {
        point.name: point for point in importlib.metadata.entry_points(group=f"dapo_jax.{kind}")
    }


def names(kind: str) -> tuple[str, ...]:
    """Return the known names of a kind, ours first."""
    return tuple(dict.fromkeys([*OURS[kind], *sorted(_installed(kind))]))


def owner(kind: str, name: str) -> str:
    """Return the installed package that a name belongs to, or "" if it is ours or unknown."""
    point = None if name in OURS[kind] else _installed(kind).get(name)
    return point.dist.name if point and point.dist else ""


def find(kind: str, name: str) -> Any:
    """Return the plug-in of this name, or None if there is none.

    Raises:
        ImportError: the plug-in, or what it needs, can't be imported.
    """
    path = OURS[kind].get(name)
    if path is None:
        point = _installed(kind).get(name)
        return point.load() if point else None
    module, _, attribute = path.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def feature(name: str) -> Any:
    """Return the module of a feature."""
    return find("features", name)
