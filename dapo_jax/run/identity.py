"""Identity of a run: settings, data and code that decide whether a checkpoint can be resumed."""

import dataclasses
import hashlib
import inspect
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dapo_jax.config.algorithm import OWN_FUNCTIONS
from dapo_jax.config.experiment import Config, Reward
from dapo_jax.config.settings import defaults, fields, leaves
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.data.prompts.templates import open_template, open_text
from dapo_jax.data.row_formats import FIELDS, parse_fields
from dapo_jax.data.sources import Source, parse_range, parse_sources
from dapo_jax.model import peft_adapters
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.runtime import processes
from dapo_jax.runtime.user_code import resolve
from dapo_jax.runtime.workers.pickled_functions import IN_PROCESS_PREFIX, PICKLED_PREFIX
from dapo_jax.types.errors import ConfigError, present_name
from dapo_jax.types.rules import is_own


def _list(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",")]


# Readers of settings that have several spellings.
MEANINGS: dict[str, Callable[[str], Any]] = {
    "reward.parts": lambda text: Reward(parts=text).weights(),
    "data.source": lambda text: list(parse_sources("data.source", text).items()),
    "data.heldout_source": lambda text: list(parse_sources("data.heldout_source", text).items()),
    "data.fields": lambda text: parse_fields("data.fields", text, FIELDS),
    "data.difficulty": parse_range,
    "environment.tools": _list,
    "lora.targets": lambda text: sorted(_list(text)),
    **dict.fromkeys(("data.folder", "model.folder", "extras.teacher.folder"), os.path.normpath),
}


@dataclasses.dataclass
class RunProgress:
    """State of a run beside its arrays."""

    heldout_before: float | None = None  # leading held-out score before the first step
    seconds: float = 0.0  # duration of the run, over all its processes
    unwritten: dict[str, float] | None = None  # metrics of a step that is not evaluated yet
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # see `count_skipped`
    position: int = 0  # index of the next prompt in the data
    kept_fraction: float = 1.0  # of groups that carried signal: the next step samples ahead by it
    pools: dict[str, bool] = dataclasses.field(default_factory=dict)  # resting problems by digest
    carried_bytes: int = 0  # of the entry with the groups that the next step continues
    ahead_bytes: int = 0  # of the entry with the rollouts of the next steps
    shapes: list[list[Any]] = dataclasses.field(default_factory=list)  # of rows, see `RowShape`
    entropy_weight: float = 0.0  # of the next step's adaptive bonus
    has_behaviour: bool = False  # whether the policy before the newest update has to sample more


@dataclasses.dataclass(frozen=True)
class Record:
    """JSON beside the arrays of a checkpoint: the run's progress, and what decides its results."""

    step: int  # finished steps
    settings: dict[str, Any]  # values by dotted name
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)  # digests of files, by kind
    progress: RunProgress = dataclasses.field(default_factory=RunProgress)

    @classmethod
    def read(cls, content: Mapping[str, Any], place: os.PathLike) -> "Record":
        """Return the record in a checkpoint's JSON; settings younger than it get defaults."""
        try:
            progress = RunProgress(**content["progress"])
        except (KeyError, TypeError):
            raise ConfigError(
                f"config.run_dir: {place} was saved by another version of dapo_jax: resume with "
                "that version, or choose another run_dir"
            ) from None
        settings = with_defaults(content["settings"])
        return cls(content["step"], settings, content["inputs"], progress)


def may_change(name: str, settings: dict[str, Any]) -> bool:
    """Return True if a resumed run may have another value of a setting."""
    if (field := fields(Config).get(name)) is None:
        return False  # the strictest for other entries of a checkpoint
    allowed = field.metadata["may_change"]
    return bool(allowed(settings) if callable(allowed) else allowed)


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a run by their present names, with the default of every younger one."""
    present = {present_name(name): value for name, value in settings.items()}
    return defaults(Config) | present


def run_identity(settings: dict[str, Any], inputs: dict[str, Any]) -> str:
    """Return a digest of what a run computes: 16 hexadecimal digits."""
    usual, known = defaults(Config), with_defaults(settings)
    # A package that adds settings of an extra does not change the run.
    named = {n: v for n, v in settings.items() if not n.startswith("extras.") or v != usual[n]}
    fixed = {n: meaning(n, v) for n, v in named.items() if not may_change(n, known)}
    text = json.dumps([fixed, inputs], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class OtherRun(ConfigError):
    """Raised if a checkpoint is that of a run with other settings or data."""


def check_same_run(settings: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise `OtherRun` with every setting that would make this another run."""
    settings, saved = _resolved(settings), _resolved(saved)
    changed = []
    for name, value in settings.items():
        before = saved.get(name)
        is_same = meaning(name, value) == meaning(name, before)
        if not is_same and not may_change(name, settings):
            changed.append(f"config.{name} = {value!r}, but the run was made with {before!r}")
    if changed:
        raise OtherRun(
            "the run in config.run_dir can't resume with other settings; choose another run_dir:"
            "\n  " + "\n  ".join(changed)
        )


def _resolved(settings: dict[str, Any]) -> dict[str, Any]:
    # -1 critic steps leave it to the algorithm.
    others = dict(settings)
    preset = others.pop("algorithm.critic_pretrain_steps")
    steps = others["critic.pretrain_steps"]
    return others | {"critic.pretrain_steps": preset if steps < 0 else steps}


