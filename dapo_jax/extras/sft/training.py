"""Supervised training (`sft`, `dpo`): policy, examples, batches, the loop, the model folder.

DPO (arXiv 2305.18290) computes the log-probs of the reference once, before the first step, and then
frees it: memory holds one policy.
"""

import contextlib
import dataclasses
import functools
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

from dapo_jax.commands.command_line import find_preset
from dapo_jax.config.algorithm import Algorithm
from dapo_jax.config.experiment import GENERATED, Checkpoint, Packing
from dapo_jax.config.rates import choose_rates
from dapo_jax.config.settings import leaves
from dapo_jax.data import arithmetic
from dapo_jax.data.prompts.tokenizer import END, PAD, Tokenizer, arithmetic_tokenizer
from dapo_jax.extras.sft.rows import (
    EXAMPLES,
    PAIRS,
    Example,
    Examples,
    Forms,
    Turns,
    endless_order,
    read_examples,
)
from dapo_jax.extras.sft.settings import DpoConfig, SftConfig
from dapo_jax.learner.advantages import Estimates, Feedback, estimate, gather_feedback
from dapo_jax.learner.batches import Mean, PackedRows, ScoredBatch, TrainBatch, TrainState
from dapo_jax.learner.metrics import add_up, feedback_metrics, preference_metrics
from dapo_jax.learner.minibatches import make_batch
from dapo_jax.learner.packing import Segment, pack, place_tokens, take_tokens
from dapo_jax.learner.policy import PolicySettings, policy_learner
from dapo_jax.learner.update import Learner, learning_rate
from dapo_jax.model import load_huggingface, peft_adapters, save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.model.load_huggingface import fingerprint
from dapo_jax.model.trainable import choose_trained, parameter_count
from dapo_jax.reporting.console import Progress, duration
from dapo_jax.reporting.sinks import MetricRows
from dapo_jax.run import build
from dapo_jax.run.build import attention_notice, check_divisible, numerics, open_mesh
from dapo_jax.run.export import adapter_folder, policy_layers
from dapo_jax.run.identity import Record, RunProgress, check_processes
from dapo_jax.run.store import Checkpoints, find_steps, saved_steps
from dapo_jax.runtime import processes
from dapo_jax.runtime.kept_programs import keep
from dapo_jax.runtime.nonfinite import check_skipped, count_skipped
from dapo_jax.runtime.sharding import flatten, to_host, unbox
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.jsonl import objects
from dapo_jax.runtime.storage.models import model_path
from dapo_jax.runtime.storage.output_folder import PREFERRING, TRAINED, UNFINISHED, claim, replace
from dapo_jax.runtime.storage.retries import NotSaved, Storage
from dapo_jax.types.errors import require
from dapo_jax.types.structs import Completion, Interrupted, Prompt

# Metrics of an update that have a meaning without sampling.
MEASURED = ("policy_nll", "entropy", "mean_probability", "gradient_norm", "skipped_updates")
LINES_PER_RUN = 10
METRICS = "metrics.jsonl"
NOT_COMPARED = ("out", "save_every_steps")  # by resumed runs
# Other libraries would otherwise take the end and pad tokens of the family.
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": PAD,
}
MEASURED_PAIRS = 256  # of the training pairs, before and after
LABELS = {
    "preference_loss": "loss",
    "preference_accuracy": "accuracy",
    "heldout_preference_loss": "held-out loss",
    "heldout_preference_accuracy": "held-out accuracy",
}
Measure = Callable[[Any], dict[str, float]]  # from parameters to metrics
Batch = tuple[TrainBatch, int, dict[str, float]]  # a minibatch, microbatches in use, metrics


