"""The loop of a run: steps, evaluations, console lines, checkpoints, and leaving when asked to."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.reporting.alerts import Alerts
from dapo_jax.reporting.notices import (
    announce_data,
    warn_about_answers,
    warn_about_rounding,
    warn_about_warmup,
)
from dapo_jax.reporting.page.page import write_own_page
from dapo_jax.reporting.scores import Response
from dapo_jax.reporting.sinks import StepLines
from dapo_jax.rollout.dynamic_sampling import Starved, seek
from dapo_jax.rollout.source import NoJournal
from dapo_jax.run.checkpointing.checkpoints import Checkpoints, Record
from dapo_jax.run.checkpointing.compatibility import (
    check_record,
    finished,
    gather_inputs,
)
from dapo_jax.run.checkpointing.integrity import find_steps
from dapo_jax.run.checkpointing.rollout_journal import RolloutJournal
from dapo_jax.run.checkpointing.same_run import run_identity, run_settings
from dapo_jax.run.checkpointing.saver import CheckpointSaver
from dapo_jax.run.components import Components, build, check_data, check_processes
from dapo_jax.run.evaluation.heldout import (
    heldout_metrics,
    report_on,
    sample_heldout,
    sample_responses,
)
from dapo_jax.run.run_files import RunFiles
from dapo_jax.run.state import (
    RunProgress,
    announce_policy,
    first_state,
    resident_megabytes,
    restore,
    save,
)
from dapo_jax.run.step_record import measure, trace
from dapo_jax.runtime import processes
from dapo_jax.runtime.clock import Clock
from dapo_jax.runtime.nonfinite import PREFIXES, check_skipped, count_skipped
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import claim
from dapo_jax.runtime.storage.ownership import RUN
from dapo_jax.runtime.storage.retries import Storage, suppress_storage_errors
from dapo_jax.structs import Interrupted, SamplingRule
from dapo_jax.train import Trainer, TrainerState, train_step

CHECKED_PROMPTS, CHECKED_SAMPLES = 8, 4  # at the start, where no held-out problems serve
SHOWN_BROKEN_GROUPS = 3
OnStep = Callable[[int, dict[str, float]], Any]


class Run:
    """Loop of a run from its first step to its last.

    Args:
        record: settings and inputs, which every checkpoint has.
        on_step: is given every finished step and its metrics; True ends the run.
    """

    def __init__(
        self,
        components: Components,
        trainer: Trainer,
        state: TrainerState,
        progress: RunProgress,
        files: RunFiles,
        checkpoints: Checkpoints,
        storage: Storage,
        journal: RolloutJournal | NoJournal,
        record: Record,
        signals: Signals,
        on_step: OnStep | None = None,
    ):
        self.config, self.components, self.trainer = components.config, components, trainer
        self.state, self.progress, self.files, self.signals = state, progress, files, signals
        self._storage, self._journal, self._record = storage, journal, record
        self._checkpoints, self._saver = checkpoints, CheckpointSaver(checkpoints, storage)
        self._console, self._on_step = components.progress, on_step
        self._alerts = Alerts(self.config, files.rows())
        self._heldout = components.prompts.heldout_prompts()
        self._started = time.perf_counter() - progress.seconds

    def begin(self) -> None:
        """Before the first step: the first row, and whether template and verifier agree."""
        progress = self.progress
        if self.state.step > 0 or progress.heldout_before is not None:
            return
        values, responses = self.evaluate()
        if values:
            progress.heldout_before = values["heldout_accuracy"]
            self.files.write_row(0, values)
            self._console.say(f"held-out accuracy before training: {progress.heldout_before:.3f}")
        warn_about_answers(responses or self._first_responses(), self.config, self._console)

    def evaluate(self) -> tuple[dict[str, float], list[Response]]:
        """Held-out metrics of the policy as it is, and the responses; none without problems."""
        if not self._heldout:
            return {}, []
        clock, config, components = Clock(), self.config, self.components
        params, rooms = self.state.learners.policy.params, (components.sampler, components.judge)
        with self._console.working(f"evaluating {len(self._heldout)} held-out problems"):
            responses = sample_heldout(config, params, self._heldout, *rooms, self.signals)
        self.files.write_evaluation(self.state.step, responses)
        # Whether two answers are equal is asked of a worker.
        values = processes.broadcast_from_host0(
            lambda: heldout_metrics(report_on(responses, config)), "held-out metrics"
        )
        return values | {"seconds_evaluation": clock.total()}, responses

    def _first_responses(self) -> list[Response]:
        """A few responses to the first training prompts."""
        components, sampler = self.components, self.config.sampler
        prompts = seek(components.prompts, self.state.source.position)
        samples = range(min(CHECKED_SAMPLES, self.config.rollout.samples_per_prompt))
        count = min(CHECKED_PROMPTS, self.config.rollout.prompts_per_step)
        wanted = [(prompt, samples) for prompt in itertools.islice(prompts, count)]
        rule = SamplingRule(sampler.temperature, sampler.top_p, sampler.top_k)
        params, rooms = self.state.learners.policy.params, (components.sampler, components.judge)
        return list(sample_responses(params, wanted, *rooms, rule, self.signals))

    def step(self) -> None:
        """Rollout step with everything that is shown and written of it."""
        clock, console, log = Clock(), self._console, self.config.log
        with console.working(f"step {self.state.step + 1}: updating", stays=False):
            with clock.running():
                self.state, record = train_step(self.trainer, self.state)
            traces = trace(self.config, record)
            values = measure(self.config, record, clock)
        self.progress.unwritten = values
        self.progress.skipped = count_skipped(self.progress.skipped, values)
        step, batch = self.state.step, record.rollouts.batch
        self.files.write_rollouts(step, dataclasses.replace(batch, traces=traces))
        for group in batch.broken[:SHOWN_BROKEN_GROUPS]:
            console.warn(f"step {step}: a group was dropped: {escape(str(group.broken))}")
        if due(step - 1, log.show_group_every_steps) and batch.groups:
            console.group(batch.groups[0])
        for text in self._alerts.check_step(values):
            console.warn(escape(f"step {step}: {text}"))
        if folder := self.files.write_skipped(step, record.updates, batch.groups):
            console.say(escape(f"dapo-jax replay {folder} says more"))
        self.complete_row(values)

    def complete_row(self, values: dict[str, float]) -> None:
        """The evaluation that is due, the step's row, and its checkpoint.

        Until then the metrics travel in the checkpoint, so that an evaluation that a signal cut
        short is made up for when the run goes on.
        """
        config, step = self.config, self.state.step
        last = step == config.total_steps
        if last or due(step, config.evaluation.every_steps):
            values = values | self.evaluate()[0]
        self.files.write_row(step, values)
        self.progress.unwritten = None
        for prefix, optimizer in zip(
            PREFIXES, (config.optimizer, config.critic.optimizer), strict=True
        ):
            count = self.progress.skipped.get(prefix, 0)
            check_skipped(count, optimizer.max_skipped_steps, values, prefix)
        learns = not any(self.progress.skipped.values())  # else older checkpoints are worth more
        wanted = last or learns and due(step, config.checkpoint.every_steps)
        self._saver.step(wanted, self._save)
        if config.checkpoint.keep_groups and processes.is_first():
            with suppress_storage_errors():  # else after the next step
                self._journal.forget(max(find_steps(config.run_dir), default=0))
        if (
            self._on_step
            and isinstance(end := self._on_step(step, values), bool | np.bool_)
            and end
        ):
            self.signals.received = self.signals.received or "on_step"

    def _save(self) -> None:
        self._storage.drain()  # a checkpoint's step has its records
        self.progress.seconds = time.perf_counter() - self._started
        save(self._checkpoints, self.state, self.progress, self._record)

    def keep(self) -> None:
        """Saves, and returns when the state is on disk. Raises `NotSaved`, `NotFinite`."""
        with self._console.working("saving"):
            self._saver.last(self._save)
        self._storage.clear_backoff()  # what comes now has no later
        self._journal.forget(self.state.step)
        self._storage.drain()

    def finish(self) -> dict[str, Any]:
        """The summary, after the last checkpoint, with its file, picture and page."""
        self.keep()
        return processes.broadcast_from_host0(self._finish, "summary")

    def _finish(self) -> dict[str, Any]:
        rows, progress, config = self.files.rows(), self.progress, self.config
        before = progress.heldout_before
        after = rows[-1].get("heldout_accuracy") if rows else None
        summary = {
            "steps": self.state.step,
            "heldout_accuracy_before": before,
            "heldout_accuracy_after": after,
            "seconds": round(progress.seconds, 1),
            "seed": config.seed,
            "megabytes_per_device": resident_megabytes(self.components, self.state),
        }
        self.files.write_summary(summary)
        if before is not None and after is not None:
            self._console.say(
                f"[bold]held-out accuracy {before:.3f} -> {after:.3f}[/] after {self.state.step} "
                f"steps in {progress.seconds:.0f} s"
            )
        if config.log.report:
            write_own_page(self.files.folder, self._console)
        self._console.say(f"metrics, rollouts and pictures are in {escape(str(self.files.folder))}")
        return summary


def open_run(
    config: Config,
    signals: Signals,
    stack: contextlib.ExitStack,
    on_step: OnStep | None = None,
) -> Run:
    """The run of `config.run_dir`, from its newest checkpoint or from the beginning.

    Args:
        stack: closes workers, checkpoints and the lock on the folder.

    Raises:
        ConfigError: the folder holds another run, or settings and model don't fit together.
    """
    folder = stack.enter_context(claim("run_dir", config.run_dir, RUN))
    components = build(config, should_abort=signals.received_locally)
    console, prompts = components.progress, components.prompts
    stack.enter_context(console.compilation(config.model.folder))
    stack.callback(components.close)
    storage = Storage(lambda text: console.warn(escape(text)))
    checkpoints = stack.enter_context(Checkpoints(folder, config.checkpoint, storage.warn))
    check_data([*prompts.sources, *prompts.heldout])
    announce_data(config, prompts, console)
    warn_about_rounding(config, console)
    warn_about_warmup(config, console)
    # What -1 means is a number by now; of a small file it is a share.
    heldout = sum(len(source.problems) for source in prompts.heldout)
    settings = run_settings(
        config, config.data.heldout_source and config.data.heldout_count() or heldout
    )
    inputs, journal = gather_inputs(config, prompts), NoJournal()
    made_of = Record(0, settings, inputs)
    if config.checkpoint.keep_groups:
        identity = run_identity(settings, inputs | {"model": fingerprint(config.model.folder)})
        journal = RolloutJournal(folder, identity, storage, components.tokenizer.decode)
    resumed_step = checkpoints.latest_step()
    if resumed_step is None:
        with console.working(f"loading {config.model.folder}"):
            state, progress = first_state(components), RunProgress()
    else:
        record = checkpoints.record()
        check_record(config, made_of, record, storage.warn)
        with console.working(f"loading the checkpoint of step {resumed_step}"):
            state, progress = restore(components, checkpoints, record)
        console.say(f"resuming {escape(str(folder))} after step {resumed_step}")
    announce_policy(components, state)
    last_row = newest_row(state.step, progress)
    files = RunFiles(config, folder, storage, components.tokenizer, last_row, stack)
    files.sinks.append(StepLines(console, config.total_steps))
    if resumed_step is None:
        files.write_settings()
    trainer = components.trainer(journal=journal, interrupted=signals, show=console.collecting)
    disk = checkpoints, storage, journal
    return Run(components, trainer, state, progress, files, *disk, made_of, signals, on_step)


def newest_row(step: int, progress: RunProgress) -> int:
    """Step of the newest row that stays; that of the checkpoint's own step may be still to come."""
    to_come = progress.heldout_before is None if step == 0 else progress.unwritten is not None
    return step - 1 if to_come else step


