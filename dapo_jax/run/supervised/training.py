"""Supervised training: initial policy, examples, the loop of steps, and the model folder."""

import dataclasses
import json
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.markup import escape

from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import DpoConfig, Packing, SftConfig
from dapo_jax.data.policies import model_path
from dapo_jax.data.prompts.tokenizer import END, PAD, Tokenizer, arithmetic_tokenizer
from dapo_jax.data.supervised import Example, Examples, Forms, endless_order, read_examples
from dapo_jax.learner.batches import Mean, TrainBatch, TrainState
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.packing import Segment, pack, take_tokens
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.learner.update import Learner
from dapo_jax.model import load_huggingface, peft_adapters, save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.model.trainable import choose_trained
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.metrics import add_up
from dapo_jax.reporting.sinks import MetricRows
from dapo_jax.run.components import check_processes, load_frozen, load_trained
from dapo_jax.run.compute import check_divisible, check_rotations, numerics, open_mesh
from dapo_jax.run.export import policy_layers, write_adapters
from dapo_jax.run.supervised.resume import METRICS, ResumePoint, Stopped
from dapo_jax.runtime import processes
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.runtime.nonfinite import check_skipped, count_skipped
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.sharding import flatten, to_host, unbox
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import replace
from dapo_jax.structs import Completion, Prompt

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
Batch = tuple[TrainBatch, int, dict[str, float]]  # a minibatch, microbatches in use, metrics