class Start(NamedTuple):
    """Policy to train: settings, shape, tokenizer, mesh, and initial parameters."""

    config: Any
    decoder: DecoderConfig
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    load: Callable[[], Any]  # loads or makes the parameters to train
    frozen: Any  # parameters under adapters, which are never trained; empty without adapters


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples of a supervised run, and measurements of a policy on them."""

    steps: int
    first_params: Callable[[], Any]  # makes or loads the parameters to train
    batch: Callable[[int, Any], Batch]  # from step and parameters to a minibatch
    labels: Mapping[str, str]  # words of the console line, by metric
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of files, by name
    measure_heldout: Measure = lambda params: {}  # now and then; empty without held-out examples
    measure_training: Measure = lambda params: {}  # before and after the run


OpenTask = Callable[[Start, Learner, Signals], Task]


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
        return Start(config, decoder, tokenizer, mesh, lambda: unbox(init_params(decoder, key)), {})
    folder, adapters = config.start, config.lora.folder
    decoder = load_huggingface.read_config(folder, field="start", **numbers)
    decoder = choose_trained(decoder, 0.0, config.lora)
    check_divisible(decoder, mesh)
    tokenizer = Tokenizer.from_folder(folder, "start")
    tokenizer.check_fits(decoder.vocab, "start", folder)

    def load() -> Any:
        return build.load_trained(folder, decoder, mesh, config.seed, adapters, field="start")

    if adapters:
        peft_adapters.read_adapters(adapters, decoder)  # raises before the base is loaded
    frozen = build.load_frozen(folder, decoder, mesh, "start")
    return Start(config, decoder, tokenizer, mesh, load, frozen)


def open_examples(
    config: SftConfig | DpoConfig, tokenizer: Tokenizer, forms: Forms, per_step: str
) -> tuple[Examples, int, Callable[[int], list[int]]]:
    """Return the examples of the files, steps of the run, and example numbers by step."""
    data, progress = config.data, Progress()
    examples = read_examples(data, tokenizer, config.packing.row_tokens, forms, config.seed)
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

    Raises `Interrupted` on every process if one received a signal.
    """
    for start in range(0, len(examples), at_once):
        if signals():
            raise Interrupted
        segments = own_segments(examples[start : start + at_once])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        scores = to_host(learner.score(params, rollouts, used).values)
        logprobs = take_tokens(scores, np.asarray(rollouts.response_index))
        yield from zip(segments, logprobs, strict=True)


class Method(NamedTuple):
    """A kind of supervised training: `sft` or `dpo`."""

    name: str
    kind: str  # of its output folder
    algorithm: Algorithm
    open_task: OpenTask


def _method(config: SftConfig | DpoConfig) -> Method:
    if isinstance(config, SftConfig):
        return Method("sft", TRAINED, find_preset("sft"), _open_sft)
    return Method("dpo", PREFERRING, algorithm_of(config), _open_dpo)


def train_supervised(
    config: SftConfig | DpoConfig, signals: Signals | None = None
) -> pathlib.Path | None:
    """Train a policy on examples or pairs, write its model folder, and return the folder's path.

    Returns None if a signal ended the training early: the folder is as it was, and the state is
    saved beside it.

    Raises:
        ConfigError: settings, files and folders don't fit together.
        NotFinite: too many updates in a row were skipped.
    """
    check_processes(config)
    with signals or Signals() as signals:
        try:
            _train(config, signals)
        except Interrupted:
            resume = "No step is kept: the same command starts from scratch"
            if step := max(saved_steps(halfway(config)), default=0):
                resume = f"Saved after step {step}: the same command resumes from there"
            stopped = f"stopped by {signals.received}: {config.out} is as it was"
            processes.print_error(f"{stopped}. {resume}")
            return None
    Progress().say(f"policy written to {escape(config.out)}")
    return pathlib.Path(config.out)


