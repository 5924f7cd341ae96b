"""The loop of a run: steps, evaluations, console lines, checkpoints, and stopping on a signal."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.markup import escape

from dapo_jax.config.experiment import Config, Packing
from dapo_jax.config.rates import choose_rates
from dapo_jax.learner.packing import RowShape
from dapo_jax.learner.update import POLICY, LearnerStates, optimizers
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.model.trainable import parameter_count
from dapo_jax.rollout.dynamic_sampling import Starved
from dapo_jax.rollout.group_format import (
    pack_partial,
    pack_rollouts,
    unpack_partial,
    unpack_rollouts,
)
from dapo_jax.rollout.source import Journal, SourceState
from dapo_jax.run import heldout, identity, notices
from dapo_jax.run.build import Components, attention_notice, build, open_console
from dapo_jax.run.identity import Record, RunProgress, check_data, check_processes
from dapo_jax.run.metrics import measure, trace
from dapo_jax.run.scores import HELDOUT, Response
from dapo_jax.run.sinks import Callbacks, RunFiles, read_summary
from dapo_jax.run.store import Checkpoints, RolloutJournal, find_steps
from dapo_jax.runtime import processes
from dapo_jax.runtime.clock import Clock
from dapo_jax.runtime.nonfinite import PREFIXES, check_skipped, count_skipped
from dapo_jax.runtime.registry import feature
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.files import Storage, folder_at, suppress_storage_errors
from dapo_jax.runtime.storage.output_folder import RUN, check_free, claim
from dapo_jax.step import Trainer, TrainerState, train_step
from dapo_jax.types.errors import ConfigError
from dapo_jax.types.structs import Interrupted, Prompt, SamplingRule

CHECKED_PROMPTS, CHECKED_SAMPLES = 8, 4  # before the first step, without held-out problems
SHOWN_FAILED_GROUPS = 3
SHOWN_EVERY_SECONDS = 30.0  # between lines of an evaluation


@dataclasses.dataclass
class Run:
    """The loop of a run from its first step to its last."""

    components: Components
    trainer: Trainer
    state: TrainerState  # after the newest step
    progress: RunProgress  # of the run, beside the state
    checkpoints: Checkpoints
    storage: Storage
    record: Record  # settings and inputs of the run
    journal: Journal
    files: RunFiles
    signals: Signals

    def __post_init__(self):
        self._alerts = feature("alerts").Alerts(self.components.config, self.files.rows())
        self._heldout = self.components.prompts.heldout_prompts()
        self._started = time.perf_counter() - self.progress.seconds

    def begin(self) -> None:
        """Measure before the first step, and check that template and verifier agree."""
        progress, console = self.progress, self.components.progress
        if self.state.step > 0 or progress.heldout_before is not None:
            return
        values, responses = self.evaluate()
        if values:
            progress.heldout_before = next(iter(values.values()))
            self.files.send("on_row", 0, values)
            scores = notices.describe_scores(values, console.reward_leads)
            console.say(f"before training: {scores}")
        if self.components.measure is None:
            responses = responses or self._first_responses()
            notices.warn_about_answers(responses, self.components.config, console)

    def evaluate(self) -> tuple[dict[str, float], list[Response]]:
        """Return held-out metrics of the current policy, and the responses; empty without any."""
        if not self._heldout:
            return {}, []
        clock, components, responses = Clock(), self.components, []
        params = self.state.learners.policy.params
        if components.measure:
            values = components.measure(self._heldout, params)
        else:
            with components.progress.working(f"evaluating {len(self._heldout)} held-out problems"):
                work = components, params, self._heldout, self.signals, {}
                responses = heldout.sample_missing(*work, every_seconds=SHOWN_EVERY_SECONDS)
            self.files.send("on_evaluation", self.state.step, responses)
            values = heldout.score_responses(responses, components.config)
        return values | {"seconds_evaluation": clock.total()}, responses

    def _first_responses(self) -> list[Response]:
        """Return a few responses to the first training prompts."""
        config = self.components.config
        prompts = self.components.prompts
        prompts.position = self.state.source.position
        samples = range(min(CHECKED_SAMPLES, config.rollout.samples_per_prompt))
        count = min(CHECKED_PROMPTS, config.rollout.prompts_per_step)
        sampler, params = config.sampler, self.state.learners.policy.params
        rule = SamplingRule(sampler.temperature, sampler.top_p, sampler.top_k)
        wanted = [(prompt, samples) for prompt in itertools.islice(prompts, count)]
        args = self.components, params, wanted, rule, self.signals
        return list(heldout.sample_responses(*args))

    def step(self) -> None:
        """Run a rollout step, and report it."""
        config, console, clock = self.components.config, self.components.progress, Clock()
        with console.working(f"step {self.state.step + 1}: updating", stays=False):
            with clock.running():
                self.state, record = train_step(self.trainer, self.state)
            traces = trace(config, record)
            values = measure(config, record, clock)
        self.progress.unwritten = values
        self.progress.skipped = count_skipped(self.progress.skipped, values)
        step, batch = self.state.step, record.rollouts.batch
        self.files.send("on_rollouts", step, dataclasses.replace(batch, traces=traces))
        failures = [("a group was dropped", group) for group in batch.broken]
        failures += [("a group was sampled again", group) for group in batch.resampled]
        failures += [("a reward failed", g) for g in batch.judged + batch.surplus if g.failed]
        for event, group in failures[:SHOWN_FAILED_GROUPS]:
            console.warn(escape(f"step {step}: {event}: {group.first_failure}"))
        if due(step - 1, config.log.show_group_every_steps) and batch.groups:
            console.group(batch.groups[0])
        for text in self._alerts.check_step(values):
            console.warn(escape(f"step {step}: {text}"))
        self.complete_row(values)

    def complete_row(self, values: dict[str, float]) -> None:
        """Evaluate if that is due, write the step's row, and save if that is due.

        The checkpoint holds the metrics until then, so that a run that a signal stopped in its
        evaluation repeats the evaluation when it resumes.
        """
        config, step = self.components.config, self.state.step
        is_last = step == config.total_steps
        if is_last or due(step, config.evaluation.every_steps):
            values = values | self.evaluate()[0]
        self.files.send("on_row", step, values)
        self.progress.unwritten = None
        for prefix, optimizer in zip(PREFIXES, optimizers(config).values(), strict=False):
            count = self.progress.skipped.get(prefix, 0)
            check_skipped(count, optimizer.max_skipped_steps, values, prefix)
        learns = not any(self.progress.skipped.values())  # else older checkpoints are worth more
        is_due = is_last or learns and due(step, config.checkpoint.every_steps)
        self.checkpoints.after_step(is_due, self.save)
        if isinstance(self.journal, RolloutJournal) and processes.is_first():
            with suppress_storage_errors():  # else after the next step
                self.journal.forget(max(find_steps(config.run_dir), default=0))

    def save(self) -> None:
        """Start writing a checkpoint. Raises `NotSaved`, `NotFinite`."""
        self.progress.seconds = time.perf_counter() - self._started
        self.storage.drain()  # the files of a step come before its checkpoint
        source, learners = self.state.source, self.state.learners
        carried = {"groups": pack_partial(source.partial)} if source.partial else {}
        ahead = {"rollouts": pack_rollouts(source.ahead)} if source.ahead else {}
        progress = dataclasses.replace(
            self.progress,
            position=source.position,
            kept_fraction=source.kept_fraction,
            pools=dict(source.pools),
            carried_bytes=sum(map(len, carried.values())),
            ahead_bytes=sum(map(len, ahead.values())),
            has_behaviour=source.behaviour is not None,
            entropy_weight=self.state.entropy_weight,
            shapes=[[*dataclasses.astuple(s.packing), s.microbatches] for s in self.state.shapes],
        )
        record = dataclasses.replace(self.record, step=self.state.step, progress=progress)
        states = {"state": learners.policy, **learners.others}
        states |= {"behaviour": source.behaviour, "carried": carried, "ahead": ahead}
        self.checkpoints.save(record, states)

    def keep(self) -> None:
        """Save, and wait until the state is on disk. Raises `NotSaved`, `NotFinite`."""
        with self.components.progress.working("saving"):
            self.checkpoints.save_last(self.save)
            self.storage.clear_backoff()  # last chance to write: do not back off
            self.journal.forget(self.state.step)
            self.storage.drain()

    def finish(self) -> dict[str, Any]:
        """Save, write the summary with its picture and page, and return it."""
        self.keep()
        return processes.broadcast_from_host0(self._finish, "summary")

    def _finish(self) -> dict[str, Any]:
        rows, progress, console = self.files.rows(), self.progress, self.components.progress
        config = self.components.config
        first = rows[0] if rows and rows[0].get("step") == 0 else {}
        last = rows[-1] if rows else {}
        scores = {}
        given = [name for name in HELDOUT[2:] if f"heldout_{name}" in last]
        for name in given or sorted(HELDOUT[:2], reverse=console.reward_leads):
            scores[f"heldout_{name}_before"] = first.get(f"heldout_{name}")
            scores[f"heldout_{name}_after"] = last.get(f"heldout_{name}")
        summary = {
            "steps": self.state.step,
            **scores,
            "seconds": round(progress.seconds, 1),
            "seed": config.seed,
        }
        self.files.write_summary(summary)
        if change := notices.describe_scores(summary, console.reward_leads):
            seconds = f"{progress.seconds:.0f} s"
            console.say(f"[bold]{change}[/] after {self.state.step} steps in {seconds}")
        if config.log.report:
            feature("report").write_own_page(self.files.folder, console)
        if config.log.rollouts:
            console.say(f"metrics and rollouts are in {escape(str(self.files.folder))}")
        return summary

    def complete(self) -> dict[str, Any] | None:
        """Run the steps that are left; return the summary, or None if a signal ended the run.

        The state is saved in any case. Raises as `train` does.
        """
        config, signals = self.components.config, self.signals
        try:
            self.begin()
            if self.progress.unwritten is not None:
                self.complete_row(self.progress.unwritten)
            while self.state.step < config.total_steps:
                self.step()
            signals.cancel_forced_exit()
            return self.finish()
        except Interrupted:
            signals()  # each process learns which signal another one received
            signals.cancel_forced_exit()
            self.keep()
            self.components.progress.say(
                f"stopped by {signals.received} after step {self.state.step}; saved in "
                f"{escape(config.run_dir)}. The same command resumes from there"
            )
            return None
        except (Starved, ConfigError):  # or a user function that failed
            signals.cancel_forced_exit()
            self.keep()
            raise


def due(step: int, every: int) -> bool:
    """Return True if an event of every `every` steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def first_state(components: Components) -> TrainerState:
    """Return the state before the first step."""
    states = {
        name: learner.start(components.first_params(name))
        for name, learner in components.learners.trained().items()
    }
    return TrainerState(0, LearnerStates.of(states), SourceState())


