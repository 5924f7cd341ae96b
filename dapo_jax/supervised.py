"""Supervised training on worked examples, by the update of reinforcement learning."""

import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
from rich.markup import escape

from dapo_jax.algorithms import sft
from dapo_jax.assembly import check_divisible, numerics, open_mesh
from dapo_jax.data.arithmetic import make_worked_example
from dapo_jax.experiment.config import SftConfig
from dapo_jax.folders import replace
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.packing import Segment, make_batch, pack
from dapo_jax.learner.policy import policy_learner
from dapo_jax.marks import TRAINED
from dapo_jax.model import huggingface, saving
from dapo_jax.model.decoder import DecoderConfig, init_params
from dapo_jax.parts import check_processes
from dapo_jax.prompts.tokenizer import END, PAD, Tokenizer, arithmetic_tokenizer
from dapo_jax.reporting.metrics import add_up
from dapo_jax.reporting.progress import Progress
from dapo_jax.sharding import unbox
from dapo_jax.structs import Completion, Prompt, ScoredBatch

LINES_PER_RUN = 10
# Without them, other libraries take the end and pad tokens of the family.
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": PAD,
}


def example_segments(config: SftConfig, tokenizer: Tokenizer, step: int) -> list[Segment]:
    """The worked examples of one step; example i of the run is drawn from (seed, i) alone.

    An example beyond the budget is cut and so never shows its end token.
    """
    segments, examples = [], config.examples
    for i in range(config.examples_per_step):
        index = step * config.examples_per_step + i
        text, worked = make_worked_example(config.seed, index, examples)
        response = [*tokenizer.encode(worked), tokenizer.end_ids[0]]
        tokens = np.asarray(response[: config.max_response_tokens], np.int32)
        prompt_tokens = np.asarray(tokenizer.encode_prompt(text), np.int32)
        prompt = Prompt(index, str(index), text, prompt_tokens, "", "arithmetic")
        cut = len(tokens) < len(response)
        segments.append(Segment(prompt, Completion(tokens, np.zeros(len(tokens)), cut, 0, ""), i))
    return segments


def starting_point(
    config: SftConfig, mesh: jax.sharding.Mesh
) -> tuple[DecoderConfig, Tokenizer, Any]:
    """The policy to train, its tokenizer and its parameters: a folder's, or random ones."""
    numbers = numerics(config.compute, mesh, config.packing.row_tokens)
    shape = config.architecture
    if config.start:
        decoder = huggingface.read_config(config.start, field="start", **numbers)
        check_divisible(decoder, mesh)
        tokenizer = Tokenizer.from_folder(config.start, "start")
        tokenizer.check_fits(decoder.vocab, "start", config.start)
        params = huggingface.load_params(config.start, decoder, mesh, field="start")
        return decoder, tokenizer, params
    tokenizer = arithmetic_tokenizer()
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
    return decoder, tokenizer, unbox(init_params(decoder, jax.random.key(config.seed)))


def make_base(config: SftConfig) -> pathlib.Path:
    """Trains a policy and writes its folder; returns the path. Raises `ConfigError` at the door."""
    check_processes(config)
    with replace("out", config.out, TRAINED, saving.WRITTEN) as folder:
        train_and_write(config, folder)
    Progress().say(f"base policy written to {escape(config.out)}")
    return pathlib.Path(config.out)


def train_and_write(config: SftConfig, folder: pathlib.Path | None) -> None:
    """The policy's files in `folder`, which is there and empty; None: another process writes."""
    packing, algorithm = config.packing, sft()
    mesh = open_mesh(config.mesh, packing.rows_per_microbatch)
    decoder, tokenizer, params = starting_point(config, mesh)
    learner = policy_learner(algorithm, config.compute, config.optimizer, decoder, mesh)
    state = learner.start(params)
    progress, started = Progress(), time.perf_counter()
    for step in range(config.total_steps):
        segments = example_segments(config, tokenizer, step)
        rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
        feedback = gather_feedback(
            rollouts.response_index,
            np.ones(len(segments)),
            groups=np.arange(len(segments)),
            correct=np.ones(len(segments), bool),
        )
        advantages, _ = estimate(algorithm, feedback)
        scored, budget = ScoredBatch(rollouts, None), config.max_response_tokens
        batch = make_batch(scored, segments, advantages, None, algorithm, budget)
        rate = learning_rate(config.optimizer, step, config.total_steps)
        state, means = learner.update(state, batch, used, rate)
        if (step + 1) % max(1, config.total_steps // LINES_PER_RUN) == 0:
            nll = add_up([jax.device_get(means)])["policy_nll"]
            seconds = time.perf_counter() - started
            progress.say(
                f"sft step {step + 1:>5}/{config.total_steps}  nll {nll:.4f}  {seconds:.0f} s"
            )
    saving.save_folder(folder, state.params, decoder, tokenizer.end_ids)
    if folder is None:
        return
    if config.start:  # its own settings instead, and all of its tokenizer's files
        saving.save_settings_of(config.start, folder, "float32")
    else:
        tokenizer.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_SETTINGS, indent=2))