def _train(config: SftConfig | DpoConfig, signals: Signals) -> None:
    name, kind, algorithm, open_task = _method(config)
    with replace("out", config.out, kind) as folder:
        start = open_start(config)
        rows = config.packing.row_tokens
        if notice := attention_notice(config.compute, rows, start.decoder, start.mesh):
            Progress().say(notice)
        score = PolicySettings(algorithm, config.compute)
        learner: Learner = keep(
            policy_learner, score, config.optimizer, start.decoder, start.mesh, frozen=start.frozen
        )
        task = open_task(start, learner, signals)
        size = parameter_count(start.decoder)
        config, lines, warnings = choose_rates(config, size, task.steps)
        for line in lines:
            Progress().say(escape(line))
        for warning in warnings:
            Progress().warn(escape(warning))
        digests = dict(task.digests)
        if config.start:
            digests[config.start] = load_huggingface.fingerprint(config.start)
        if config.lora.folder:
            digests[config.lora.folder] = peft_adapters.fingerprint(config.lora.folder)
        run = SupervisedRun(name, config, task, digests)
        with run:
            state = run.begin(learner.abstract_state, lambda: learner.start(task.first_params()))
            task = dataclasses.replace(task, first_params=dict)  # frees the parameters it holds
            run.task = task
            state = _learn(config, run, learner, state, signals)
            write_policy(start, kind, folder, state.params)
            if folder is not None:
                shutil.copyfile(run.path / METRICS, folder / METRICS)
    run.forget()