def restore(components: Components, checkpoints: Checkpoints, record: Record) -> TrainerState:
    """Return the state of the newest checkpoint; `record` belongs to it."""
    learners, behaviour = components.learners, None
    states = {
        name: checkpoints.state(learner.abstract_state, "state" if name == POLICY else name)
        for name, learner in learners.trained().items()
    }
    progress = record.progress
    if progress.has_behaviour:
        behaviour = checkpoints.state(learners.policy.abstract_state.params, "behaviour")

    def read(entry: str, name: str, size: int) -> np.ndarray:
        shape: Any = {name: np.zeros(size, np.uint8)}
        restored: Any = checkpoints.state(shape, entry)
        return np.asarray(restored[name])

    def read_prompt(index: int) -> Prompt:
        components.prompts.position = index
        return next(components.prompts)

    partial, ahead = (), ()
    if size := progress.carried_bytes:
        partial = unpack_partial(read("carried", "groups", size), read_prompt)
    if size := progress.ahead_bytes:
        ahead = unpack_rollouts(read("ahead", "rollouts", size), read_prompt)
    source = SourceState(
        progress.position, progress.kept_fraction, partial, progress.pools, ahead, behaviour
    )
    shapes = tuple(RowShape(Packing(*shape), count) for *shape, count in progress.shapes)
    learners = LearnerStates.of(states)
    return TrainerState(record.step, learners, source, shapes, progress.entropy_weight)


