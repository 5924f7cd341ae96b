"""What supervised training and offline pairs share: how a run starts, tells and ends."""

import json
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from rich.markup import escape

from dapo_jax.config.experiment import DpoConfig, Packing, SftConfig
from dapo_jax.data.prompts.tokenizer import END, PAD, Tokenizer, arithmetic_tokenizer
from dapo_jax.data.supervised_examples import Examples, endless_order, read_examples
from dapo_jax.data.supervised_rows import Example, Forms
from dapo_jax.learner.packing import Segment, pack, take_tokens
from dapo_jax.learner.update import Learner
from dapo_jax.model import load_huggingface, save_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.reporting.console import Progress
from dapo_jax.reporting.metrics import add_up
from dapo_jax.reporting.writers import MetricWriter
from dapo_jax.run.compute import check_divisible, numerics
from dapo_jax.run.supervised.resume import METRICS, ResumePoint, Stopped
from dapo_jax.runtime import processes
from dapo_jax.runtime.nonfinite import check_skipped, count_skipped
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.sharding import to_host, unbox
from dapo_jax.runtime.signals import Signals
from dapo_jax.structs import Completion, Mean, Prompt, TrainState

WRITTEN = (*save_huggingface.WRITTEN, METRICS)
# Of what an update measures, what says something where nothing was sampled.
MEASURED = ("policy_nll", "entropy", "mean_probability", "gradient_norm", "skipped_updates")
LINES_PER_RUN = 10
# Without them, other libraries take the end and pad tokens of the family.
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": PAD,
}


def own_segments(examples: Sequence[Example]) -> list[Segment]:
    """What is learned from these examples; an example's turns share the number of a prompt."""
    segments: list[Segment] = []
    for number, example in enumerate(examples):
        for turns in example.turns:
            prompt = Prompt(number, str(number), example.text, turns.prompt, "", "own")
            size = len(turns.response)
            completion = Completion(turns.response, np.zeros(size), False, 0, "")
            weights = turns.trained.astype(float)
            segments.append(Segment(prompt, completion, len(segments), True, weights))
    return segments


def stop_if(signals: Signals) -> None:
    """Raises `Stopped` on every process where one received a signal."""
    if signals():
        raise Stopped(signals.received)


def starting_point(
    config: SftConfig | DpoConfig, mesh: jax.sharding.Mesh
) -> tuple[DecoderConfig, Tokenizer, Callable[[], Any]]:
    """The policy to train, its tokenizer, and what loads a folder's parameters or makes some."""
    numbers = numerics(config.compute, mesh, config.packing.row_tokens)
    start = config.start
    if start:
        decoder = load_huggingface.read_config(start, field="start", **numbers)
        check_divisible(decoder, mesh)
        tokenizer = Tokenizer.from_folder(start, "start")
        tokenizer.check_fits(decoder.vocab, "start", start)
        return (
            decoder,
            tokenizer,
            lambda: load_huggingface.load_params(start, decoder, mesh, field="start"),
        )
    assert isinstance(config, SftConfig)  # the other has to have a start
    shape, tokenizer = config.architecture, arithmetic_tokenizer()
    decoder = DecoderConfig(
        vocab=tokenizer.padded_vocab,
        layers=shape.layers,
        embed=shape.embed,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        mlp=shape.mlp,
        rope_theta=shape.rope_theta,
        **numbers,
    )
    check_divisible(decoder, mesh)
    key = jax.random.key(config.seed)
    return decoder, tokenizer, lambda: unbox(init_params(decoder, key))


def open_examples(
    config: SftConfig | DpoConfig, tokenizer: Tokenizer, forms: Forms, per_step: str
) -> tuple[Examples, int, Callable[[int], list[int]]]:
    """The examples of the files, the steps of the run, and which examples a step learns from.

    Args:
        per_step: the setting that says how many a step takes.
    """
    data, progress = config.data, Progress()
    found = read_examples(data, tokenizer, config.packing.row_tokens, forms)
    processes.check_same(lambda: {f"the data of {data.source}": found.digest()})
    progress.say(escape(f"data: {found.notes}"))
    for warning in found.warnings:
        progress.warn(escape(warning))
    count, size = len(found.training), getattr(config, per_step)
    require(size <= count, per_step, size, f"at most {count}, all that there are to train on")
    order = endless_order(count, config.seed)

    def of_step(step: int) -> list[int]:
        return [order(i) for i in range(step * size, (step + 1) * size)]

    return found, config.total_steps or math.ceil(data.passes * count / size), of_step


