"""Model card of an exported policy: README.md with metadata of the hub, and run_config.json.

Folders of the machine are not published: of an absolute path, only the last name is shown.
"""

import importlib.resources
import json
import pathlib
import re
import shlex
from typing import Any

from flax.traverse_util import unflatten_dict

from dapo_jax.config.experiment import Config, ExportConfig
from dapo_jax.config.settings import leaves
from dapo_jax.run.scores import reward_leads
from dapo_jax.run.sinks import read_rows
from dapo_jax.runtime.storage.files import folder_at

# An absolute path, one that leaves the working folder, or a bucket's; the last name is a group.
PATH = re.compile(
    r"(^|[,=])\s*(?:~|/|\.\./|[A-Za-z]:[\\/]|\w+://)[^,=]*?([^\\/,=]+)[\\/]*(?=[,=]|$)"
)
ENDS = ("", "_low", "_high")
SCORES = [f"heldout_{name}{end}" for name in ("accuracy", "reward") for end in ENDS]


def without_path(name: str, value: Any) -> Any:
    """Return a setting with paths shortened to their last names; prompts are no paths."""
    is_text = isinstance(value, str) and name != "data.system_prompt" and "{" not in value
    return PATH.sub(r"\1\2", value) if is_text else value


def write_card(out: pathlib.Path, config: ExportConfig, run: dict[str, Any], step: int, base: str):
    """Write the card of a policy after `step` steps from `base`, and the settings of its run."""
    from huggingface_hub import ModelCard, ModelCardData

    defaults = {name: value for name, _, value in leaves(Config())}
    changed = {name: run[name] for name in defaults if run[name] != defaults[name]}
    shown = {name: without_path(name, value) for name, value in changed.items()}
    names = [name for name in shown if shown[name] != run[name] and name != "run_dir"]
    replaced = [f"{name}={shlex.quote(shown[name])}" for name in names]
    tables = json.dumps(unflatten_dict({**defaults, **shown}, sep="."), indent=2)
    (out / "run_config.json").write_text(tables, encoding="utf-8")
    is_adapter, rows = (
        config.weights == "adapter",
        read_rows(folder_at(config.run, "metrics.jsonl")),
    )
    relation = "adapter" if is_adapter else "finetune"
    data = ModelCardData(
        base_model=config.base_model or None,
        base_model_relation=relation if config.base_model else None,
        datasets=config.datasets.split(",") if config.datasets else None,
        license=config.license or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["dapo_jax", "reinforcement-learning"],
    )
    template = importlib.resources.files("dapo_jax.run") / "model_card.md"
    ModelCard.from_template(
        data,
        template_str=template.read_text(encoding="utf-8"),
        name=pathlib.Path(config.out).name,
        kind="Low-rank adapters of" if is_adapter else "A policy that began as",
        base=config.base_model or base,
        step=step,
        total_steps=run["total_steps"],
        settings=json.dumps(shown, indent=2, ensure_ascii=False),
        scores=[row for row in rows if "heldout_accuracy" in row and row["step"] <= step],
        columns=sorted(SCORES, key=lambda name: reward_leads(run) and "accuracy" in name),
        replaced=replaced,
    ).save(out / "README.md")