def meaning(name: str, value: Any) -> Any:
    """Return a value that is equal for spellings of one setting, such as rule=1 and rule=1.0."""
    if not isinstance(value, str) or not value:
        return float(value) if type(value) is int else value
    try:
        return MEANINGS[name](value) if name in MEANINGS else value
    except ConfigError:  # of an earlier version
        return value


def frozen_content(folder: str) -> str:
    """Return the name of the setting that holds the fingerprint of a frozen model."""
    return f"{folder} (content)"


def run_settings(config: Config, heldout_problems: int | None = None) -> dict[str, Any]:
    """Return the settings that a checkpoint holds; frozen models and own templates by content."""
    model, folders = config.model, {"reward.model_folder": config.reward.model_folder}
    if config.lora.rank or model.freeze_layers:
        folders["model.folder"] = model.folder
    if config.algorithm.reference:
        folders["model.reference_folder"] = model.reference_folder or model.folder
    teacher_folder = model.folder if config.algorithm.distils else ""
    folders["extras.teacher.folder"] = config.extras.teacher.folder or teacher_folder
    content = {name: fingerprint(folder, name) for name, folder in folders.items() if folder}
    if config.algorithm.reference and config.lora.folder:
        content["lora.folder"] = peft_adapters.fingerprint(config.lora.folder)
    if digest := open_template(config.data.template).digest:
        content["data.template"] = digest
    if config.data.user_template:
        content["data.user_template"] = open_text(config.data.user_template).digest
    settings = {name: value for name, _, value in leaves(config)}
    if heldout_problems is not None:
        settings["data.heldout_problems"] = heldout_problems
    return settings | {frozen_content(name): digest for name, digest in content.items()}


def gather_inputs(config: Config, prompts: PromptStream) -> dict[str, Any]:
    """Return digests of the data, by source, and of the user's code, by module:function."""
    functions = {name: "reward.parts" for name in config.reward.weights() if ":" in name}
    for field in ("token_weights", *OWN_FUNCTIONS):
        if is_own(name := getattr(config.algorithm, field)):
            functions[name] = f"algorithm.{field}"
    code = {}
    for name, field in functions.items():
        if not name.startswith((IN_PROCESS_PREFIX, PICKLED_PREFIX)):
            file = inspect.getsourcefile(resolve(field, name))
            content = pathlib.Path(file).read_bytes() if file else None
            code[name] = "" if content is None else hashlib.sha256(content).hexdigest()[:16]
    return {"data": prompts.digests, "code": code}


def describe_changes(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Describe the sources with other problems, answers or solutions than before."""
    changes = []
    for name, digest in now.items():
        before = then.get(name, digest)
        counts = f"{name} has {digest['problems']:,} problems, it had {before['problems']:,}"
        if digest["problems"] == before["problems"]:
            counts += "; their texts, answers or solutions differ, or columns of reward functions"
        changes += [counts] if digest != before else []
    return changes


def check_record(config: Config, now: Record, saved: Record, warn: Callable[[str], None]) -> None:
    """Raise `OtherRun` if resuming from a checkpoint would be another run."""
    settings = dict(saved.settings)
    changed = "; ".join(describe_changes(now.inputs["data"], saved.inputs.get("data", {})))
    if changed and config.data.heldout_problems < 0:  # a fraction of a small file
        settings["data.heldout_problems"] = now.settings["data.heldout_problems"]
    check_same_run(now.settings, settings)
    if changed and config.data.changed == "refuse":
        raise OtherRun(
            "config.data.changed = 'refuse': the data differ from those the run began with, or an "
            f"earlier version of dapo_jax chose them: {changed}. Restore them, choose another "
            "run_dir, or pass --config.data.changed=allow"
        )
    if changed:
        warn(f"{changed}. Problems that are held out now may have been trained on")
    code = saved.inputs.get("code", {})
    for name, digest in now.inputs["code"].items():
        if code.get(name, digest) != digest:
            warn(f"the file of {name} has changed since the run's newest checkpoint")


# --- several processes -----------------------------------------------------------------------

# Settings that name a model folder.
MODEL_FOLDERS = (
    "model.folder model.reference_folder extras.teacher.folder reward.model_folder critic.folder "
    "start reference"
).split()


def check_processes(config: Any) -> None:
    """Raise `ConfigError` if processes have different settings, models or code."""
    digests: dict[str, Callable[[str], str]] = {
        **dict.fromkeys(MODEL_FOLDERS, fingerprint),
        "lora.folder": peft_adapters.fingerprint,
        "data.template": lambda name: open_template(name).digest,
        "data.user_template": lambda name: open_text(name).digest,
    }

    def values() -> dict[str, Any]:
        settings = {name: value for name, _, value in leaves(config)}
        compared = {f"config.{name}": value for name, value in settings.items()}
        for name, digest in digests.items():
            if settings.get(name):
                try:
                    content = digest(settings[name])
                except (ConfigError, OSError) as error:
                    content = str(error)
                compared[f"the content of config.{name}"] = content
        compared["dapo_jax's code"] = processes.code_digest()
        compared["jax's version"] = jax.__version__
        return compared

    processes.check_same(values)


def check_data(sources: Sequence[Source]) -> None:
    """Raise `ConfigError` if processes read different problems under the same names."""
    processes.check_same(lambda: {f"the data of {s.name}": s.digests() for s in sources})