def _learn(
    config: SftConfig | DpoConfig,
    run: "SupervisedRun",
    learner: Learner,
    state: TrainState,
    signals: Signals,
) -> TrainState:
    task = run.task
    first_step = run.record.step
    heldout: dict[str, float] = {}
    if first_step:
        row = run.first_row()
        before = {name: row[name] for name in task.labels if name in row}
    else:
        before = task.measure_training(state.params) | task.measure_heldout(state.params)
        if before:
            run.add(0, before, {})
    for step in range(first_step, task.steps):
        if signals():
            run.keep()
            raise Interrupted
        batch, used, values = task.batch(step, state.params)
        rate = learning_rate(config.optimizer, step, task.steps)
        state, (means, _) = learner.update(state, batch, used, rate)
        run.add(step + 1, {"learning_rate": rate} | values, means)
        is_shown = (step + 1) % max(1, task.steps // LINES_PER_RUN) == 0 or step + 1 == task.steps
        if is_shown:
            heldout = task.measure_heldout(state.params)
            run.show(heldout)
        run.after_step(state)
    if before:
        # The last step was measured, unless the run was stopped after it.
        after = task.measure_training(state.params)
        after |= heldout or task.measure_heldout(state.params)
        changes = ", ".join(
            f"{task.labels[name]} {before[name]:.3f} -> {after[name]:.3f}" for name in before
        )
        Progress().say(f"{changes} after {task.steps} steps")
    return state


def halfway(config: SftConfig | DpoConfig) -> pathlib.Path:
    """Return the folder of a run that is not finished."""
    out = pathlib.Path(config.out)
    return out.with_name(f"{out.name}.halfway")


class SupervisedRun:
    """Checkpoints, metrics.jsonl and console lines of a supervised run; locks their folder.

    `OUT.halfway` holds them until OUT is complete. A command that was stopped resumes from them;
    one with other settings, data or models starts from scratch. The metrics of a step are read
    while the next one runs, so that no step waits for the host. Every process calls every method.
    `digests` are those of the files that the run reads, by name.
    """

    def __init__(
        self, name: str, config: SftConfig | DpoConfig, task: Task, digests: dict[str, str]
    ):
        self.task = task
        self.path = halfway(config)
        settings = {name: value for name, _, value in leaves(config) if name not in NOT_COMPARED}
        self.record = Record(0, settings, digests)
        self._name = name
        self._config = config
        self._storage = Storage()
        self._state: TrainState | None = None
        self._writer: MetricRows | None = None
        self._pending: tuple[int, dict[str, float], dict[str, Mean]] | None = None
        self._shown = 0, time.perf_counter()  # step and time of the newest line

    def __enter__(self) -> "SupervisedRun":
        with contextlib.ExitStack() as stack:
            stack.enter_context(claim("out", str(self.path), UNFINISHED))
            stack.callback(self._remove_if_empty)
            self._remove_other_run()
            checkpoints = Checkpoints(self.path, Checkpoint(keep=1), self._storage)
            self._checkpoints = stack.enter_context(checkpoints)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)  # waits for what is being written

    def _remove_other_run(self) -> None:
        if not Checkpoints.exist(self.path):
            return
        with Checkpoints(self.path) as saved:
            if saved.latest_step() is None or self.record.continues(saved.record()):
                return
        self._storage.warn(f"{self.path} has other settings or data: training starts from scratch")
        processes.broadcast_from_host0(self._remove, "removal of another run")

    def _remove_if_empty(self) -> None:
        if processes.is_first() and not find_steps(self.path):
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        (self.path / METRICS).unlink(missing_ok=True)

    def begin(self, abstract: TrainState, make_state: Callable[[], TrainState]) -> TrainState:
        """Return the newest saved state, or a new one."""
        store = self._checkpoints
        if store.latest_step() is None:
            self._state = make_state()
        else:
            self._state, saved = store.newest(lambda record: (store.state(abstract), record))
            self.record = dataclasses.replace(self.record, step=saved.step, progress=saved.progress)
        if processes.is_first():
            self._writer = MetricRows(self.path, self.record.step)
        return self._state

    def first_row(self) -> dict[str, Any]:
        """Return the metrics from before the first step, on every process; empty without any."""

        def read() -> dict[str, Any]:
            return next((row for row in objects(self.path / METRICS) if row.get("step") == 0), {})

        return processes.broadcast_from_host0(read, "metrics before the first step")

    def add(self, step: int, values: dict[str, float], means: dict[str, Mean]) -> None:
        """Add the metrics of a step that is running."""
        self._flush()
        self._pending = step, values, means

    def show(self, heldout: dict[str, float]) -> None:
        """Print the newest step, with its held-out metrics."""
        if self._pending is None:
            return
        step, values, means = self._pending
        self._pending = step, values | heldout, means
        metrics = self._flush()
        labels = self.task.labels
        numbers = "  ".join(f"{labels[n]} {metrics[n]:.4f}" for n in labels if n in metrics)
        now, total = time.perf_counter(), self.task.steps
        seconds = (now - self._shown[1]) / max(1, step - self._shown[0])
        self._shown = step, now
        eta = f"  ETA {duration(seconds * (total - step))}" * (step < total)
        text = f"{self._name} step {step:>5}/{total}  {numbers}  {seconds:.2g} s a step{eta}"
        Progress().say(text)

    def after_step(self, state: TrainState) -> None:
        """End the newest step; its line is written before a checkpoint has it."""
        step = self.record.step + 1
        is_due = step % self._config.save_every_steps == 0
        if is_due:
            self._flush()
        self._state = state
        self.record = dataclasses.replace(self.record, step=step)
        self._checkpoints.after_step(is_due, self._save)

    def _save(self) -> None:
        self._checkpoints.save(self.record, {"state": self._state})

    def keep(self) -> None:
        """Wait until all steps are on disk, or can't be."""
        self._flush()
        try:
            if self.record.step:
                self._checkpoints.save_last(self._save)
        except NotSaved as error:
            self._storage.report_failure("the training state", str(error))

    def forget(self) -> None:
        """Remove the folder, once the output is complete."""
        if processes.is_first():
            shutil.rmtree(self.path, ignore_errors=True)

    def _flush(self) -> dict[str, float]:
        """Write the row of the newest step; raise `NotFinite` after too many skipped steps."""
        if self._pending is None:
            return {}
        step, values, means = self._pending
        measured = add_up([jax.device_get(means)]) if means else {}
        values = values | {name: measured[name] for name in MEASURED if name in measured}
        if self._writer:
            self._writer.on_row(step, values)
        self._pending = None
        progress = RunProgress(skipped=count_skipped(self.record.progress.skipped, measured))
        self.record = dataclasses.replace(self.record, progress=progress)
        limit = self._config.optimizer.max_skipped_steps
        check_skipped(progress.skipped[""], limit, measured)
        return values


