"""Examples and initial policy of `sft` and `dpo`."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.markup import escape

from dapo_jax.config.experiment import DpoConfig, Packing, SftConfig
from dapo_jax.data.prompts.tokenizer import Tokenizer, arithmetic_tokenizer
from dapo_jax.data.supervised import Example, Examples, Forms, endless_order, read_examples
from dapo_jax.learner.packing import Segment, pack, take_tokens
from dapo_jax.learner.update import Learner
from dapo_jax.model import load_huggingface
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.model.peft_adapters import read_adapters
from dapo_jax.model.trainable import choose_trained
from dapo_jax.reporting.console import Progress
from dapo_jax.run.components import load_frozen, load_trained
from dapo_jax.run.compute import check_divisible, check_rotations, numerics
from dapo_jax.run.supervised.resume import Stopped
from dapo_jax.runtime import processes
from dapo_jax.runtime.settings import require
from dapo_jax.runtime.sharding import to_host, unbox
from dapo_jax.runtime.signals import Signals
from dapo_jax.structs import Completion, Prompt


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


def own_segments(examples: Sequence[Example]) -> list[Segment]:
    """Return the responses of examples; the turns of an example share the index of a prompt."""
    segments: list[Segment] = []
    for number, example in enumerate(examples):
        for turns in example.turns:
            prompt = Prompt(number, str(number), example.text, turns.prompt, "", "own")
            size = len(turns.response)
            completion = Completion(turns.response, np.zeros(size), False, 0, "")
            weights = turns.trained.astype(float)
            segments.append(Segment(prompt, completion, len(segments), True, weights))
    return segments


def open_start(config: SftConfig | DpoConfig, mesh: jax.sharding.Mesh) -> Start:
    """Return the policy of `config.start`, or a new one of `config.architecture`.

    Raises `ConfigError`.
    """
    numbers = numerics(config.compute, mesh, config.packing.row_tokens)
    if config.start or not isinstance(config, SftConfig):
        folder = config.start
        decoder = load_huggingface.read_config(folder, field="start", **numbers)
        decoder = choose_trained(decoder, 0.0, config.lora)
        check_divisible(decoder, mesh)
        check_rotations(decoder, config.packing.row_tokens, "start", folder)
        tokenizer = Tokenizer.from_folder(folder, "start")
        tokenizer.check_fits(decoder.vocab, "start", folder)

        def load() -> Any:
            return load_trained(
                folder, decoder, mesh, config.seed, config.lora.folder, field="start"
            )

        if config.lora.folder:
            read_adapters(config.lora.folder, decoder)  # raises before the base is loaded
        frozen = load_frozen(folder, decoder, mesh, "start")
        return Start(decoder, tokenizer, mesh, load, frozen)
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
    return Start(decoder, tokenizer, mesh, lambda: unbox(init_params(decoder, key)), {})


def open_examples(
    config: SftConfig | DpoConfig, tokenizer: Tokenizer, forms: Forms, per_step: str
) -> tuple[Examples, int, Callable[[int], list[int]]]:
    """Return the examples of the files, steps of the run, and example numbers by step.

    Args:
        per_step: name of the setting that holds the examples of a step.

    Raises `ConfigError` if a step takes more than there are.
    """
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

    Args:
        at_once: examples that are packed and scored together.

    Raises `Stopped` on every process if one received a signal.
    """
    for start in range(0, len(examples), at_once):
        if signals():
            raise Stopped(signals.received)
        segments = own_segments(examples[start : start + at_once])
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        scores = to_host(learner.score(params, rollouts, used).values)
        yield from zip(
            segments, take_tokens(scores, np.asarray(rollouts.response_index)), strict=True
        )
