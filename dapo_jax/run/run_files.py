"""Files of a run folder: settings, metrics, rollouts, evaluations, skipped batches, summary."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.learner.learners import UpdateRecord
from dapo_jax.learner.skipped_batches import first_skipped, write_skipped
from dapo_jax.reporting.page.curves import plot_run
from dapo_jax.reporting.records import describe_gaps, is_damaged
from dapo_jax.reporting.scores import Response
from dapo_jax.reporting.wandb_tracker import Tracker
from dapo_jax.reporting.writers import MetricWriter, write_rollouts
from dapo_jax.run.checkpointing.compatibility import SUMMARY
from dapo_jax.run.evaluation.heldout import stamp, write_responses
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import Storage, write_text
from dapo_jax.structs import CollectedGroups, Group

CONFIG = "config.json"


class RunFiles:
    """Files of one run, written by the first process; elsewhere every method does nothing.

    A file that can't be written is a warning, and tried again with the next one.

    Args:
        last_row: step of the newest row that stays; later ones are cut off.
        stack: closes the connection to Weights & Biases.
    """

    def __init__(
        self,
        config: Config,
        folder: Folder,
        storage: Storage,
        tokenizer: Tokenizer,
        last_row: int,
        stack: contextlib.ExitStack,
    ):
        self._config, self.folder, self._storage = config, folder, storage
        self._tokenizer, self._writer = tokenizer, None
        if processes.is_first():
            tracker = stack.enter_context(Tracker(folder, config)) if config.log.wandb else None
            self._writer = MetricWriter(folder, last_row, config.log.tensorboard, tracker, storage)
            for text in describe_gaps(folder, last_row, config.log):
                storage.warn(text)
            if is_damaged(folder / CONFIG):
                self.write_settings()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return self._writer.read() if self._writer else []

    def write_settings(self) -> None:
        """config.json, from which a run is repeated."""
        text = json.dumps(dataclasses.asdict(self._config), indent=2)
        self._write_text(CONFIG, text)

    def _write_text(self, name: str, text: str) -> None:
        if self._writer:
            self._storage.attempt(name, lambda: write_text(self.folder / name, text))

    def write_row(self, step: int, values: dict[str, float]) -> None:
        """A line of metrics.jsonl, and its events."""
        if self._writer:
            self._writer.write(step, values)

    def write_rollouts(self, step: int, batch: CollectedGroups) -> None:
        """rollouts/step_N.jsonl, in the background, where `log.rollouts` asks for it."""
        if self._writer and self._config.log.rollouts:
            log = self._config.log
            options = log.token_groups, self._tokenizer, log.rollouts_keep
            self._storage.attempt_later(
                "rollouts/", lambda: write_rollouts(self.folder, step, batch, *options)
            )

    def write_evaluation(self, step: int, responses: list[Response]) -> None:
        """evaluations/step_N.jsonl, where `log.rollouts` asks for it."""
        if self._writer and self._config.log.rollouts:
            path = self.folder / "evaluations" / f"step_{step:06d}.jsonl"
            lines = stamp(self._config, f"step {step}")
            self._storage.attempt("evaluations/", lambda: write_responses(path, responses, lines))

    def write_skipped(self, step: int, updates: list[UpdateRecord], groups: list[Group]) -> str:
        """The first batch of a step whose update was skipped; its folder, or nothing.

        Every process calls it: a batch is gathered from all.
        """
        skipped, folders = first_skipped(updates), []
        if skipped is not None and self._writer:

            def write() -> None:
                folders.append(write_skipped(self.folder, step, *skipped, groups) or "")

            self._storage.attempt("skipped/", write)
        return str(folders[0]) if folders else ""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json and curves.png."""
        picture, rows = self.folder / "curves.png", self.rows()
        self._write_text(SUMMARY, json.dumps(summary, indent=2))
        self._storage.attempt(picture.name, lambda: plot_run(rows, picture, str(self.folder)))