def write_policy(start: Start, kind: str, folder: pathlib.Path | None, params: Any) -> None:
    """Write weights, settings and tokenizer into `folder`; adapters are also written beside it."""
    config, decoder, tokenizer = start.config, start.decoder, start.tokenizer
    if decoder.adapters:
        flat = flatten(params)

        def read(path: str) -> Any:
            return to_host(flat[path])

        base = model_path(config.start).absolute().name
        with replace("out", adapter_folder(config.out), kind) as beside:
            peft_adapters.save_adapters(beside, flat, read, decoder, base)
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


def generated_examples(config: SftConfig, tokenizer: Tokenizer, step: int) -> list[Example]:
    """Return the worked examples of one step; example i depends on (seed, i) alone.

    Every second turn is observed, the others end in an end token and are trained. An example that
    exceeds the budget is cut, so it has no end token.
    """
    examples, budget = [], config.max_response_tokens
    for index in range(step * config.examples_per_step, (step + 1) * config.examples_per_step):
        if config.data.source == "multi_digit_sums":
            text, turns = arithmetic.make_worked_sum(config.seed, index, config.examples)
        else:
            text, worked = arithmetic.make_worked_example(config.seed, index, config.examples)
            turns = [worked]
        tokens: list[int] = []
        trained: list[bool] = []
        for number, turn in enumerate(turns):
            is_trained = number % 2 == 0
            ids = [*tokenizer.encode(turn), *tokenizer.end_ids[:1] * is_trained]
            tokens += ids
            trained += [is_trained] * len(ids)
        prompt = np.asarray(tokenizer.encode_prompt(text), np.int32)
        response = np.asarray(tokens[:budget], np.int32)
        examples.append(Example(text, (Turns(prompt, response, np.asarray(trained[:budget])),)))
    return examples


def supervised_batch(
    algorithm: Algorithm, segments: Sequence[Segment], rollouts: PackedRows, estimates: Estimates
) -> TrainBatch:
    """Return a training batch of packed responses, with the algorithm's loss weights."""
    scored, budget = ScoredBatch(rollouts, None), rollouts.tokens.shape[-1]
    return make_batch(scored, segments, estimates, algorithm, budget)


def imitation_batch(segments: Sequence[Segment], packing: Packing) -> tuple[TrainBatch, int]:
    """Return a minibatch of the mean cross-entropy over trained tokens, and its microbatches."""
    rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
    on_response = np.asarray(rollouts.response_index) >= 0
    estimates = Estimates(on_response.astype(np.float32))
    return supervised_batch(find_preset("sft"), segments, rollouts, estimates), used


def _open_sft(start: Start, learner: Learner, signals: Signals) -> Task:
    config: SftConfig = start.config
    labels = {"policy_nll": "nll", "heldout_nll": "held-out nll"}
    packing = config.packing

    def make_task(steps: int, taken: Callable[[int], list[Example]], **fields: Any) -> Task:
        def batch(step: int, _: Any) -> Batch:
            return *imitation_batch(own_segments(taken(step)), packing), {}

        return Task(steps, start.load, batch, labels, **fields)

    if config.data.source in GENERATED:
        generate = functools.partial(generated_examples, config, start.tokenizer)
        return make_task(config.total_steps, generate)
    examples, steps, numbers = open_examples(config, start.tokenizer, EXAMPLES, "examples_per_step")

    def heldout_nll(params: Any) -> dict[str, float]:
        total = tokens = 0.0
        for segment, logprobs in score_responses(
            learner, params, examples.heldout, config.examples_per_step, packing, signals
        ):
            weights = np.asarray(segment.token_weights)
            total += weights @ logprobs
            tokens += weights.sum()
        return {"heldout_nll": -float(total / tokens)} if tokens else {}

    return make_task(
        steps,
        lambda step: [examples.training[i] for i in numbers(step)],
        digests={"data": examples.digest()},
        measure_heldout=heldout_nll,
    )