def due(step: int, every: int) -> bool:
    """True if an event of every `every` steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def train(
    config: Config, on_step: OnStep | None = None, signals: Signals | None = None
) -> dict[str, Any] | None:
    """Runs `config` to its last step, from its newest checkpoint where there is one.

    Args:
        on_step: is given every finished step and its metrics; True ends the run, as a signal does.
        signals: not entered yet; says afterwards what ended the run. None: one is made.

    Returns the summary, or None where a signal ended the run early; it has then been saved.

    Raises:
        ConfigError: settings, model folder and run folder don't fit together.
        Starved: no signal was left and the config says to stop then; the run has been saved.
        NotSaved: the run has ended, and its last checkpoint could not be written.
        NotFinite: a checkpoint is not, or no update was; nothing more has been saved.
        KeyboardInterrupt: Ctrl-C, after the save, unless this is a command.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(signals or Signals(config.checkpoint.leave_seconds))
        check_processes(config)
        if (summary := finished(config)) is not None:
            return summary
        run = open_run(config, signals, stack, on_step)
        try:
            run.begin()
            if run.progress.unwritten is not None:
                run.complete_row(run.progress.unwritten)
            while run.state.step < config.total_steps:
                run.step()
            signals.at_safe_place()
            return run.finish()
        except Interrupted:
            signals.at_safe_place()
            run.keep()
            run.components.progress.say(
                f"stopped by {signals.received} after step {run.state.step}; saved in "
                f"{escape(config.run_dir)}. The same command goes on from there"
            )
            return None
        except (Starved, ConfigError):  # or a hook of the user's that failed
            signals.at_safe_place()
            run.keep()
            raise
