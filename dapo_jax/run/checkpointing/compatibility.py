"""Compatibility of a run with its newest checkpoint: settings, data and code of the user."""

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
from dapo_jax.reporting.records import describe_gaps
from dapo_jax.run.checkpointing.checkpoints import Checkpoints, Record, saved_steps
from dapo_jax.run.checkpointing.same_run import can_be_longer, check_same_run, run_settings
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import ConfigError, leaves
from dapo_jax.runtime.storage.ownership import folder_at
from dapo_jax.runtime.workers.pickled_functions import IN_PROCESS_PREFIX, PICKLED_PREFIX

SUMMARY = "summary.json"


def _source_digest(field: str, name: str) -> str:
    """Digest of the file of a function of the user."""
    file = inspect.getsourcefile(resolve(field, name))
    if file is None:
        return ""
    with open(file, "rb") as opened:
        return hashlib.sha256(opened.read()).hexdigest()[:16]


def gather_inputs(config: Config, prompts: PromptStream) -> dict[str, Any]:
    """Digests of the data, by source, and of the user's code, by module:function."""
    own = {name: "reward.parts" for name in config.reward.weights() if ":" in name}
    if config.algorithm.token_weights:
        own[config.algorithm.token_weights] = "algorithm.token_weights"
    code = {
        name: _source_digest(field, name)
        for name, field in own.items()
        if not name.startswith((IN_PROCESS_PREFIX, PICKLED_PREFIX))
    }
    return {"data": prompts.digests, "code": code}


def _changes(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Descriptions of the sources whose problems have changed."""
    changes = []
    for name, digest in now.items():
        before = then.get(name, digest)
        if digest["problems"] != before["problems"]:
            counts = f"{digest['problems']:,} problems, it had {before['problems']:,}"
            changes.append(f"{name} has {counts}")
        elif digest["texts"] != before["texts"]:
            changes.append(f"{name} has {digest['problems']:,} problems, as before, but others")
        elif digest != before:
            changes.append(f"{name} has the problems it had, but other answers or solutions")
    return changes


def check_record(config: Config, now: Record, saved: Record, warn: Callable[[str], None]) -> None:
    """Raises `ConfigError` where going on from a checkpoint would be another run.

    Args:
        now: settings and inputs of this run.
        saved: record of the checkpoint.
        warn: receives changes of code, and of data where they are allowed.
    """
    settings = dict(saved.settings)
    changed = "; ".join(_changes(now.inputs["data"], saved.inputs.get("data", {})))
    if changed and config.data.heldout_problems < 0:  # of a small file a share of its size
        settings["data.heldout_problems"] = now.settings["data.heldout_problems"]
    check_same_run(now.settings, settings)
    if changed and config.data.changed == "refuse":
        raise ConfigError(
            f"config.data.changed = 'refuse': the data are not what the run began with: {changed}. "
            "Bring them back, choose another run_dir, or say --config.data.changed=allow"
        )
    if changed:
        warn(f"{changed}. What is held out now may have been trained on")
    code = saved.inputs.get("code", {})
    for name, digest in now.inputs["code"].items():
        if code.get(name, digest) != digest:
            warn(f"the file of {name} has changed since the run's newest checkpoint")


def warn_about_heldout(
    config: Config, saved: Record, digests: dict[str, Any], warn: Callable[[str], None]
) -> None:
    """Warns where a run's own held-out problems are not those that it held out."""
    asked = {name: value for name, _, value in leaves(config)}
    names = ("data.source", "data.heldout_source", "seed")
    if all(asked[name] == saved.settings[name] for name in names):
        for change in _changes(digests, saved.inputs.get("data", {})):
            warn(f"{change}: the run may have been trained on problems of this evaluation")


def read_summary(config: Config) -> dict[str, Any]:
    """Content of a run's summary.json; empty where there is none, or a damaged one."""
    path = folder_at(config.run_dir, SUMMARY)

    def read() -> dict[str, Any]:
        try:
            summary = json.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    return processes.broadcast_from_host0(read, "summary")


def finished(config: Config) -> dict[str, Any] | None:
    """Summary of a run with nothing left to do, after a line on the console; else None.

    No model is loaded. Raises `ConfigError` where the run had other settings.
    """
    if not Checkpoints.exist(config.run_dir):
        return None
    if max(saved_steps(config.run_dir), default=-1) < config.total_steps:
        return None
    warnings: list[str] = []  # printed here only for the last step; a run prints its own
    with Checkpoints(config.run_dir, warn=warnings.append) as checkpoints:
        step = checkpoints.latest_step()
        if step is None or step < config.total_steps:
            return None
        record = checkpoints.record()
    saved = record.settings["data.heldout_problems"]
    settings = run_settings(config, saved if config.data.heldout_problems < 0 else None)
    check_same_run(settings, record.settings)
    summary = read_summary(config)
    # A checkpoint made before the last evaluation does not know of it; the summary came after.
    if summary.get("steps") != step:
        return None
    progress = Progress(config.log.console)
    folder = folder_at(config.run_dir)
    warnings += processes.broadcast_from_host0(
        lambda: describe_gaps(folder, step, config.log), "gaps"
    )
    for text in warnings:
        progress.warn(escape(text))
    announce_end(config, summary, can_be_longer(settings), progress)
    return summary
