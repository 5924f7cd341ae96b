"""What a run folder says before anything is loaded."""

import json
from typing import Any

from dapo_jax import processes
from dapo_jax.checkpoints import Checkpoints, can_be_longer, check_same_run, run_settings
from dapo_jax.experiment.config import Config
from dapo_jax.marks import folder_at
from dapo_jax.reporting.notices import announce_end
from dapo_jax.reporting.progress import Progress

SUMMARY = "summary.json"


def finished(config: Config) -> dict[str, Any] | None:
    """The summary of a run folder with nothing left to do, which says so; else None.

    Nothing is loaded for that. Raises `ConfigError` where the run had other settings.
    """
    if not Checkpoints.exist(config.run_dir):
        return None
    with Checkpoints(config.run_dir) as checkpoints:
        step = checkpoints.latest_step()
        if step is None or step < config.total_steps:
            return None
        record = checkpoints.record()
    saved = record["settings"]["data.heldout_problems"]
    settings = run_settings(config, saved if config.data.heldout_problems < 0 else None)
    check_same_run(settings, record["settings"])
    path = folder_at(config.run_dir, SUMMARY)
    summary = processes.from_first(
        lambda: json.loads(path.read_text()) if path.exists() else {}, "summary"
    )
    if record["unwritten"] is not None or summary.get("steps") != step:  # killed before its end
        return None
    announce_end(config, summary, can_be_longer(settings), Progress(config.log.console))
    return summary