def algorithm_of(config: DpoConfig) -> Algorithm:
    """Return the preset `dpo` with the beta of the run."""
    return dataclasses.replace(find_preset("dpo"), preference_beta=config.beta)


def pair_segments(pairs: Sequence[Example]) -> list[Segment]:
    """Return chosen and rejected responses in turn; the chosen one counts as correct."""
    segments = own_segments(pairs)
    return [segment._replace(correct=i % 2 == 0) for i, segment in enumerate(segments)]


def pair_feedback(
    rollouts: PackedRows, policy: np.ndarray, reference: Sequence[np.ndarray]
) -> Feedback:
    """Return the feedback on packed pairs: log-ratios of policy to reference."""
    index, count = np.asarray(rollouts.response_index), len(reference)
    return gather_feedback(
        index,
        np.zeros(count),
        log_ratios=policy - place_tokens(reference, index),
        groups=np.arange(count) // 2,
        correct=np.arange(count) % 2 == 0,
    )


def _preferences(
    beta: float, now: Sequence[np.ndarray], reference: Sequence[np.ndarray], prefix: str
) -> dict[str, float]:
    """Return the metrics of pairs, chosen and rejected in turns."""
    both = zip(now, reference, strict=False)
    gains = np.array([np.sum(np.float64(policy) - before) for policy, before in both])
    margins = gains[0::2] - gains[1::2]
    return {f"{prefix}{name}": value for name, value in preference_metrics(margins, beta).items()}


def _open_dpo(start: Start, learner: Learner, signals: Signals) -> Task:
    config: DpoConfig = start.config
    size, packing, algorithm = config.pairs_per_step, config.packing, algorithm_of(config)
    if config.reference:
        build.check_same_model("reference", config.reference, config.start, lambda shape: shape)
    pairs, steps, numbers = open_examples(config, start.tokenizer, PAIRS, "pairs_per_step")
    digests = {"data": pairs.digest()}
    params = reference = start.load()
    if config.reference:
        digests[config.reference] = fingerprint(config.reference)
        reference = build.load_whole(
            config.reference, start.decoder, start.mesh, config.seed, field="reference"
        )

    def logprobs(params: Any, pairs: Sequence[Example]) -> list[np.ndarray]:
        scored = score_responses(learner, params, pairs, size, packing, signals)
        return [logprobs for _, logprobs in scored]

    # Log-probs of the reference, by response: chosen and rejected in turn.
    training = logprobs(reference, pairs.training)
    heldout = logprobs(reference, pairs.heldout)
    # A multiple of `size`: the pairs are packed as before, so scores repeat bit for bit.
    sample = pairs.training[: size * math.ceil(MEASURED_PAIRS / size)]

    def batch(step: int, params: Any) -> Batch:
        segments = pair_segments([pairs.training[i] for i in numbers(step)])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        policy = to_host(learner.score(params, rollouts, used).values)
        before = [logprobs for i in numbers(step) for logprobs in training[2 * i : 2 * i + 2]]
        feedback = pair_feedback(rollouts, policy, before)
        estimates = estimate(algorithm, feedback)
        batch = supervised_batch(algorithm, segments, rollouts, estimates)
        return batch, used, feedback_metrics(algorithm, feedback, estimates.advantages, None)

    def measure_heldout(params: Any) -> dict[str, float]:
        now = logprobs(params, pairs.heldout)
        return _preferences(config.beta, now, heldout, "heldout_") if now else {}

    def measure_training(params: Any) -> dict[str, float]:
        return _preferences(config.beta, logprobs(params, sample), training, "")

    return Task(steps, lambda: params, batch, LABELS, digests, measure_heldout, measure_training)
