"""Supervised training on examples, by the update of reinforcement learning."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dapo_jax.algorithms import sft
from dapo_jax.config.experiment import Packing, SftConfig
from dapo_jax.config.inputs import GENERATED
from dapo_jax.data.arithmetic import make_worked_example
from dapo_jax.data.prompts.tokenizer import Tokenizer
from dapo_jax.data.supervised_rows import EXAMPLES, Example
from dapo_jax.learner.advantages import estimate, gather_feedback
from dapo_jax.learner.packing import Segment, make_batch, pack
from dapo_jax.learner.update import Learner
from dapo_jax.run.supervised.common import Start, open_examples, own_segments, score_responses
from dapo_jax.run.supervised.training import train_supervised
from dapo_jax.runtime.signals import Signals
from dapo_jax.runtime.storage.ownership import TRAINED
from dapo_jax.structs import Completion, Prompt, ScoredBatch, TrainBatch


def example_segments(config: SftConfig, tokenizer: Tokenizer, step: int) -> list[Segment]:
    """Worked examples of one step; example i of the run is drawn from (seed, i) alone.

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
    """Trains a policy on examples; arguments and errors as for `train_supervised`."""
    return train_supervised(config, "sft", TRAINED, sft(), _open)


def imitation_batch(
    segments: Sequence[Segment], packing: Packing, budget: int
) -> tuple[TrainBatch, int]:
    """Minibatch of the mean cross-entropy over trained tokens, and its microbatches in use.

    Args:
        budget: tokens of the longest response.
    """
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


class Imitation:
    """Task of supervised training: generated examples, or examples of files.

    Raises `ConfigError`.
    """

    labels: Mapping[str, str] = {"policy_nll": "nll", "heldout_nll": "held-out nll"}

    def __init__(self, config: SftConfig, start: Start, learner: Learner, signals: Signals):
        self._packing, self._budget = config.packing, config.packing.row_tokens
        self._scoring = config.examples_per_step, config.packing, signals
        self._learner, self._heldout = learner, list[Example]()
        self._segments: Callable[[int], list[Segment]]
        if config.data.source == GENERATED:
            self.steps, self.digests = config.total_steps, dict[str, str]()
            self._segments = functools.partial(example_segments, config, start.tokenizer)
            self._budget = config.max_response_tokens
            return
        examples, self.steps, numbers = open_examples(
            config, start.tokenizer, EXAMPLES, "examples_per_step"
        )
        self._segments = lambda step: own_segments([examples.training[i] for i in numbers(step)])
        self._heldout, self.digests = examples.heldout, {"data": examples.digest()}

    def batch(self, step: int, params: Any) -> tuple[TrainBatch, int, dict[str, float]]:
        return *imitation_batch(self._segments(step), self._packing, self._budget), {}

    def measure_training(self, params: Any) -> dict[str, float]:
        return {}  # an update measures its own tokens

    def measure_heldout(self, params: Any) -> dict[str, float]:
        """Mean over tokens of -log p."""
        total = tokens = 0.0
        for one, logprobs in score_responses(self._learner, params, self._heldout, *self._scoring):
            weights = np.asarray(one.token_weights)
            total, tokens = total + weights @ logprobs, tokens + weights.sum()
        return {"heldout_nll": -float(total / tokens)} if tokens else {}


def _open(
    config: SftConfig, start: Start, learner: Learner, signals: Signals
) -> tuple[Imitation, Callable[[], Any]]:
    return Imitation(config, start, learner, signals), start.load
