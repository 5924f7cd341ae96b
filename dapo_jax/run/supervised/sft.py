"""Supervised training on examples, by the update of reinforcement learning."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from rich.markup import escape

from dapo_jax.algorithms import sft
from dapo_jax.config.experiment import Packing, SftConfig
from dapo_jax.config.inputs import GENERATED
from dapo_jax.data.arithmetic import make_worked_example
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.supervised_rows import EXAMPLES, Example
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.optimizer import learning_rate
from dapo_jax.learner.packing import Segment, make_batch, pack
from dapo_jax.learner.policy import policy_learner
from dapo_jax.learner.update import Learner
from dapo_jax.reporting.console import Progress
from dapo_jax.run.components import check_processes
from dapo_jax.run.compute import open_mesh
from dapo_jax.run.supervised.common import (
    WRITTEN,
    TrainingLog,
    open_examples,
    own_segments,
    score_responses,
    starting_point,
    write_policy,
)
from dapo_jax.run.supervised.resume import ResumePoint, forget, model_digests
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.output_folder import replace
from dapo_jax.runtime.storage.ownership import TRAINED
from dapo_jax.structs import Completion, Prompt, ScoredBatch, TrainBatch, TrainState


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


def make_base(config: SftConfig) -> pathlib.Path:
    """Trains a policy and writes its folder; returns the path. Raises `ConfigError` at the door."""
    check_processes(config)
    with Signals() as signals, replace("out", config.out, TRAINED, WRITTEN) as folder:
        train_and_write(config, folder, signals)
    forget(config.out)
    Progress().say(f"policy written to {escape(config.out)}")
    return pathlib.Path(config.out)


@dataclasses.dataclass(frozen=True)
class Course:
    """What a run learns from.

    Attributes:
        segments: of a step.
        budget: longest response.
    """

    steps: int
    segments: Callable[[int], list[Segment]]
    budget: int
    heldout: Sequence[Example] = ()
    digests: dict[str, str] = dataclasses.field(default_factory=dict)  # of files, by name


def open_course(config: SftConfig, tokenizer: Tokenizer) -> Course:
    """Generated examples, or those of files. Raises `ConfigError`."""
    if config.data.source == GENERATED:
        budget = config.max_response_tokens
        segments = functools.partial(example_segments, config, tokenizer)
        return Course(config.total_steps, segments, budget)
    found, steps, of_step = open_examples(config, tokenizer, EXAMPLES, "examples_per_step")

    def segments(step: int) -> list[Segment]:
        return own_segments([found.training[i] for i in of_step(step)])

    digests = {"data": found.digest()}
    return Course(steps, segments, config.packing.row_tokens, found.heldout, digests)


def imitation_batch(
    segments: Sequence[Segment], packing: Packing, budget: int
) -> tuple[TrainBatch, int]:
    """The minibatch whose gradient is that of the mean cross-entropy over trained tokens, and the
    microbatches that it uses."""
    algorithm = sft()
    rollouts, used = pack(segments, packing.row_tokens, packing.rows_per_microbatch)
    feedback = gather_feedback(
        np.asarray(rollouts.response_index),
        np.ones(len(segments)),
        groups=np.arange(len(segments)),
        correct=np.ones(len(segments), bool),
    )
    advantages, _ = estimate(algorithm, feedback)
    scored = ScoredBatch(rollouts, None)
    return make_batch(scored, segments, advantages, None, algorithm, budget), used


def train_and_write(config: SftConfig, folder: pathlib.Path | None, signals: Signals) -> None:
    """The policy's files in `folder`, which is there and empty; None: another process writes."""
    packing = config.packing
    mesh = open_mesh(config.mesh, packing.rows_per_microbatch)
    decoder, tokenizer, load = starting_point(config, mesh)
    course = open_course(config, tokenizer)
    learner = policy_learner(sft(), config.compute, config.optimizer, decoder, mesh)
    with ResumePoint(config, course.digests | model_digests(config.start)) as half:
        state = half.begin(learner.abstract_state, lambda: learner.start(load()))
        state = learn(config, course, learner, state, half, signals)
        write_policy(folder, state.params, decoder, tokenizer, config.start, half)


def learn(
    config: SftConfig,
    course: Course,
    learner: Learner,
    state: TrainState,
    half: ResumePoint,
    signals: Signals,
) -> TrainState:
    """The state after all steps."""
    packing = config.packing

    def heldout_nll() -> dict[str, float]:
        """A mean over tokens; nothing where nothing is held out."""
        scored = score_responses(
            learner, state.params, course.heldout, config.examples_per_step, packing, signals
        )
        weighed = ((np.asarray(one.token_weights), logprobs) for one, logprobs in scored)
        parts = [(weights @ logprobs, weights.sum()) for weights, logprobs in weighed]
        total, tokens = np.sum(parts, axis=0) if parts else (0.0, 0.0)
        return {"heldout_nll": -float(total / tokens)} if tokens else {}

    journal = TrainingLog(half, course.steps, config.optimizer.max_skipped_steps)
    before, after = half.first_row() or heldout_nll(), {}
    if before and not half.step:
        journal.add(0, before, {})
    for step in range(half.step, course.steps):
        journal.stop_if(signals)
        batch, used = imitation_batch(course.segments(step), packing, course.budget)
        rate = learning_rate(config.optimizer, step, course.steps)
        state, means = learner.update(state, batch, used, rate)
        journal.add(step + 1, {"learning_rate": rate}, means)
        if journal.is_due(step + 1):
            after = heldout_nll()
            journal.tell("sft", after, {"policy_nll": "nll", "heldout_nll": "held-out nll"})
        journal.done(state)
    if before:
        after = after or heldout_nll()  # of a run that was stopped after its last step
        change = f"{before['heldout_nll']:.4f} -> {after['heldout_nll']:.4f}"
        Progress().say(f"held-out nll {change} after {course.steps} steps")
    return state
