"""One run: resuming, evaluating, showing, saving, and leaving when asked to."""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from rich.markup import escape

from dapo_jax.config.experiment import Config
from dapo_jax.learner.skipped_batches import write_skipped
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.reporting.alerts import Alerts
from dapo_jax.reporting.metrics import Clock
from dapo_jax.reporting.notices import (
    announce_data,
    warn_about_answers,
    warn_about_rounding,
)
from dapo_jax.reporting.page.curves import plot_run
from dapo_jax.reporting.page.page import write_own_page
from dapo_jax.reporting.scores import Response
from dapo_jax.reporting.wandb_tracker import Tracker
from dapo_jax.reporting.writers import MetricWriter, describe_gaps, write_rollouts
from dapo_jax.rollout.dynamic_sampling import Interrupted, Starved
from dapo_jax.rollout.sampling import SamplingRule
from dapo_jax.run.checkpointing.checkpoints import Checkpoints
from dapo_jax.run.checkpointing.compatibility import (
    INPUTS,
    SUMMARY,
    check_record,
    finished,
    gather_inputs,
)
from dapo_jax.run.checkpointing.integrity import find_steps
from dapo_jax.run.checkpointing.rollout_journal import RolloutJournal
from dapo_jax.run.checkpointing.same_run import run_identity, run_settings
from dapo_jax.run.checkpointing.saver import CheckpointSaver
from dapo_jax.run.components import build, check_data, check_processes
from dapo_jax.run.evaluation.heldout import (
    heldout_metrics,
    report_on,
    sample_heldout,
    sample_responses,
    stamp,
)
from dapo_jax.run.evaluation.response_file import write_responses
from dapo_jax.run.state import (
    announce_policy,
    first_state,
    resident_megabytes,
    save_state,
    saved_state,
)
from dapo_jax.runtime import processes
from dapo_jax.runtime.nonfinite import PREFIXES, check_skipped, count_skipped
from dapo_jax.runtime.settings import ConfigError
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import claim
from dapo_jax.runtime.storage.ownership import RUN
from dapo_jax.runtime.storage.retries import Storage, overlooked, write_text
from dapo_jax.structs import Group
from dapo_jax.train import RunState, train_step

CHECKED_PROMPTS, CHECKED_SAMPLES = 8, 4  # at the start, where no held-out problems serve
SHOWN_BROKEN_GROUPS = 3


