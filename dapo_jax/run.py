"""One run: resuming, evaluating, showing, saving, and leaving when asked to."""

import contextlib
import dataclasses
import json
import pathlib
import signal
import time
from typing import Any

import jax
from rich.markup import escape

from dapo_jax.checkpoints import Checkpoints, check_same_run
from dapo_jax.config import Config
from dapo_jax.data.pipeline import heldout_prompts
from dapo_jax.evaluation import heldout_metrics, sample_groups
from dapo_jax.filtering import Interrupted, Starved
from dapo_jax.metrics import Clock, MetricWriter, write_rollouts
from dapo_jax.parts import Parts, build
from dapo_jax.plots import plot_run
from dapo_jax.progress import Progress
from dapo_jax.settings import leaves
from dapo_jax.structs import Prompt
from dapo_jax.train import RunState, train_step

FIRST_KEPT_FRACTION = 0.5  # before anything was seen
MANY_WITHOUT_ANSWER = 0.5
SHOWN_BROKEN_GROUPS = 3


class Signals:
    """Remembers the first SIGTERM or Ctrl-C, so that the run saves and leaves at a safe place.

    A second one acts as it always does. Call it to ask; use it as a context manager.
    """

    def __init__(self):
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: Any) -> None:
        self.received = signal.Signals(number).name
        self.__exit__()

    def __call__(self) -> bool:
        return bool(self.received)


class Run:
    """One run folder: its state, its files, and what is said about it."""

    def __init__(self, config: Config, signals: Signals, stack: contextlib.ExitStack):
        self.config, self.signals = config, signals
        self.parts = build(config)
        stack.callback(self.parts.close)
        self.folder = pathlib.Path(config.run_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.folder, config.checkpoint)
        stack.callback(self.checkpoints.close)
        self.heldout = heldout_prompts(config.data, config.seed, self.parts.tokenizer)
        announce_data(self.parts, self.heldout)
        resumed_step = self.checkpoints.latest_step()
        self.state = self._begin() if resumed_step is None else self._resume(resumed_step)
        self.writer = MetricWriter(self.folder, self._last_row(), config.log.tensorboard)
        stack.callback(self.writer.close)
        self._started = time.perf_counter() - self.state.seconds

    def _begin(self) -> RunState:
        parts = self.parts
        train = parts.learner.start(parts.folder_params())
        critic = parts.critic.start(parts.critic_params()) if parts.critic else None
        settings = json.dumps(dataclasses.asdict(self.config), indent=2)
        (self.folder / "config.json").write_text(settings)
        return RunState(0, train, 0, FIRST_KEPT_FRACTION, critic)

    def _resume(self, step: int) -> RunState:
        record = self.checkpoints.record()
        check_same_run(self._settings(), record.pop("settings"))
        parts, critic = self.parts, None
        train = self.checkpoints.state(parts.learner.abstract_state)
        if parts.critic:
            critic = self.checkpoints.state(parts.critic.abstract_state, "critic")
        self.parts.progress.say(f"resuming {escape(str(self.folder))} after step {step}")
        return RunState(train=train, critic=critic, **record)

    def _last_row(self) -> int:
        """The newest row that stays; that of the checkpoint's own step may be still to come."""
        state = self.state
        to_come = state.heldout_before is None if state.step == 0 else state.unwritten is not None
        return state.step - 1 if to_come else state.step

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, _, value in leaves(self.config)}

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics of the policy as it is; empty without held-out problems."""
        if not self.heldout:
            return {}
        clock = Clock()
        params = self.state.train.params
        groups = sample_groups(params, self.heldout, self.parts, self.signals)
        return heldout_metrics(groups) | {"seconds_evaluation": clock.total()}

    def evaluate_before(self) -> None:
        """The first row: the policy that the run starts from."""
        if self.state.step == 0 and self.state.heldout_before is None and self.heldout:
            values = self.evaluate()
            self.state.heldout_before = values["heldout_accuracy"]
            self.writer.write(0, values)
            self.parts.progress.say(
                f"held-out accuracy before training: {self.state.heldout_before:.3f}"
            )

    def step(self) -> None:
        """One rollout step, with its rollouts file and, now and then, a group to look at."""
        self.state, values, collected = train_step(self.parts, self.state, self.signals)
        self.state.unwritten = values
        step, log = self.state.step, self.config.log
        if log.rollouts:
            write_rollouts(self.folder, step, collected.judged + collected.broken)
        for group in collected.broken[:SHOWN_BROKEN_GROUPS]:
            self.parts.progress.warn(f"step {step}: a group was dropped: {escape(group.broken)}")
        if due(step - 1, log.show_group_every_steps) and collected.groups:
            self.parts.progress.group(collected.groups[0])
        warn_about(step, values, self.parts.progress)
        self.complete_row()

    def complete_row(self) -> None:
        """The evaluation that is due, the step's lines, and its checkpoint.

        Until then the metrics travel in the checkpoint, so that an evaluation that a signal cut
        short is made up for when the run goes on.
        """
        config, step, values = self.config, self.state.step, self.state.unwritten
        last = step == config.total_steps
        if last or due(step, config.evaluation.every_steps):
            values = values | self.evaluate()
        self.writer.write(step, values)
        self.state.unwritten = None
        self.parts.progress.step(step, config.total_steps, values)
        if last or due(step, config.checkpoint.every_steps):
            self.save()

    def save(self) -> None:
        """A checkpoint of the state as it is."""
        self.state.seconds = time.perf_counter() - self._started
        record = self.state.record() | {"settings": self._settings()}
        states = {"state": self.state.train, "critic": self.state.critic}
        self.checkpoints.save(self.state.step, states, record)

    def megabytes_per_device(self) -> dict[str, float]:
        """What stays in memory between steps: parameters, moments and the reference."""
        held = {
            "policy": self.state.train,
            "critic": self.state.critic,
            "reference": self.parts.reference,
        }
        return {
            name: round(sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays) / 1e6, 2)
            for name, tree in held.items()
            if (arrays := jax.tree.leaves(tree))
        }

    def finish(self) -> dict[str, Any]:
        """summary.json, the picture, and the last words."""
        rows, state, say = self.writer.read(), self.state, self.parts.progress.say
        summary = {
            "steps": state.step,
            "heldout_accuracy_before": state.heldout_before,
            "heldout_accuracy_after": rows[-1].get("heldout_accuracy") if rows else None,
            "seconds": round(state.seconds, 1),
            "seed": self.config.seed,
            "megabytes_per_device": self.megabytes_per_device(),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2))
        plot_run(rows, self.folder / "curves.png", str(self.folder))
        before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
        if before is not None and after is not None:
            say(
                f"[bold]held-out accuracy {before:.3f} -> {after:.3f}[/] after {state.step} steps "
                f"in {state.seconds:.0f} s"
            )
        say(f"metrics, rollouts and curves.png are in {escape(str(self.folder))}")
        return summary


def announce_data(parts: Parts, heldout: list[Prompt]) -> None:
    """What there is to train on and to evaluate, and which rows of the files are bad."""
    cut, prompts = sum(prompt.truncated for prompt in heldout), parts.prompts
    dropped = sum(len(source.problems) for source in prompts.heldout) - len(heldout)
    fates = ((cut, "cut"), (dropped, "dropped"))
    overlong = "".join(f", {fate}: {count:,}" for count, fate in fates if count)
    parts.progress.say(escape(f"data: {prompts.describe()}{overlong}"))
    for source in [*prompts.sources, *prompts.heldout]:
        for complaint in source.complaints:
            parts.progress.warn(escape(complaint))


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens at `step`."""
    return every > 0 and step % every == 0