def announce_policy(components: Components, state: TrainerState) -> None:
    """Print the number of parameters, and on GPUs the attention."""
    trees = state.learners.policy.params, components.frozen
    trained, frozen = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in trees)
    components.progress.say(f"policy: {trained:,} parameters to train, {frozen:,} frozen")
    config, mesh = components.config, components.learners.policy.mesh
    rows = config.rows().row_tokens
    if notice := attention_notice(config.compute, rows, components.decoder, mesh):
        components.progress.say(notice)


def with_rates(components: Components, saved: Record | None) -> Components:
    """Replace 'auto' rates of the config, print them, and warnings about settings."""
    config, console = components.config, components.progress
    size = parameter_count(components.decoder)
    settings = saved and saved.settings
    config, lines, warnings = choose_rates(config, size, config.total_steps, settings)
    for text in lines:
        console.say(escape(text))
    for text in [*warnings, *notices.setting_warnings(config, components.prompts.sources)]:
        console.warn(escape(text))
    return dataclasses.replace(components, config=config)


def open_run(
    config: Config,
    callbacks: Callbacks,
    stack: contextlib.ExitStack,
    build: Callable[..., Components] = build,
) -> Run:
    """Open the run of a folder, from its newest checkpoint or from the beginning.

    `stack` closes workers, sinks and the folder; `build` makes the components.

    Raises:
        OtherRun: the folder holds another run.
        ConfigError: the folder must not be written, none of its checkpoints can be read, or
            settings and model don't fit together.
    """
    signals, console = callbacks.signals, open_console(config)
    storage = Storage(lambda text: console.warn(escape(text)))
    folder = stack.enter_context(claim("run_dir", config.run_dir, RUN))
    checkpoints = Checkpoints(folder, config.checkpoint, storage, callbacks.on_checkpoint)
    stack.enter_context(checkpoints)
    components = build(config, console, should_abort=signals.received_locally)
    stack.enter_context(console.compilation())
    stack.callback(components.close)
    check_data([*components.prompts.sources, *components.prompts.heldout])
    notices.announce_data(config, components.prompts, console)
    record = None if checkpoints.latest_step() is None else checkpoints.record()
    components = with_rates(components, record)
    config = components.config
    now = describe_run(components)
    if record is None:
        progress = RunProgress()
        with console.working(f"loading {config.model.folder}"):
            state = first_state(components)
    else:
        identity.check_record(config, now, record, storage.warn)
        with console.working("loading the newest checkpoint"):
            state, progress = checkpoints.newest(
                lambda record: (restore(components, checkpoints, record), record.progress)
            )
        console.say(f"resuming {escape(str(folder))} after step {state.step}")
    announce_policy(components, state)
    # The row of the newest step may not be written yet.
    is_missing = progress.unwritten is not None if state.step else progress.heldout_before is None
    last_row = state.step - is_missing
    split = components.tokenizer.split
    files = RunFiles(config, folder, storage, split, last_row, console)
    stack.enter_context(files)
    files.sinks.append(callbacks)
    if record is None:
        files.write_settings()
    journal = Journal()
    if config.checkpoint.keep_groups:
        inputs = now.inputs | {"model": fingerprint(config.model.folder)}
        digest = identity.run_identity(now.settings, inputs)
        journal = RolloutJournal(folder, digest, storage)
    trainer = components.trainer(journal=journal, interrupted=signals, show=console.collecting)
    parts = components, trainer, state, progress, checkpoints, storage
    return Run(*parts, now, journal, files, signals)


