"""Identity of a run: the settings that its checkpoints remember, and their comparison."""

import hashlib
import json
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompts.templates import open_template
from dapo_jax.model import peft_adapters
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.runtime.rules import Rule, When
from dapo_jax.runtime.settings import ConfigError, leaves, require, rules


def _rule(name: str) -> Rule:
    """Rule of a run's setting; of other things that a checkpoint remembers the strictest."""
    return rules(Config).get(name, Rule())


def _may_change(name: str, settings: dict[str, Any]) -> bool:
    may_change = _rule(name).may_change
    return may_change(settings) if isinstance(may_change, When) else may_change


def check_same_run(settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises `ConfigError` naming every setting that would make this another run.

    Args:
        settings, saved: leaves by dotted name, now and when the run began.
    """
    settings, saved = _resolved(settings), _resolved(saved)
    changed = []
    for name, value in settings.items():
        read = _rule(name).read
        # A setting that nothing reads was once accepted with any value.
        is_read = read is None or read(settings)
        if value != saved.get(name) and is_read and not _may_change(name, settings):
            before = saved.get(name)
            changed.append(f"config.{name} = {value!r}, but the run was made with {before!r}")
    if changed:
        raise ConfigError(
            "the run in config.run_dir can't go on with other settings; choose another run_dir:\n  "
            + "\n  ".join(changed)
        )


def can_be_longer(settings: dict[str, Any]) -> bool:
    """True where `total_steps` decides only when a run ends, not what its steps compute."""
    return _may_change("total_steps", settings)


def _resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the critic's own number of steps where -1 leaves it to the algorithm."""
    rest = dict(settings)
    preset, own = rest.pop("algorithm.critic_pretrain_steps"), rest["critic.pretrain_steps"]
    return rest | {"critic.pretrain_steps": preset if own < 0 else own}


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run, with the default of every setting that is younger than it."""
    return {name: value for name, _, value in leaves(Config())} | settings


def frozen_content(folder: str) -> str:
    """Name under which settings remember the content of a frozen model's folder."""
    return f"{folder} (content)"


def run_settings(config: Config, heldout_problems: int | None = None) -> dict[str, Any]:
    """Settings that a checkpoint remembers; frozen models and own templates by content.

    Args:
        heldout_problems: their number, where the setting leaves it open.
    """
    model, folders = config.model, {"reward.model_folder": config.reward.model_folder}
    if config.lora.rank or model.freeze_layers:
        folders["model.folder"] = model.folder
    if config.algorithm.reference:
        folders["model.reference_folder"] = model.reference_folder or model.folder
    folders["teacher.folder"] = config.teacher.folder
    content = {name: fingerprint(folder, name) for name, folder in folders.items() if folder}
    if config.algorithm.reference and config.lora.folder:
        content["lora.folder"] = peft_adapters.fingerprint(config.lora.folder)
    if digest := open_template(config.data.template).digest:
        content["data.template"] = digest
    settings = {name: value for name, _, value in leaves(config)}
    if heldout_problems is not None:
        settings["data.heldout_problems"] = heldout_problems
    return settings | {frozen_content(name): digest for name, digest in content.items()}


def run_identity(settings: dict[str, Any], inputs: dict[str, Any]) -> str:
    """Digest of what a run computes: 16 hexadecimal digits.

    Args:
        settings: by dotted name; those that may change are left out.
        inputs: digests of the files that the run reads.
    """
    fixed = {name: value for name, value in settings.items() if not _rule(name).may_change}
    text = json.dumps([fixed, inputs], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_frozen(settings: dict[str, Any], folder: str, field: str) -> None:
    """Raises `ConfigError` where `folder` has other frozen parameters than the run."""
    content = settings.get(frozen_content("model.folder"))
    allowed = f"what it was: the run trains only a part of {settings['model.folder']}"
    require(content in (None, fingerprint(folder)), field, folder, allowed)