class Start(NamedTuple):
    """Policy to train: shape, tokenizer, mesh, and initial parameters.

    Attributes:
        load: loads or makes the parameters to train.
        frozen: parameters under adapters, which are never trained; empty without adapters.
    """

    decoder: DecoderConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    load: Callable[[], Any]
    frozen: Any


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples of a supervised run, and measurements of a policy on them.

    Attributes:
        steps: of the run.
        first_params: makes or loads the parameters to train.
        batch: from step and parameters to a minibatch.
        labels: words of the console line, by metric.
        digests: of the files that are read, by name.
        measure_heldout: on held-out examples, now and then; empty without any.
        measure_training: on training examples, before and after the run.
    """

    steps: int
    first_params: Callable[[], Any]
    batch: Callable[[int, Any], Batch]
    labels: Mapping[str, str]
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    measure_heldout: Measure = lambda params: {}
    measure_training: Measure = lambda params: {}


OpenTask = Callable[[Any, Start, Learner, Signals], Task]


def own_segments(examples: Sequence[Example]) -> list[Segment]:
    """Return the responses of examples; the turns of an example share the index of a prompt."""
    segments: list[Segment] = []
    for number, example in enumerate(examples):
        for turns in example.turns:
            prompt = Prompt(number, str(number), example.text, turns.prompt, "", "own")
            completion = Completion(turns.response, np.zeros(len(turns.response)), False, 0, "")
            weights = turns.trained.astype(float)
            segments.append(Segment(prompt, completion, len(segments), True, weights))
    return segments


def open_start(config: SftConfig | DpoConfig) -> Start:
    """Return the policy of `config.start`, or a new one of `config.architecture`."""
    mesh = open_mesh(config.mesh, config.packing.rows_per_microbatch)
    numbers = numerics(config.compute, mesh, config.packing.row_tokens)
    if isinstance(config, SftConfig) and not config.start:
        tokenizer = arithmetic_tokenizer()
        shape = dataclasses.asdict(config.architecture) | numbers
        decoder = DecoderConfig(vocab=tokenizer.padded_vocab, **shape)
        check_divisible(decoder, mesh)
        key = jax.random.key(config.seed)
        return Start(decoder, tokenizer, mesh, lambda: unbox(init_params(decoder, key)), {})
    folder, adapters = config.start, config.lora.folder
    decoder = load_huggingface.read_config(folder, field="start", **numbers)
    decoder = choose_trained(decoder, 0.0, config.lora)
    check_divisible(decoder, mesh)
    check_rotations(decoder, config.packing.row_tokens, "start", folder)
    tokenizer = Tokenizer.from_folder(folder, "start")
    tokenizer.check_fits(decoder.vocab, "start", folder)

    def load() -> Any:
        return load_trained(folder, decoder, mesh, config.seed, adapters, field="start")

    if adapters:
        peft_adapters.read_adapters(adapters, decoder)  # raises before the base is loaded
    return Start(decoder, tokenizer, mesh, load, load_frozen(folder, decoder, mesh, "start"))


def open_examples(
    config: SftConfig | DpoConfig, tokenizer: Tokenizer, forms: Forms, per_step: str
) -> tuple[Examples, int, Callable[[int], list[int]]]:
    """Return the examples of the files, steps of the run, and example numbers by step."""
    data, progress = config.data, Progress()
    examples = read_examples(data, tokenizer, config.packing.row_tokens, forms)
    processes.check_same(lambda: {f"the data of {data.source}": examples.digest()})
    progress.say(escape(f"data: {examples.notes}"))
    for warning in examples.warnings:
        progress.warn(escape(warning))
    count, size = len(examples.training), getattr(config, per_step)
    require(size <= count, per_step, size, f"at most {count}, the number of training examples")
    order = endless_order(count, config.seed)

    def numbers(step: int) -> list[int]:
        return [order(i) for i in range(step * size, (step + 1) * size)]

    return examples, config.total_steps or math.ceil(data.passes * count / size), numbers


def score_responses(
    learner: Learner,
    params: Any,
    examples: Sequence[Example],
    at_once: int,
    packing: Packing,
    signals: Signals,
) -> Iterable[tuple[Segment, np.ndarray]]:
    """Yield every response of the examples with the log-probs of its tokens.

    Raises `Stopped` on every process if one received a signal.
    """
    for start in range(0, len(examples), at_once):
        if signals():
            raise Stopped(signals.received)
        segments = own_segments(examples[start : start + at_once])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        scores = to_host(learner.score(params, rollouts, used).values)
        logprobs = take_tokens(scores, np.asarray(rollouts.response_index))
        yield from zip(segments, logprobs, strict=True)


def train_supervised(
    config: SftConfig | DpoConfig, name: str, kind: str, algorithm: Algorithm, open_task: OpenTask
) -> pathlib.Path:
    """Train a policy, write its model folder, and return the folder's path.

    Raises:
        ConfigError: settings, files and folders don't fit together.
        Stopped: a signal ended the command; the state is saved beside the folder.
        NotFinite: too many updates in a row were skipped.
    """
    check_processes(config)
    with Signals() as signals, replace("out", config.out, kind) as folder:
        start = open_start(config)
        score = PolicySettings(algorithm, config.compute)
        learner: Learner = keep(
            policy_learner, score, config.optimizer, start.decoder, start.mesh, frozen=start.frozen
        )
        task = open_task(config, start, learner, signals)
        digests = dict(task.digests)
        if config.start:
            digests[config.start] = load_huggingface.fingerprint(config.start)
        if config.lora.folder:
            digests[config.lora.folder] = peft_adapters.fingerprint(config.lora.folder)
        resume = ResumePoint(config, digests)
        with resume:
            state = resume.begin(learner.abstract_state, lambda: learner.start(task.first_params()))
            task = dataclasses.replace(task, first_params=dict)  # frees the parameters it holds
            log = TrainingLog(name, resume, task, config.optimizer.max_skipped_steps)
            state = _learn(config, task, learner, state, log, signals)
            write_policy(config, kind, start, folder, state.params)
            if folder is not None:
                shutil.copyfile(resume.path / METRICS, folder / METRICS)
    resume.forget()
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
    first_step = log.resume.record.step
    if first_step:
        row = log.resume.first_row()
        before = {name: row[name] for name in task.labels if name in row}
    else:
        before = task.measure_training(state.params) | task.measure_heldout(state.params)
        if before:
            log.add(0, before, {})
    for step in range(first_step, task.steps):
        if signals():
            log.stop(signals.received)
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
        self._total = task.steps
        self._writer: MetricRows | None = None
        if processes.is_first():
            self._writer = MetricRows(resume.path, resume.record.step)
        self._pending: tuple[int, dict[str, float], dict[str, Mean]] | None = None
        self._started = time.perf_counter()
        self._skipped = resume.record.progress.skipped
        self._max_skipped = max_skipped_steps

    def is_due(self, step: int) -> bool:
        """Return True if the console gets a line after so many steps."""
        return step % max(1, self._total // LINES_PER_RUN) == 0 or step == self._total

    def add(self, step: int, values: dict[str, float], means: dict[str, Mean]) -> None:
        """Add the metrics of a step that is running."""
        self._flush()
        self._pending = step, values, means

    def after_step(self, state: TrainState) -> None:
        """End the newest step; its line is written before a checkpoint has it."""
        if self.resume.is_due():
            self._flush()
        self.resume.after_step(state, self._skipped)

    def stop(self, received: str) -> None:
        """Raise `Stopped`, once all steps are on disk."""
        self._flush()
        self.resume.keep()
        raise Stopped(received)

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
    """Write weights, settings and tokenizer into `folder`; adapters are also written beside it.

    Every process calls it; `folder` is None on those that do not write.
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
