"""Supervised training loop: steps, held-out measurements, metrics, and the model folder."""

import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.markup import escape

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import DpoConfig, SftConfig
from dapo_jax.data.policies import model_path
from dapo_jax.data.prompts.tokenizer import END, PAD
from dapo_jax.learner.batches import Mean, TrainBatch, TrainState
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.learner.update import Learner, learning_rate
from dapo_jax.model import peft_adapters, save_huggingface
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.metrics import add_up
from dapo_jax.reporting.sinks import MetricRows
from dapo_jax.run.components import check_processes
from dapo_jax.run.compute import open_mesh
from dapo_jax.run.export import policy_layers, write_adapters
from dapo_jax.run.supervised.common import Start, open_start
from dapo_jax.run.supervised.resume import METRICS, ResumePoint, Stopped, forget
from dapo_jax.runtime import processes
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.runtime.nonfinite import check_skipped, count_skipped
from dapo_jax.runtime.sharding import flatten, to_host
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import replace

# Metrics of an update that have a meaning without sampling.
MEASURED = ("policy_nll", "entropy", "mean_probability", "gradient_norm", "skipped_updates")
LINES_PER_RUN = 10
# Other libraries would otherwise take the end and pad tokens of the family.
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": PAD,
}
Measure = Callable[[Any], dict[str, float]]  # from parameters to metrics


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples of a supervised run, and measurements of a policy on them.

    Attributes:
        steps: of the run.
        first_params: makes or loads the parameters to train.
        batch: from step and parameters to a minibatch, its microbatches in use, and metrics.
        labels: words of the console line, by metric.
        digests: of the files that are read, by name.
        measure_heldout: on held-out examples, now and then; empty without any.
        measure_training: on training examples, before and after the run.
    """

    steps: int
    first_params: Callable[[], Any]
    batch: Callable[[int, Any], tuple[TrainBatch, int, dict[str, float]]]
    labels: Mapping[str, str]
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    measure_heldout: Measure = lambda params: {}
    measure_training: Measure = lambda params: {}


OpenTask = Callable[[Any, Start, Learner, Signals], Task]


def train_supervised(
    config: SftConfig | DpoConfig, name: str, kind: str, algorithm: Algorithm, open_task: OpenTask
) -> pathlib.Path:
    """Train a policy, write its model folder, and return the folder's path.

    Args:
        name: of the command, for the console.
        kind: of the folder, a key of `output_folder.ALLOWED`.

    Raises:
        ConfigError: settings, files and folders don't fit together.
        Stopped: a signal ended the command; the state is saved beside the folder.
        NotFinite: too many updates in a row were skipped.
    """
    check_processes(config)
    with Signals() as signals, replace("out", config.out, kind) as folder:
        start = open_start(config, open_mesh(config.mesh, config.packing.rows_per_microbatch))
        score = PolicySettings(algorithm, config.compute)
        learner: Learner = keep(
            policy_learner, score, config.optimizer, start.decoder, start.mesh, frozen=start.frozen
        )
        task = open_task(config, start, learner, signals)
        digests = dict(task.digests)
        if config.start:
            digests[config.start] = fingerprint(config.start)
        if config.lora.folder:
            digests[config.lora.folder] = peft_adapters.fingerprint(config.lora.folder)
        with ResumePoint(config, digests) as resume:
            state = resume.begin(learner.abstract_state, lambda: learner.start(task.first_params()))
            task = dataclasses.replace(task, first_params=dict)  # frees the parameters it holds
            log = TrainingLog(name, resume, task, config.optimizer.max_skipped_steps)
            state = _learn(config, task, learner, state, log, signals)
            write_policy(config, kind, start, folder, state.params)
            if folder is not None:
                shutil.copyfile(resume.path / METRICS, folder / METRICS)
    forget(config.out)
    Progress().say(f"policy written to {escape(config.out)}")
    return pathlib.Path(config.out)


def _learn(
    config: SftConfig | DpoConfig,
    task: Task,
    learner: Learner,
    state: TrainState,
    log: "TrainingLog",
    signals: Signals,
) -> TrainState:
    """Return the state after all steps."""
    heldout: dict[str, float] = {}
    if log.resume.step:
        row = log.resume.first_row()
        before = {name: row[name] for name in task.labels if name in row}
    else:
        before = task.measure_training(state.params) | task.measure_heldout(state.params)
        if before:
            log.add(0, before, {})
    for step in range(log.resume.step, task.steps):
        log.stop_if(signals)
        batch, used, values = task.batch(step, state.params)
        rate = learning_rate(config.optimizer, step, task.steps)
        state, (means, _) = learner.update(state, batch, used, rate)
        log.add(step + 1, {"learning_rate": rate} | values, means)
        if log.is_due(step + 1):
            heldout = task.measure_heldout(state.params)
            log.show(heldout)
        log.after_step(state)
    if before:
        # The last step was measured, unless the run was stopped after it.
        after = task.measure_training(state.params)
        after |= heldout or task.measure_heldout(state.params)
        changes = ", ".join(
            f"{task.labels[name]} {before[name]:.3f} -> {after[name]:.3f}" for name in before
        )
        Progress().say(f"{changes} after {task.steps} steps")
    return state


class TrainingLog:
    """Lines of metrics.jsonl, one a step, and a console line now and then.

    The metrics of a step are read while the next one runs, so that no step waits for the host.
    `add` and `show` raise `NotFinite` after `max_skipped_steps` without an update.
    """

    def __init__(self, name: str, resume: ResumePoint, task: Task, max_skipped_steps: int):
        self._name = name
        self.resume = resume
        self._labels = task.labels
        self._writer: MetricRows | None = None
        if processes.is_first():
            self._writer = MetricRows(resume.path, resume.step)
        self._every = max(1, task.steps // LINES_PER_RUN)
        self._total = task.steps
        self._pending: tuple[int, dict[str, float], dict[str, Mean]] | None = None
        self._started = time.perf_counter()
        self._skipped = resume.skipped
        self._max_skipped = max_skipped_steps

    def is_due(self, step: int) -> bool:
        """Return True if the console gets a line after so many steps."""
        return step % self._every == 0 or step == self._total

    def add(self, step: int, values: dict[str, float], means: dict[str, Mean]) -> None:
        """Add the metrics of a step that is running."""
        self._flush()
        self._pending = step, values, means

    def after_step(self, state: TrainState) -> None:
        """End the newest step; its line is written before a checkpoint has it."""
        if self.resume.is_due(self.resume.step + 1):
            self._flush()
        self.resume.after_step(state, self._skipped)

    def stop_if(self, signals: Signals) -> None:
        """Raise `Stopped` if a process received a signal, once all steps are on disk."""
        if signals():
            self._flush()
            self.resume.keep()
            raise Stopped(signals.received)

    def show(self, heldout: dict[str, float]) -> None:
        """Print the newest step, with its held-out metrics."""
        if self._pending is None:
            return
        step, values, means = self._pending
        self._pending = step, values | heldout, means
        metrics = self._flush()
        shown = (name for name in self._labels if name in metrics)
        numbers = "  ".join(f"{self._labels[name]} {metrics[name]:.4f}" for name in shown)
        seconds = time.perf_counter() - self._started
        Progress().say(f"{self._name} step {step:>5}/{self._total}  {numbers}  {seconds:.0f} s")

    def _flush(self) -> dict[str, float]:
        if self._pending is None:
            return {}
        step, values, means = self._pending
        measured = add_up([jax.device_get(means)]) if means else {}
        values = values | {name: measured[name] for name in MEASURED if name in measured}
        if self._writer:
            self._writer.on_row(step, values)
        self._pending = None
        self._skipped = count_skipped(self._skipped, measured)
        check_skipped(self._skipped[""], self._max_skipped, measured)
        return values


def write_policy(
    config: SftConfig | DpoConfig,
    kind: str,
    start: Start,
    folder: pathlib.Path | None,
    params: Any,
) -> None:
    """Write weights, settings and tokenizer into `folder`. Every process calls it.

    Adapters are merged, and written beside it.

    Args:
        kind: of the folder, a key of `output_folder.ALLOWED`.
        folder: exists and is empty; None on a process that does not write.
    """
    decoder, tokenizer = start.decoder, start.tokenizer
    if decoder.adapters:
        flat = flatten(params)

        def read(path: str) -> Any:
            return to_host(flat[path])

        base = model_path(config.start).absolute().name
        write_adapters(config.out, kind, flat, read, decoder, base)
        layers = policy_layers(flat, read, decoder, config.start)
        save_huggingface.save_weights(folder, layers, decoder)
    else:
        save_huggingface.save_folder(folder, params, decoder, tokenizer.end_ids)
    if folder is None:
        return
    if config.start:
        save_huggingface.save_settings_of(config.start, folder, "float32")
    else:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_SETTINGS, indent=2))
