"""What a run was made of, remembered in its checkpoints and compared when it goes on."""

import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.config.user_code import resolve
from dapo_jax.data.prompt_stream import PromptStream
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.notices import announce_end
from dapo_jax.rewards.functions import HERE
from dapo_jax.run.checkpointing.checkpoints import Checkpoints, saved_steps
from dapo_jax.run.checkpointing.same_run import can_be_longer, check_same_run, run_settings
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, leaves
from dapo_jax.runtime.storage.ownership import folder_at

SUMMARY = "summary.json"
INPUTS = "inputs"  # in a checkpoint's record


def _source_digest(field: str, name: str) -> str:
    """Tells versions of the file that a function of the user's own stands in."""
    file = inspect.getsourcefile(resolve(field, name))
    if file is None:
        return ""
    with open(file, "rb") as opened:
        return hashlib.sha256(opened.read()).hexdigest()[:16]


def gather_inputs(config: Config, prompts: PromptStream) -> dict[str, Any]:
    """Digests of the data, by source, and of the user's own code, by module:function."""
    own = {name: "reward.parts" for name in config.reward.weights() if ":" in name}
    if config.algorithm.token_weights:
        own[config.algorithm.token_weights] = "algorithm.token_weights"
    code = {
        name: _source_digest(field, name)
        for name, field in own.items()
        if not name.startswith(HERE)
    }
    return {"data": prompts.digests, "code": code}


def _differences(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """A few words on every source whose problems are others than they were."""
    said = []
    for name, found in now.items():
        before = then.get(name)
        if before is None or found == before:
            continue
        if found["problems"] != before["problems"]:
            said.append(f"{name} has {found['problems']:,} problems, it had {before['problems']:,}")
        elif found["texts"] != before["texts"]:
            said.append(f"{name} has {found['problems']:,} problems, as before, but others")
        else:
            said.append(f"{name} has the problems it had, but other answers or solutions")
    return said


def check_record(
    config: Config,
    settings: dict[str, Any],
    inputs: dict[str, Any],
    record: dict[str, Any],
    warn: Callable[[str], None],
) -> dict[str, Any]:
    """The record of a checkpoint without what it says of settings and inputs, which are compared.

    Args:
        settings, inputs: as they are now.
        warn: is told of code that has changed, and of data where that is allowed.

    Raises:
        ConfigError: it would be another run.
    """
    record = dict(record)
    saved, then = record.pop("settings"), record.pop(INPUTS, {"data": {}, "code": {}})
    changed = "; ".join(_differences(inputs["data"], then["data"]))
    if changed and config.data.heldout_problems < 0:  # of a small file a share of its size
        saved["data.heldout_problems"] = settings["data.heldout_problems"]
    check_same_run(settings, saved)
    if changed and config.data.changed == "refuse":
        raise ConfigError(
            f"config.data.changed = 'refuse': the data are not what the run began with: {changed}. "
            "Bring them back, choose another run_dir, or say --config.data.changed=allow"
        )
    if changed:
        warn(f"{changed}. What is held out now may have been trained on")
    for name, digest in inputs["code"].items():
        if then["code"].get(name, digest) != digest:
            warn(f"the file of {name} has changed since the run's newest checkpoint")
    return record


def warn_about_heldout(
    config: Config, record: dict[str, Any], digests: dict[str, Any], warn: Callable[[str], None]
) -> None:
    """Says where a run's own held-out problems are not those that it held out."""
    then, saved = record.get(INPUTS, {"data": {}})["data"], record["settings"]
    asked = {name: value for name, _, value in leaves(config)}
    names = ("data.source", "data.heldout_source", "seed")
    if all(asked[name] == saved[name] for name in names):
        for said in _differences(digests, then):
            warn(f"{said}: the run may have been trained on problems of this evaluation")


def read_summary(config: Config) -> dict[str, Any]:
    """summary.json of a run folder; empty where there is none, or no whole one."""
    path = folder_at(config.run_dir, SUMMARY)

    def read() -> dict[str, Any]:
        try:
            found = json.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    return processes.from_first(read, "summary")


def finished(config: Config) -> dict[str, Any] | None:
    """The summary of a run folder with nothing left to do, which says so; else None.

    Nothing is loaded for that. Raises `ConfigError` where the run had other settings.
    """
    if not Checkpoints.exist(config.run_dir):
        return None
    if max(saved_steps(config.run_dir), default=-1) < config.total_steps:
        return None
    warnings: list[str] = []  # of one that is not the last the run says them
    with Checkpoints(config.run_dir, warn=warnings.append) as checkpoints:
        step = checkpoints.latest_step()
        if step is None or step < config.total_steps:
            return None
        record = checkpoints.record()
    saved = record["settings"]["data.heldout_problems"]
    settings = run_settings(config, saved if config.data.heldout_problems < 0 else None)
    check_same_run(settings, record["settings"])
    summary = read_summary(config)
    # A checkpoint made before the last evaluation does not know of it; the summary came after.
    if summary.get("steps") != step:
        return None
    progress = Progress(config.log.console)
    for text in warnings:
        progress.warn(escape(text))
    announce_end(config, summary, can_be_longer(settings), progress)
    return summary
