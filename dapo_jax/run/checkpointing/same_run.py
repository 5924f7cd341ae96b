"""Which settings make a run the same one: what its checkpoints remember and compare."""

import hashlib
import json
from typing import Any

from dapo_jax.config.combinations import READ_WHERE, is_read
from dapo_jax.config.experiment import Config
from dapo_jax.data.prompts.templates import open_template
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.runtime.settings import ConfigError, leaves, require

# Settings that may differ between the parts of a run: they change where, how fast or how loudly it
# goes on, or when it ends; never what a step computes (beyond rounding).
FREE = (
    "run_dir total_steps data.changed log. watch. checkpoint. evaluation. mesh. packing. "
    "reward.workers reward.timeout_seconds compute.remat compute.scan_unroll compute.attention "
    "compute.logprob_chunk_tokens sampler.slots sampler.burst_tokens sampler.first_window_tokens "
    "sampler.cache sampler.page_tokens sampler.pages sampler.prefill_prompts "
    "sampler.prefill_chunk_tokens "
    "sampler.load_layers optimizer.max_skipped_steps critic.optimizer.max_skipped_steps"
).split()
# Of these the ones that decide what is carried from one step to the next, where anything is.
SCHEDULE = (
    "sampler.slots sampler.burst_tokens sampler.cache sampler.page_tokens sampler.pages".split()
)


def _is_free(name: str) -> bool:
    """A name in `FREE` is that setting; one that ends in a point is all of a section."""
    return any(name == free or free.endswith(".") and name.startswith(free) for free in FREE)


def check_same_run(settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises `ConfigError` naming every setting that would make this another run.

    Args:
        settings, saved: leaves by dotted name, now and when the run began.
    """
    settings, saved = _resolved(settings), _resolved(saved)
    strict = set() if can_be_longer(settings) else {"total_steps"}
    if settings["rollout.carry_over"] != "none":
        strict |= set(SCHEDULE)
    changed = [
        f"config.{name} = {value!r}, but the run was made with {saved.get(name)!r}"
        for name, value in settings.items()
        if value != saved.get(name)
        and (name in strict or not _is_free(name))
        # What nothing reads was once accepted, whatever it said.
        and (name not in READ_WHERE or is_read(name, settings))
    ]
    if changed:
        raise ConfigError(
            "the run in config.run_dir can't go on with other settings; choose another run_dir:\n  "
            + "\n  ".join(changed)
        )


def can_be_longer(settings: dict[str, Any]) -> bool:
    """Whether `total_steps` decides only when a run ends, not what its steps compute."""
    schedules = {settings["optimizer.schedule"]}
    if settings["algorithm.critic"]:
        schedules.add(settings["critic.optimizer.schedule"])
    return schedules == {"constant"}


def _resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """With the number of steps that -1 leaves to the algorithm, as runs before there was a -1."""
    rest = dict(settings)
    preset, own = rest.pop("algorithm.critic_pretrain_steps"), rest["critic.pretrain_steps"]
    return rest | {"critic.pretrain_steps": preset if own < 0 else own}


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a run, with the default of every setting that is younger than it."""
    return {name: value for name, _, value in leaves(Config())} | settings


def frozen_content(folder: str) -> str:
    """The name under which settings remember what a frozen model's folder held."""
    return f"{folder} (content)"


def run_settings(config: Config, heldout_problems: int | None = None) -> dict[str, Any]:
    """What a checkpoint remembers; frozen models and a template of one's own by content.

    Args:
        heldout_problems: how many there are, where the setting leaves it open.
    """
    model, folders = config.model, {"reward.model_folder": config.reward.model_folder}
    if config.lora.rank or model.freeze_layers:
        folders["model.folder"] = model.folder
    if config.algorithm.reference:
        folders["model.reference_folder"] = model.reference_folder or model.folder
    content = {name: fingerprint(folder, name) for name, folder in folders.items() if folder}
    if digest := open_template(config.data.template).digest:
        content["data.template"] = digest
    settings = {name: value for name, _, value in leaves(config)}
    if heldout_problems is not None:
        settings["data.heldout_problems"] = heldout_problems
    return settings | {frozen_content(name): found for name, found in content.items()}


def run_identity(settings: dict[str, Any], inputs: dict[str, Any]) -> str:
    """The same for runs that compute the same; `inputs` are digests of what they read."""
    told = {name: value for name, value in settings.items() if not _is_free(name)}
    text = json.dumps([told, inputs], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_frozen(settings: dict[str, Any], folder: str, field: str) -> None:
    """Raises `ConfigError` where frozen parameters of a run are not those of `folder`."""
    content = settings.get(frozen_content("model.folder"))
    allowed = f"what it was: the run trains only a part of {settings['model.folder']}"
    require(content in (None, fingerprint(folder)), field, folder, allowed)