def describe_run(components: Components) -> Record:
    """Return the settings and inputs that decide the results of a run."""
    config, prompts = components.config, components.prompts
    # The setting may be -1; of a small file its number is a fraction.
    heldout = sum(len(source.problems) for source in prompts.heldout)
    heldout = config.data.heldout_source and config.data.heldout_count() or heldout
    return Record(
        0, identity.run_settings(config, heldout), identity.gather_inputs(config, prompts)
    )


def finished(config: Config) -> dict[str, Any] | None:
    """Return the summary of a run with nothing left to do, after a console line; else None.

    Its folder is only read, and no model is loaded. Raises `ConfigError` if the run had other
    settings.
    """
    if processes.is_first():
        check_free("run_dir", config.run_dir, RUN)
    folder = folder_at(config.run_dir)
    summary = processes.broadcast_from_host0(lambda: read_summary(folder), "summary")
    if "steps" not in summary:
        return None
    silent = Storage(lambda text: None)  # of a run that goes on, the store warns
    with Checkpoints(config.run_dir, storage=silent) as checkpoints:
        step = checkpoints.latest_step()
        # A checkpoint made before the last evaluation lacks it; the summary is written after that.
        if step is None or step < config.total_steps or step != summary["steps"]:
            return None
        record = checkpoints.record()
    config, _, _ = choose_rates(config, 1, step, record.settings)
    saved = record.settings["data.heldout_problems"]
    settings = identity.run_settings(config, saved if config.data.heldout_problems < 0 else None)
    identity.check_same_run(settings, record.settings)
    is_open_ended = identity.may_change("total_steps", settings)
    notices.announce_end(config, summary, is_open_ended, open_console(config))
    return summary


def train(
    config: Config,
    signals: Signals | None = None,
    callbacks: Sequence[Any] = (),
    on_step: Callable[[int, dict[str, float]], Any] | None = None,
) -> dict[str, Any] | None:
    """Train to the last step, from the newest checkpoint if there is one.

    Args:
        signals: not entered yet; holds afterwards what ended the run.
        callbacks, on_step: receive what the run reports; they may end it, as a signal does.

    Returns the summary, or None if a signal ended the run early; it has then been saved.

    Raises:
        ConfigError: settings, model folder and run folder don't fit together.
        Starved: no signal was left and the config says to stop then; the run has been saved.
        NotSaved: the run has ended, and its last checkpoint could not be written.
        NotFinite: a checkpoint or every update is not finite; nothing more has been saved.
        KeyboardInterrupt: Ctrl-C, after the save, unless this is a command.
        Exception: the first one of a callback, after the save.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(signals or Signals(config.checkpoint.leave_seconds))
        check_processes(config)
        user = Callbacks(signals, callbacks, on_step)
        if (summary := finished(config)) is not None:
            return summary
        summary = open_run(config, user, stack).complete()
        user.raise_error()
        return summary