def warn_about(step: int, values: dict[str, float], progress: Progress) -> None:
    """Says what a person would want to know of a step that went badly."""
    if values["starved"]:
        progress.warn(f"step {step}: only {values['trained_groups']:.0f} groups carried signal")
    if values.get("empty_updates"):
        progress.warn(
            f"step {step}: {values['empty_updates']:.0f} updates had no trained token and were "
            "not taken (every response truncated and filtered?)"
        )
    if values.get("skipped_updates"):
        progress.warn(f"step {step}: an update was skipped: its gradient was not finite")
    if step == 1 and values["answer_not_found_rate"] > MANY_WITHOUT_ANSWER:
        progress.warn(
            f"no answer was found in {values['answer_not_found_rate']:.0%} of the responses: do "
            "config.data.template and config.reward.verifier agree?"
        )


def train(config: Config) -> dict[str, Any] | None:
    """Runs `config` to its last step, from its newest checkpoint where there is one.

    Returns the summary, or None where a signal ended the run early; it has then been saved.

    Raises:
        ConfigError: settings, model folder and run folder don't fit together.
        Starved: no signal was left and the config says to stop then; the run has been saved.
    """
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        run = Run(config, signals, stack)
        try:
            run.evaluate_before()
            if run.state.unwritten is not None:
                run.complete_row()
            while run.state.step < config.total_steps:
                run.step()
            return run.finish()
        except Interrupted:
            run.save()
            run.parts.progress.say(
                f"stopped by {signals.received} after step {run.state.step}; saved in "
                f"{escape(config.run_dir)}. The same command goes on from there"
            )
            return None
        except Starved:
            run.save()
            raise
