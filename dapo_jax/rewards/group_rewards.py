"""Rewards of a group: built-in parts, parts of workers, and their weighted sum."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from dapo_jax.config.experiment import SHAPING, Config
from dapo_jax.types.structs import (
    Completion,
    FailedResponse,
    Failure,
    Group,
    Outcome,
    Prompt,
    Verdict,
    reaches,
    repetition,
)


def overlong_punishment(
    response_tokens: np.ndarray, max_response_tokens: int, buffer_tokens: int
) -> np.ndarray:
    """Return the soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), in [-1, 0].

    0 up to `max_response_tokens - buffer_tokens`, then falling linearly to -1 at the maximum.
    Only response tokens count, not characters and not the prompt.
    """
    beyond = np.asarray(response_tokens) - (max_response_tokens - buffer_tokens)
    return -np.clip(beyond / buffer_tokens, 0.0, 1.0)


def length_penalties(correct: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the pass rate times each response's fraction of the longest one's tokens.

    As the linear penalty of prime-rl for output tokens; a prompt that nothing solves has none.
    """
    return correct.mean() * tokens / max(1, tokens.max())


# Built-in parts from a verdict: (config, completion, verdict) -> unweighted reward.
RULES: dict[str, Callable[[Config, Completion, Verdict], float]] = {
    "rule": lambda config, completion, verdict: (
        config.algorithm.reward_correct if verdict.correct else config.algorithm.reward_wrong
    ),
    "format": lambda config, completion, verdict: float(verdict.extracted is not None),
    "repetition": lambda config, completion, verdict: -repetition(completion.drawn_tokens),
    "environment": lambda config, completion, verdict: sum(
        completion.rewards[-1:] if config.environment.rewards == "last" else completion.rewards
    ),
}
GYM = "gym"  # score of a reasoning-gym problem's own scorer; elsewhere 1 if correct, else 0
NOT_FINITE = Failure(Outcome.USER_ERROR, "the reward is not a finite number")
TESTS = "tests"  # fraction of the tests that a program passes
TRAINER_PARTS = ("rule", "format", "repetition", "model", "environment", GYM, TESTS)


def reward_parts(
    config: Config,
    completions: tuple[Completion, ...],
    verdicts: tuple[Verdict, ...],
    model_scores: np.ndarray | None,
) -> dict[str, np.ndarray]:
    """Return the weighted parts by name, each [G] float64; NaN if a function failed."""
    parts = {}
    for name, weight in config.reward.weights().items():
        if name in RULES:
            pairs = zip(completions, verdicts, strict=True)
            values = [RULES[name](config, completion, verdict) for completion, verdict in pairs]
        elif name == "model":
            values = model_scores
        else:
            values = [verdict.parts.get(name, np.nan) for verdict in verdicts]
        parts[name] = weight * np.array(values, np.float64)
    if config.algorithm.overlong_punishment:
        lengths = np.array([len(completion) for completion in completions])
        budget = config.drawn_budget()
        buffer = max(1, round(config.algorithm.overlong_buffer_share * budget))
        parts["overlong"] = overlong_punishment(lengths, budget, buffer)
    return parts


def _add_step_rewards(verdict: Verdict, completion: Completion, weight: float) -> Verdict:
    """Add the rewards of the environment's steps to the last tokens of their turns."""
    if not len(completion):
        return verdict
    turns = [turn.tokens for turn in completion.turns if turn.drawn] or [len(completion)]
    ends = np.cumsum(turns)[: len(completion.rewards)]
    rewards = np.zeros(len(completion))
    rewards[ends - 1] = weight * np.array(completion.rewards)
    if verdict.token_rewards is not None:
        rewards += verdict.token_rewards
    return dataclasses.replace(verdict, token_rewards=rewards.tolist())


def reward_group(
    config: Config,
    prompt: Prompt,
    completions: tuple[Completion, ...],
    verdicts: tuple[Verdict, ...],
    model_scores: np.ndarray | None = None,
) -> Group:
    """Return a group with its rewards and correctness; an empty response is never correct.

    Responses without a reward are in `Group.failed` only.

    Args:
        model_scores: [G] scores of the learned reward model, if the config has one.
    """
    verdicts = tuple(
        verdict if len(completion) else dataclasses.replace(verdict, correct=False, extracted=None)
        for completion, verdict in zip(completions, verdicts, strict=True)
    )
    weight = config.reward.weights().get("environment")
    if weight is not None and config.environment.rewards == "steps":
        pairs = zip(verdicts, completions, strict=True)
        verdicts = tuple(_add_step_rewards(verdict, done, weight) for verdict, done in pairs)
    parts = reward_parts(config, completions, verdicts, model_scores)
    zero = np.zeros(len(verdicts))
    raw = sum((v for name, v in parts.items() if name not in SHAPING), zero)
    correct = np.array([verdict.correct for verdict in verdicts], bool)
    if config.reward.correct == "threshold":
        tokens = np.array([len(completion) for completion in completions])
        sizes = sum(map(np.abs, parts.values()), zero)
        correct = reaches(raw, config.reward.threshold, sizes) & (tokens > 0)
    if coefficient := config.algorithm.length_penalty:
        tokens = np.array([len(completion) for completion in completions])
        parts["length"] = -coefficient * length_penalties(correct, tokens)
    rewards = sum(parts.values(), zero)
    has_reward = np.array([verdict.failure is None for verdict in verdicts]) & np.isfinite(rewards)
    pairs = zip(completions, verdicts, has_reward, strict=True)
    return Group(
        prompt,
        tuple(itertools.compress(completions, has_reward)),
        tuple(itertools.compress(verdicts, has_reward)),
        {name: part[has_reward] for name, part in parts.items()},
        rewards[has_reward],
        raw[has_reward],
        correct[has_reward],
        tuple(
            FailedResponse(done, (verdict.failure or NOT_FINITE)._replace(counts=verdict.parts))
            for done, verdict, whole in pairs
            if not whole
        ),
    )
