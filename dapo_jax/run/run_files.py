"""Files and sinks of a run: settings, metrics, rollouts, evaluations, skipped batches, summary."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from dapo_jax.config.experiment import Config
from dapo_jax.contracts import RunSink
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.learner.learners import UpdateRecord
from dapo_jax.learner.skipped_batches import first_skipped, write_skipped
from dapo_jax.reporting.alerts import reward_leads, settings_of
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.records import describe_gaps, is_damaged, read_rows
from dapo_jax.reporting.sinks import (
    CurvesPicture,
    MetricRows,
    RolloutFiles,
    StepLines,
    TensorBoardEvents,
)
from dapo_jax.reporting.trackers import open_trackers
from dapo_jax.run.evaluation import stamp, write_responses
from dapo_jax.runtime import processes
from dapo_jax.runtime.storage.paths import Folder
from dapo_jax.runtime.storage.retries import Storage, write_text
from dapo_jax.structs import CollectedGroups, Group

CONFIG = "config.json"
SUMMARY = "summary.json"


class RunFiles:
    """Sinks of a run, and the files that only the run itself writes.

    The first process writes; on the others every method does nothing. A file that can't be written
    is a warning, and is tried again with the next one. Rows after `last_row` are cut off.
    """

    def __init__(
        self,
        config: Config,
        folder: Folder,
        storage: Storage,
        tokenizer: Tokenizer,
        last_row: int,
        console: Progress,
    ):
        self.folder = folder
        self._config = config
        self._storage = storage
        self._rows: MetricRows | None = None
        self.sinks: list[RunSink] = []
        if not processes.is_first():
            return
        log = config.log
        sent = max((row.get("step", -1) for row in read_rows(folder / "metrics.jsonl")), default=-1)
        self.sinks += open_trackers(folder, config, sent)
        self._rows = MetricRows(folder, last_row, storage)
        picture = CurvesPicture(folder, self._rows, storage, reward_leads(settings_of(config)))
        self.sinks += [self._rows, picture]
        self.sinks += [TensorBoardEvents(folder, last_row, storage)] if log.tensorboard else []
        self.sinks += [RolloutFiles(folder, log, tokenizer, storage)] if log.rollouts else []
        self.sinks.append(StepLines(console, config.total_steps))
        for text in describe_gaps(folder, last_row, log):
            storage.warn(text)
        if is_damaged(folder / CONFIG):
            self.write_settings()

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with contextlib.ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close, kind is not None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        return self._rows.read() if self._rows else []

    def write_settings(self) -> None:
        """Write config.json; a run can be repeated from it."""
        self._write_json(CONFIG, dataclasses.asdict(self._config))

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        if processes.is_first():
            text = json.dumps(content, indent=2)
            self._storage.attempt(name, lambda: write_text(self.folder / name, text))

    def write_row(self, step: int, values: dict[str, float]) -> None:
        """Send the metrics of a step to all sinks."""
        for sink in self.sinks:
            sink.on_row(step, values)

    def write_rollouts(self, step: int, collected: CollectedGroups) -> None:
        """Send the groups of a step to all sinks."""
        for sink in self.sinks:
            sink.on_rollouts(step, collected)

    def write_evaluation(self, step: int, responses: Sequence[Any]) -> None:
        """Write evaluations/step_N.jsonl, and send the responses to all sinks."""
        for sink in self.sinks:
            sink.on_evaluation(step, responses)
        if processes.is_first() and self._config.log.rollouts:
            path = self.folder / "evaluations" / f"step_{step:06d}.jsonl"
            lines = stamp(self._config, f"step {step}")
            self._storage.attempt("evaluations/", lambda: write_responses(path, responses, lines))

    def write_skipped(self, step: int, updates: list[UpdateRecord], groups: list[Group]) -> str:
        """Write the first batch of a step that was skipped; return its folder, or an empty string.

        Every process calls it: a batch is gathered from all.
        """
        skipped, folders = first_skipped(updates), []
        if skipped is not None and processes.is_first():

            def write() -> None:
                folders.append(write_skipped(self.folder, step, *skipped, groups) or "")

            self._storage.attempt("skipped/", write)
        return str(folders[0]) if folders else ""

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, and send the summary to all sinks."""
        self._write_json(SUMMARY, summary)
        for sink in self.sinks:
            sink.on_summary(summary)
