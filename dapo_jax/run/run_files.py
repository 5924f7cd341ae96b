"""Files of a run folder: settings, metrics, rollouts, evaluations, skipped batches, summary."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.contracts import RunSink
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.learner.learners import UpdateRecord
from dapo_jax.learner.skipped_batches import first_skipped, write_skipped
from dapo_jax.reporting.records import describe_gaps, is_damaged
from dapo_jax.reporting.scores import Response
from dapo_jax.reporting.sinks import CurvesPicture, MetricRows, RolloutFiles, TensorBoardEvents
from dapo_jax.reporting.wandb_tracker import WandbSink
from dapo_jax.run.checkpointing.compatibility import SUMMARY
from dapo_jax.run.evaluation.heldout import stamp
from dapo_jax.run.evaluation.response_file import write_responses
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.ownership import Folder
from dapo_jax.runtime.storage.retries import Storage, write_text
from dapo_jax.structs import CollectedGroups, Group

CONFIG = "config.json"


class RunFiles:
    """The sinks of a run and its other files, written by the first process.

    If a file cannot be written, the run warns and tries again with the next one.

    Args:
        last_row: step of the newest row that stays; later ones are cut off.
        stack: closes the sinks.
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
        self.sinks: list[RunSink] = []
        self._rows: MetricRows | None = None
        if processes.is_first():
            stack.push(lambda kind, *_: self._close(kind is not None))
            if config.log.wandb:
                self.sinks.append(WandbSink(folder, config))
            self._rows = MetricRows(folder, last_row, storage)
            self.sinks += [self._rows, CurvesPicture(folder, self._rows, storage)]
            if config.log.tensorboard:
                self.sinks.append(TensorBoardEvents(folder, last_row, storage))
            if config.log.rollouts:
                self.sinks.append(RolloutFiles(folder, config.log, tokenizer, storage))
            for text in describe_gaps(folder, last_row, config.log):
                storage.warn(text)
            if is_damaged(folder / CONFIG):
                self.write_settings()

    def _close(self, failed: bool) -> None:
        for sink in self.sinks:
            sink.close(failed)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        return self._rows.read() if self._rows else []

    def write_settings(self) -> None:
        """config.json, from which a run is repeated."""
        text = json.dumps(dataclasses.asdict(self._config), indent=2)
        self._write_text(CONFIG, text)

    def _write_text(self, name: str, text: str) -> None:
        if self._rows:
            self._storage.attempt(name, lambda: write_text(self.folder / name, text))

    def write_row(self, step: int, values: dict[str, float]) -> None:
        """Send the metrics of a step to all sinks."""
        for sink in self.sinks:
            sink.on_row(step, values)

    def write_rollouts(self, step: int, batch: CollectedGroups) -> None:
        """Send the groups of a step to all sinks."""
        for sink in self.sinks:
            sink.on_rollouts(step, batch)

    def write_evaluation(self, step: int, responses: list[Response]) -> None:
        """Write evaluations/step_N.jsonl if `log.rollouts` asks for it; tell all sinks."""
        for sink in self.sinks:
            sink.on_evaluation(step, responses)
        if self._rows and self._config.log.rollouts:
            path = self.folder / "evaluations" / f"step_{step:06d}.jsonl"
            lines = stamp(self._config, f"step {step}")
            self._storage.attempt("evaluations/", lambda: write_responses(path, responses, lines))

    def write_skipped(self, step: int, updates: list[UpdateRecord], groups: list[Group]) -> str:
        """The first batch of a step whose update was skipped; its folder, or nothing.

        Every process calls it: a batch is gathered from all.
        """
        skipped, folders = first_skipped(updates), []
        if skipped is not None and self._rows:

            def write() -> None:
                folders.append(write_skipped(self.folder, step, *skipped, groups) or "")

            self._storage.attempt("skipped/", write)
        return str(folders[0]) if folders else ""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and send the summary to all sinks."""
        self._write_text(SUMMARY, json.dumps(summary, indent=2))
        for sink in self.sinks:
            sink.on_summary(dict(summary))