def score_responses(
    learner: Learner,
    params: Any,
    examples: Sequence[Example],
    at_once: int,
    packing: Packing,
    signals: Signals,
) -> Iterable[tuple[Segment, np.ndarray]]:
    """Every response of the examples with the log-probs of its tokens.

    Args:
        at_once: examples that are packed and scored together.
    """
    for start in range(0, len(examples), at_once):
        stop_if(signals)
        segments = own_segments(examples[start : start + at_once])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        scores = to_host(learner.score(params, rollouts, used))
        yield from zip(
            segments, take_tokens(scores, np.asarray(rollouts.response_index)), strict=True
        )


class TrainingLog:
    """A line of metrics.jsonl per step; a console line now and then.

    A step's numbers are read when the next one is under way, so that no step waits for the host.
    `add` and `tell` raise `NotFinite` after `max_skipped_steps` without an update.

    Args:
        half: where the run is; its folder gets the lines.
    """

    def __init__(self, half: ResumePoint, total_steps: int, max_skipped_steps: int):
        self._half, folder = half, half.folder
        self._writer = MetricWriter(folder, half.step, tensorboard=False) if folder else None
        self._every, self._total = max(1, total_steps // LINES_PER_RUN), total_steps
        self._pending: tuple[int, dict[str, float], dict[str, Mean]] | None = None
        self._started, self._progress = time.perf_counter(), Progress()
        self._skipped, self._max_skipped = half.skipped, max_skipped_steps

    def is_due(self, step: int) -> bool:
        """Whether that many finished steps are told on the console."""
        return step % self._every == 0 or step == self._total

    def add(self, step: int, values: dict[str, float], means: dict[str, Mean]) -> None:
        self._flush()
        self._pending = step, values, means

    def done(self, state: TrainState) -> None:
        """The step that was added last is done; what is saved of it has its line."""
        if self._half.is_due(self._half.step + 1):
            self._flush()
        self._half.done(state, self._skipped)

    def stop_if(self, signals: Signals) -> None:
        """Between two steps: as `offline.stop_if`, once all that is done is on disk."""
        if signals():
            self._flush()
            self._half.keep()
            raise Stopped(signals.received)

    def tell(self, name: str, heldout: dict[str, float], shown: dict[str, str]) -> None:
        """The console line of the step that was added last.

        Args:
            heldout: added to the step's numbers.
            shown: text before a number, by its name.
        """
        assert self._pending is not None
        step, values, means = self._pending
        self._pending = step, values | heldout, means
        found = self._flush()
        numbers = "  ".join(
            f"{text} {found[key]:.4f}" for key, text in shown.items() if key in found
        )
        seconds = time.perf_counter() - self._started
        self._progress.say(f"{name} step {step:>5}/{self._total}  {numbers}  {seconds:.0f} s")

    def _flush(self) -> dict[str, float]:
        if self._pending is None:
            return {}
        step, values, means = self._pending
        measured = add_up([jax.device_get(means)]) if means else {}
        values = values | {name: measured[name] for name in MEASURED if name in measured}
        if self._writer:
            self._writer.write(step, values)
        self._pending = None
        self._skipped = count_skipped(self._skipped, measured)
        check_skipped(self._skipped[""], self._max_skipped, measured)
        return values


def write_policy(
    folder: pathlib.Path | None,
    params: Any,
    decoder: DecoderConfig,
    tokenizer: Tokenizer,
    start: str,
    half: ResumePoint,
) -> None:
    """The policy's files in `folder`, which is there; None: another process writes.

    Args:
        half: has the lines of the run.
    """
    save_huggingface.save_folder(folder, params, decoder, tokenizer.end_ids)
    if folder is None:
        return
    assert half.folder is not None  # in the process that writes
    shutil.copyfile(half.folder / METRICS, folder / METRICS)
    if start:  # its own settings instead, and all of its tokenizer's files
        save_huggingface.save_settings_of(start, folder, "float32")
    else:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_SETTINGS, indent=2))