class Run:
    """One run folder: its state, its files, and what is said about it."""

    def __init__(
        self,
        config: Config,
        signals: Signals,
        stack: contextlib.ExitStack,
        on_step: Callable[[int, dict[str, float]], Any] | None = None,
    ):
        self.config, self.signals, self._on_step = config, signals, on_step
        self.folder = stack.enter_context(claim("run_dir", config.run_dir, RUN))
        self.parts = build(config)
        self.parts.judge.given_up = signals.here
        stack.enter_context(self.parts.progress.compilation())
        stack.callback(self.parts.close)
        self.storage = Storage(lambda text: self.parts.progress.warn(escape(text)))
        self.checkpoints = stack.enter_context(
            Checkpoints(self.folder, config.checkpoint, self.storage.warn)
        )
        self.keeper = CheckpointSaver(self.checkpoints, self.storage)
        prompts = self.parts.prompts
        check_data([*prompts.sources, *prompts.heldout])
        announce_data(config, prompts, self.parts.progress)
        self.heldout = prompts.heldout_prompts()
        warn_about_rounding(config, self.parts.progress)
        # What -1 means is a number by now; of a small file it is a share.
        taken = sum(len(source.problems) for source in prompts.heldout)
        self._settings = run_settings(
            config, config.data.heldout_source and config.data.heldout_count() or taken
        )
        self._inputs = gather_inputs(config, prompts)
        identity = ""
        if config.checkpoint.keep_groups:
            read = self._inputs | {"model": fingerprint(config.model.folder)}
            identity, decode = run_identity(self._settings, read), self.parts.tokenizer.decode
            self.parts.finished = RolloutJournal(self.folder, identity, self.storage, decode)
        resumed_step = self.checkpoints.latest_step()
        self.state = self._begin() if resumed_step is None else self._resume(resumed_step)
        announce_policy(self.parts, self.state)
        self.writer = None  # the first process writes for all
        if processes.is_first():
            tracker = (
                stack.enter_context(Tracker(self.folder, config)) if config.log.wandb else None
            )
            self.writer = MetricWriter(
                self.folder, self._last_row(), config.log.tensorboard, tracker, self.storage
            )
            for text in describe_gaps(self.folder, self._last_row(), config.log.rollouts):
                self.storage.warn(text)
        self.alerts = Alerts(config, self.writer.read() if self.writer else ())
        self._started = time.perf_counter() - self.state.seconds

    def _begin(self) -> RunState:
        with self.parts.progress.working(f"loading {self.config.model.folder}"):
            state = first_state(self.parts)
        if processes.is_first():
            settings = json.dumps(dataclasses.asdict(self.config), indent=2)
            path = self.folder / "config.json"
            self.storage.attempt("config.json", lambda: write_text(path, settings))
        return state

    def _resume(self, step: int) -> RunState:
        record = self.checkpoints.record()
        record = check_record(self.config, self._settings, self._inputs, record, self.storage.warn)
        with self.parts.progress.working(f"loading the checkpoint of step {step}"):
            state = saved_state(self.parts, self.checkpoints, record)
        self.parts.progress.say(f"resuming {escape(str(self.folder))} after step {step}")
        return state

    def _last_row(self) -> int:
        """The newest row that stays; that of the checkpoint's own step may be still to come."""
        state = self.state
        to_come = state.heldout_before is None if state.step == 0 else state.unwritten is not None
        return state.step - 1 if to_come else state.step

    def evaluate(self) -> tuple[dict[str, float], list[Response]]:
        """Held-out metrics of the policy as it is, and the responses; none without problems."""
        if not self.heldout:
            return {}, []
        clock, config, state, parts = Clock(), self.config, self.state, self.parts
        with parts.progress.working(f"evaluating {len(self.heldout)} held-out problems"):
            responses = sample_heldout(
                config, state.train.params, self.heldout, parts.sampler, parts.judge, self.signals
            )
        if config.log.rollouts and self.writer:
            path = self.folder / "evaluations" / f"step_{state.step:06d}.jsonl"
            lines = stamp(config, f"step {state.step}")
            self.storage.attempt("evaluations/", lambda: write_responses(path, responses, lines))
        # Whether two answers are equal is asked of a worker.
        values = processes.from_first(
            lambda: heldout_metrics(report_on(responses, config)), "held-out metrics"
        )
        return values | {"seconds_evaluation": clock.total()}, responses

    def begin(self) -> None:
        """Before the first step: the first row, and whether template and verifier agree."""
        state, say = self.state, self.parts.progress.say
        if state.step > 0 or state.heldout_before is not None:
            return
        values, responses = self.evaluate()
        if values:
            state.heldout_before = values["heldout_accuracy"]
            self._write(0, values)
            say(f"held-out accuracy before training: {state.heldout_before:.3f}")
        warn_about_answers(responses or self._first_responses(), self.config, self.parts.progress)

    def _first_responses(self) -> list[Response]:
        """A few responses to the first training prompts."""
        parts, sampler = self.parts, self.config.sampler
        parts.prompts.position = self.state.position
        numbers = range(min(CHECKED_SAMPLES, self.config.rollout.samples_per_prompt))
        count = min(CHECKED_PROMPTS, self.config.rollout.prompts_per_step)
        wanted = [(prompt, numbers) for prompt in itertools.islice(parts.prompts, count)]
        rule = SamplingRule(sampler.temperature, sampler.top_p, sampler.top_k)
        params = self.state.train.params
        return list(
            sample_responses(params, wanted, parts.sampler, parts.judge, rule, self.signals)
        )

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self.writer:
            self.writer.write(step, values)

    def step(self) -> None:
        """One rollout step, with its rollouts file and, now and then, a group to look at."""
        with self.parts.progress.working(f"step {self.state.step + 1}: updating", stays=False):
            self.state, values, collected = train_step(self.parts, self.state, self.signals)
        self.state.unwritten = values
        self.state.skipped = count_skipped(self.state.skipped, values)
        step, log = self.state.step, self.config.log
        if log.rollouts and self.writer:
            told = collected, log.token_groups, self.parts.tokenizer
            self.storage.attempt("rollouts/", lambda: write_rollouts(self.folder, step, *told))
        for group in collected.broken[:SHOWN_BROKEN_GROUPS]:
            self.parts.progress.warn(
                f"step {step}: a group was dropped: {escape(str(group.broken))}"
            )
        if due(step - 1, log.show_group_every_steps) and collected.groups:
            self.parts.progress.group(collected.groups[0])
        for text in self.alerts.of_step(values):
            self.parts.progress.warn(escape(f"step {step}: {text}"))
        self._keep_skipped(collected.groups)
        self.complete_row()

    def _keep_skipped(self, groups: list[Group]) -> None:
        """Writes the first batch of the step that was skipped, for `dapo-jax replay`."""
        found, step = self.parts.skipped.first(), self.state.step
        if found is None or not self.writer:
            return

        def write() -> None:
            if folder := write_skipped(self.folder, step, *found, groups):
                self.parts.progress.say(escape(f"dapo-jax replay {folder} says more"))

        self.storage.attempt("skipped/", write)

    def complete_row(self) -> None:
        """The evaluation that is due, the step's lines, and its checkpoint.

        Until then the metrics travel in the checkpoint, so that an evaluation that a signal cut
        short is made up for when the run goes on.
        """
        config, step, values = self.config, self.state.step, self.state.unwritten
        assert values is not None  # a step has left them
        last = step == config.total_steps
        if last or due(step, config.evaluation.every_steps):
            values = values | self.evaluate()[0]
        self._write(step, values)
        self.state.unwritten = None
        self.parts.progress.step(step, config.total_steps, values)
        self._check_learning(values)
        learns = not any(self.state.skipped.values())  # else older checkpoints are worth more
        wanted = last or learns and due(step, config.checkpoint.every_steps)
        self.keeper.step(wanted, self.save)
        if config.checkpoint.keep_groups and processes.is_first():
            with overlooked():  # else after the next step
                self.parts.finished.forget(max(find_steps(config.run_dir), default=0))
        if self._on_step and self._on_step(step, values) is True:
            self.signals.received = self.signals.received or "on_step"

    def _check_learning(self, values: dict[str, float]) -> None:
        policy, critic = self.config.optimizer, self.config.critic.optimizer
        for prefix, settings in zip(PREFIXES, (policy, critic), strict=True):
            count = self.state.skipped.get(prefix, 0)
            check_skipped(count, settings.max_skipped_steps, values, prefix)

    def save(self) -> None:
        """A checkpoint of the state as it is. Raises `NotSaved`, `NotFinite`."""
        self.state.seconds = time.perf_counter() - self._started
        marks = {"settings": self._settings, INPUTS: self._inputs}
        save_state(self.checkpoints, self.state, marks)

    def keep(self) -> None:
        """Returns when the state as it is is on disk. Raises `NotSaved`."""
        with self.parts.progress.working("saving"):
            self.keeper.last(self.save)
        self.storage.rested()  # what comes now has no later
        self.parts.finished.forget(self.state.step)

    def finish(self) -> dict[str, Any]:
        """summary.json, the picture, and the last words."""
        self.keep()
        return processes.from_first(self._finish, "summary")

    def _finish(self) -> dict[str, Any]:
        assert self.writer is not None  # in the first process, which alone is here
        rows, state, say = self.writer.read(), self.state, self.parts.progress.say
        summary = {
            "steps": state.step,
            "heldout_accuracy_before": state.heldout_before,
            "heldout_accuracy_after": rows[-1].get("heldout_accuracy") if rows else None,
            "seconds": round(state.seconds, 1),
            "seed": self.config.seed,
            "megabytes_per_device": resident_megabytes(self.parts, self.state),
        }
        text, picture = json.dumps(summary, indent=2), self.folder / "curves.png"
        self.storage.attempt(SUMMARY, lambda: write_text(self.folder / SUMMARY, text))
        self.storage.attempt(picture.name, lambda: plot_run(rows, picture, str(self.folder)))
        before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
        if before is not None and after is not None:
            say(
                f"[bold]held-out accuracy {before:.3f} -> {after:.3f}[/] after {state.step} steps "
                f"in {state.seconds:.0f} s"
            )
        if self.config.log.report:
            write_own_page(self.folder, self.parts.progress)
        say(f"metrics, rollouts and pictures are in {escape(str(self.folder))}")
        return summary


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def train(
    config: Config, on_step: Callable[[int, dict[str, float]], Any] | None = None
) -> dict[str, Any] | None:
    """Runs `config` to its last step, from its newest checkpoint where there is one.

    Args:
        on_step: is told every finished step and its metrics; True ends the run, as a signal does.

    Returns the summary, or None where a signal ended the run early; it has then been saved.

    Raises:
        ConfigError: settings, model folder and run folder don't fit together.
        Starved: no signal was left and the config says to stop then; the run has been saved.
        NotSaved: the run has ended, and its last checkpoint could not be written.
        NotFinite: a checkpoint is not, or no update was; nothing more has been saved.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals(config.checkpoint.leave_seconds))
        check_processes(config)
        if (summary := finished(config)) is not None:
            return summary
        run = Run(config, signals, stack, on_step)
        try:
            run.begin()
            if run.state.unwritten is not None:
                run.complete_row()
            while run.state.step < config.total_steps:
                run.step()
            signals.at_safe_place()
            return run.finish()
        except Interrupted:
            signals.at_safe_place()
            run.keep()
            run.parts.progress.say(
                f"stopped by {signals.received} after step {run.state.step}; saved in "
                f"{escape(config.run_dir)}. The same command goes on from there"
            )
            return None
        except (Starved, ConfigError):  # or a hook of the user's that failed
            signals.at_safe_place()
            run.keep()
            raise
